"""What a sound file says of itself: format and length. Nothing is decoded.

WAV and FLAC tell their length at the beginning, Ogg (Vorbis, Opus) in its last page, and MP3 in its bit rate.
A file can lie, and so the engine needs a limit of its own; what it can't do here is to cost anything.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

FORMATS: Final = ("wav", "flac", "ogg", "mp3")
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_MAX_CHUNKS: Final = 64  # of a WAV file before its samples
_MAX_PAGE_BYTES: Final = 27 + 255 + 255 * 255  # of Ogg (RFC 3533)
_OPUS_RATE: Final = 48_000  # of its granule positions, RFC 7845
# Of MPEG 1, and of 2 and 2.5, layer III, in kbit/s (ISO 11172-3, 13818-3); 0: free, or not allowed.
_MP3_RATES: Final = {
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0),
}


@dataclass(frozen=True, slots=True)
class SoundHead:
    """`length_s` None: the file does not tell."""

    format: str
    length_s: float | None


def format_of(data: bytes) -> str | None:
    """One of `FORMATS` by the first bytes, or None."""
    if data.startswith(b"RIFF") and data[8:12] == b"WAVE":
        return "wav"
    if data.startswith(b"fLaC"):
        return "flac"
    if data.startswith(b"OggS"):
        return "ogg"
    is_mpeg = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2  # sync word, layer III
    return "mp3" if is_mpeg or data.startswith(b"ID3") else None


def read_sound(data: bytes) -> SoundHead:
    """The head of a sound file. Raises `ValueError`, whose text goes on after the sound's name."""
    name = format_of(data)
    if name is None:
        raise ValueError(f"is no sound in one of the formats {', '.join(FORMATS)}.")
    try:
        length_s = {"wav": _wav_s, "flac": _flac_s, "ogg": _ogg_s, "mp3": _mp3_s}[name](data)
    except (struct.error, IndexError):
        raise ValueError(f"is a broken {name} file: it ends too soon.") from None
    return SoundHead(name, length_s)


def wav_head(num_bytes: int, rate: int) -> bytes:
    """What makes a WAV file of so many bytes of samples: 16 bits, little-endian, one channel. 44 bytes."""
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", 36 + num_bytes, b"WAVE", b"fmt ", 16, _PCM, 1),
        *(rate, 2 * rate, 2, 16, b"data", num_bytes),
    )


def _wav_s(data: bytes) -> float:
    """The samples that are there, whatever the file says there should be."""
    place, bytes_per_s = 12, 0
    for _ in range(_MAX_CHUNKS):
        size: int
        name, size = struct.unpack_from("<4sI", data, place)
        place += 8
        if name == b"fmt ":
            bytes_per_s = _wav_rate(data, place)
        elif name == b"data":
            if not bytes_per_s:
                break
            return max(0, min(size, len(data) - place)) / bytes_per_s
        place += size + size % 2
    raise ValueError("is a broken wav file: it has no samples.")


def _wav_rate(data: bytes, place: int) -> int:
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", data, place)
    if kind not in (_PCM, _FLOAT, _EXTENSIBLE):
        raise ValueError(f"is a wav file of the kind {kind}; only samples (PCM) are taken.")
    bytes_per_s: int = channels * rate * (bits // 8)
    if not bytes_per_s:
        raise ValueError(f"is a wav file of {channels} channels, {rate} Hz and {bits} bits.")
    return bytes_per_s


def _flac_s(data: bytes) -> float | None:
    """STREAMINFO, which comes first (RFC 9639, 8.2): 20 bits of rate, 3, 5, and 36 bits of length."""
    packed = int.from_bytes(struct.unpack_from("8s", data, 18)[0])
    rate, num_samples = packed >> 44, packed & ((1 << 36) - 1)
    if data[4] & 0x7F != 0 or not rate:
        raise ValueError("is a broken flac file: it does not begin with its rate.")
    return num_samples / rate if num_samples else None


def _ogg_s(data: bytes) -> float | None:
    """The last page tells how many samples have passed."""
    first = data[27 + data[26] :][:40]
    if first.startswith(b"OpusHead"):
        rate = _OPUS_RATE
    elif first.startswith(b"\x01vorbis"):
        (rate,) = struct.unpack_from("<I", first, 12)
    else:
        raise ValueError("is an ogg file of neither Opus nor Vorbis.")
    last = data.rfind(b"OggS", -_MAX_PAGE_BYTES)
    if last < 0 or not rate:
        return None
    (num_samples,) = struct.unpack_from("<q", data, last + 6)
    return num_samples / rate if num_samples > 0 else None


def _mp3_s(data: bytes) -> float | None:
    """As if the whole had the bit rate of the first frame."""
    place = 0
    if data.startswith(b"ID3"):  # its size has 7 bits a byte
        a, b, c, d = data[6:10]
        place = 10 + (a << 21 | b << 14 | c << 7 | d)
    place = data.find(b"\xff", place)
    if place < 0 or data[place + 1] & 0xE6 != 0xE2:
        return None
    kbits = _MP3_RATES[data[place + 1] & 0x18 == 0x18][data[place + 2] >> 4]
    return (len(data) - place) * 8 / (kbits * 1000) if kbits else None
