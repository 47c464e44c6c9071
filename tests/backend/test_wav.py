"""WAV files into samples."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import wave

import pytest

from backend.wav import WavError, decode_wav, is_wav

np = pytest.importorskip("numpy")

WAVE = np.sin(np.arange(600, dtype=np.float32) / 20) * np.float32(0.5)


def wav(samples: bytes, kind: int = 1, bits: int = 16, channels: int = 1, rate: int = 8000) -> bytes:
    head = struct.pack("<HHIIHH", kind, channels, rate, 0, 0, bits)
    body = b"fmt " + struct.pack("<I", len(head)) + head + b"LIST\x03\0\0\0abc\0"
    body += b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WAVE" + body


def packed(bits: int) -> bytes:
    values = (WAVE.astype(np.float64) * 2 ** (bits - 1)).astype(np.int64)
    if bits == 8:
        return bytes((values + 128).astype(np.uint8))
    return b"".join(int(value).to_bytes(bits // 8, "little", signed=True) for value in values)


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_whole_numbers_of_any_width_are_samples_between_minus_one_and_one(bits: int) -> None:
    samples, rate = decode_wav(wav(packed(bits), bits=bits), 10)
    assert (rate, samples.dtype) == (8000, np.float32)
    assert np.abs(samples - WAVE).max() <= 2.0 ** (1 - bits) + 1e-6


@pytest.mark.parametrize(("bits", "dtype"), [(32, "<f4"), (64, "<f8")])
def test_floats_are_taken_as_they_are(bits: int, dtype: str) -> None:
    samples, _ = decode_wav(wav(WAVE.astype(dtype).tobytes(), kind=3, bits=bits), 10)
    assert np.array_equal(samples, WAVE)


def test_file_of_the_standard_library_is_read_and_its_channels_are_averaged() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(2)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(struct.pack("<4h", 16384, 0, -16384, -16384))
    assert is_wav(file.getvalue())
    samples, rate = decode_wav(memoryview(file.getvalue()), 10)
    assert (samples.tolist(), rate) == ([0.25, -0.5], 16_000)


def test_extensible_format_and_an_unknown_length_are_read() -> None:
    head = struct.pack("<HHIIHH", 0xFFFE, 1, 8000, 0, 0, 16) + struct.pack("<HHIH", 22, 16, 0, 1) + bytes(14)
    body = b"fmt " + struct.pack("<I", len(head)) + head + b"data\xff\xff\xff\xff" + packed(16)
    samples, _ = decode_wav(b"RIFF\xff\xff\xff\xffWAVE" + body, 10)
    assert len(samples) == len(WAVE)


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (wav(packed(16))[:-10], "cut off: 1190 bytes of 1200"),
        (wav(packed(16))[:30], "its format is cut off|it is cut off"),
        (wav(b"")[:12], "no samples"),
        (wav(packed(16), kind=85), "of kind 85 with 16 bits"),
        (wav(packed(16), bits=12), "with 12 bits"),
        (wav(packed(16), channels=0), "0 channels"),
        (wav(packed(16), rate=0), "at 0 Hz"),
        (wav(packed(16), rate=10), "lasts 60 s; the limit is 10 s"),
        (wav(struct.pack("<f", float("nan")), kind=3, bits=32), "no numbers"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(file: bytes, problem: str) -> None:
    with pytest.raises(WavError, match=problem):
        decode_wav(file, 10)


def test_random_damage_gives_samples_or_a_named_error() -> None:
    rng, whole = random.Random(3), wav(packed(16))
    for _ in range(500):
        file = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            file[rng.randrange(60)] = rng.randrange(256)
        with contextlib.suppress(WavError):
            decode_wav(bytes(file[: rng.choice((len(file), rng.randrange(len(file))))]), 10)


def test_only_the_first_samples_are_read_and_nothing_behind_them() -> None:
    chunk = b"data" + struct.pack("<I", 2) + b"\0\x40"
    file = wav(b"\0\x20", rate=500)
    broken = b"junk" + struct.pack("<I", 99)  # would be cut off
    samples, rate = decode_wav(file + chunk + broken, 10)
    assert (samples.tolist(), rate) == ([0.25], 500)
    before = file[:12] + (b"junk" + bytes(4)) * 64 + file[12:]
    with pytest.raises(WavError, match="has no samples"):
        decode_wav(before, 10)


def test_numbers_beyond_a_float_are_refused() -> None:
    with pytest.raises(WavError, match="samples that are no numbers"):
        decode_wav(wav(struct.pack("<d", 1e300), kind=3, bits=64), 10)
