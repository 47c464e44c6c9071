"""Format and length of sound files, without decoding them."""

from __future__ import annotations

import random
import struct

import pytest

from gateway.sound_files import SoundHead, read_sound, wav_head
from tests.gateway.media_files import wav


def flac(rate: int, num_samples: int) -> bytes:
    packed = (rate << 44 | 1 << 41 | 15 << 36 | num_samples).to_bytes(8)
    return b"fLaC\0\0\0\x22" + bytes(10) + packed + bytes(16)


def ogg_page(data: bytes, granule: int) -> bytes:
    return b"OggS\0\2" + struct.pack("<qIII", granule, 1, 0, 0) + b"\1" + bytes([len(data)]) + data


def mp3(num_frames: int) -> bytes:
    """MPEG 1, layer III, 128 kbit/s, 44.1 kHz."""
    return (b"\xff\xfb\x90\x00" + bytes(413)) * num_frames


OPUS = b"OpusHead\1\1\0\0" + bytes(8)
VORBIS = b"\x01vorbis" + struct.pack("<IBI", 0, 1, 44_100) + bytes(8)


@pytest.mark.parametrize(
    ("data", "form", "length_s"),
    [
        (wav(1.5), "wav", 1.5),
        (wav_head(1 << 30, 8000) + bytes(16_000), "wav", 1.0),  # what is not there does not count
        (flac(44_100, 44_100 * 7), "flac", 7.0),
        (flac(44_100, 0), "flac", None),
        (ogg_page(OPUS, 0) + ogg_page(b"x" * 50, 48_000 * 3), "ogg", 3.0),
        (ogg_page(VORBIS, 0) + ogg_page(b"x" * 50, 44_100 * 3), "ogg", 3.0),
        (ogg_page(OPUS, 0), "ogg", None),
        (mp3(10), "mp3", pytest.approx(0.26, abs=0.01)),
        (b"ID3\4\0\0\0\0\1\0" + bytes(128) + mp3(10), "mp3", pytest.approx(0.26, abs=0.01)),
        (b"ID3\4\0\0\0\0\0\0", "mp3", None),
    ],
)
def test_heads(data: bytes, form: str, length_s: float | None) -> None:
    assert read_sound(data) == SoundHead(form, length_s)


def test_a_chunk_may_stand_before_the_samples() -> None:
    data = wav(1.0)
    with_list = data[:36] + b"LIST" + struct.pack("<I", 3) + b"abc\0" + data[36:]
    assert read_sound(with_list).length_s == 1.0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"OggS",
        b"fLaC",
        b"\xff\xd8\xff",
        b"RIFF\0\0\0\0WAVE",
        b"RIFF\0\0\0\0WAVEdata\4\0\0\0abcd",
        wav_head(4, 0) + b"abcd",
        flac(0, 5),
        ogg_page(b"theora", 0),
        wav(0.1).replace(b"fmt \x10\0\0\0\1\0", b"fmt \x10\0\0\0\2\0"),  # ADPCM
    ],
)
def test_what_is_no_sound_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^is "):
        read_sound(data)


def test_damaged_files_raise_nothing_else() -> None:
    rng = random.Random(3)
    for whole in (wav(0.01), flac(8000, 9), ogg_page(OPUS, 0) + ogg_page(b"x", 9), mp3(2)):
        for _ in range(100):
            data = bytearray(whole[: rng.randrange(4, len(whole))])
            data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                read_sound(bytes(data))
            except ValueError as problem:
                assert str(problem).startswith("is ")  # noqa: PT017 - most raise, some do not
