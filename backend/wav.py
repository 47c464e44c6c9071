"""WAV files into samples, integers and floats. numpy only.

Gateways make WAV files of bare samples, too. Every other format is a matter of the libraries that vLLM has,
see `backend.vllm_media`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_MAX_CHUNKS: Final = 64  # up to the samples
_ENDLESS: Final = 0xFFFFFFFF  # what a writer says that did not know the length
_DTYPES: Final = {
    (_PCM, 8): "u1",
    (_PCM, 16): "<i2",
    (_PCM, 32): "<i4",
    (_FLOAT, 32): "<f4",
    (_FLOAT, 64): "<f8",
}


class WavError(ValueError):
    """Not a WAV file that can be read; the message says why."""


def is_wav(data: Any) -> bool:
    return bytes(data[:4]) == b"RIFF" and bytes(data[8:12]) == b"WAVE"


def decode_wav(data: Any, max_s: float) -> tuple[Any, int]:
    """Mono samples between -1 and 1 (float32) and their rate; channels are averaged. Raises `WavError`."""
    import numpy as np

    form, body = _format_and_samples(data)
    kind, num_channels, rate, bits = _format(form)
    frame_bytes = num_channels * bits // 8
    num_frames = len(body) // frame_bytes
    if num_frames > max_s * rate:
        raise WavError(f"it lasts {num_frames / rate:.0f} s; the limit is {max_s:g} s")
    body = body[: num_frames * frame_bytes]
    if (kind, bits) == (_PCM, 24):
        wide = np.zeros((num_frames * num_channels, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
        values, scale = wide.view("<i4")[:, 0], 2.0**31
    else:
        values = np.frombuffer(body, _DTYPES[kind, bits])
        scale = 2.0 ** (bits - 1) if kind == _PCM else 1.0
    with np.errstate(over="ignore"):  # it is infinite then, and refused
        samples = values.astype(np.float32) / np.float32(scale)
    if (kind, bits) == (_PCM, 8):
        samples -= 1.0  # the only one without a sign
    if not np.isfinite(samples).all():
        raise WavError("it has samples that are no numbers")
    return samples.reshape(-1, num_channels).mean(axis=1, dtype=np.float32), rate


def _format_and_samples(data: Any) -> tuple[memoryview, memoryview]:
    """The first chunk of each; what follows them is not read, for a million empty chunks take 4 s."""
    form: memoryview | None = None
    for name, chunk in islice(_chunks(data), _MAX_CHUNKS):
        if name == b"fmt ":
            form = chunk
        elif name == b"data" and form is not None:
            return form, chunk
    raise WavError("it is cut off, or has no samples")


def _chunks(data: Any) -> Iterator[tuple[bytes, memoryview]]:
    """The file's chunks by name. One that is not whole raises `WavError`."""
    view, start = memoryview(data), 12
    while start + 8 <= len(view):
        name, num_bytes = struct.unpack_from("<4sI", view, start)
        start += 8
        if name == b"data" and num_bytes == _ENDLESS:
            num_bytes = len(view) - start
        if start + num_bytes > len(view):
            raise WavError(f"it is cut off: {len(view) - start} bytes of {num_bytes} are there")
        yield name, view[start : start + num_bytes]
        start += num_bytes + num_bytes % 2


def _format(chunk: memoryview) -> tuple[int, int, int, int]:
    """Kind of the samples, number of channels, rate, bits of a sample."""
    if len(chunk) < 16:
        raise WavError("its format is cut off")
    kind, num_channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if kind == _EXTENSIBLE and len(chunk) >= 26:
        kind = struct.unpack_from("<H", chunk, 24)[0]
    if (kind, bits) != (_PCM, 24) and (kind, bits) not in _DTYPES:
        raise WavError(f"its samples are of kind {kind} with {bits} bits; only uncompressed ones are taken")
    if not num_channels or not rate:
        raise WavError(f"it has {num_channels} channels at {rate} Hz")
    return kind, num_channels, rate, bits
