"""What an image file is by its first bytes, and of how many blocks it is made: chunks, segments, scans.

Decoders go over a file's blocks in Python, one microsecond or more each, and over all pixels once for each
scan of a JPEG. So a file within its limits of bytes and pixels can cost minutes: 16 MB of fill bytes take
6 s to open, and 300,000 scans of nothing half an hour to decode. Here they are counted, and no more is read.
Not here: width and height (`gateway/image_files.py`), and pixels (`backend/vllm_media.py`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import Final

FORMATS: Final = ("png", "jpeg", "webp", "gif")
MAX_BLOCKS: Final = 16_384  # a PNG of 16 MB in the smallest chunks that are usual has 4,096
MAX_SCANS: Final = 100  # progressive JPEGs have 10
_SLICE_BYTES: Final = 256 << 10  # searched at once, up to 5 ms in which no other thread runs
_SOS, _EOI, _FILL = 0xDA, 0xD9, 0xFF
_BARE_MARKERS: Final = frozenset((0x00, 0x01, *range(0xD0, 0xDA)))  # no length follows them
_MARKER: Final = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # among a scan's data


def format_of(data: bytes) -> str | None:
    """One of `FORMATS` by the first bytes, or None."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "webp"
    return "gif" if data.startswith((b"GIF87a", b"GIF89a")) else None


def check_blocks(data: bytes, form: str) -> None:
    """Raises `ValueError` for too many blocks, whose text goes on after the image's name.

    What is broken is left to the decoder.
    """
    walk = _WALKS.get(form)
    if walk is None:  # WebP is read in C, and its blocks cost nothing
        return
    num_scans = 0
    for index, is_scan in enumerate(walk(data)):
        num_scans += is_scan
        if index >= MAX_BLOCKS:
            raise ValueError(f"is a {form} image of more than {MAX_BLOCKS} blocks.")
        if num_scans > MAX_SCANS:
            raise ValueError(f"is a {form} image of more than {MAX_SCANS} scans.")


def _png(data: bytes) -> Iterator[bool]:
    """Each chunk: length, name, data, sum."""
    place = 8
    while place + 8 <= len(data):
        yield False
        place += 12 + int.from_bytes(data[place : place + 4])


def _gif(data: bytes) -> Iterator[bool]:
    """Each block before the first image's pixels, and each byte between blocks."""
    if len(data) < 13:
        return
    place = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while place < len(data) and data[place] not in b",;":
        yield False
        if data[place] != ord("!"):
            place += 1
            continue
        place += 2
        while place < len(data) and data[place]:
            yield False
            place += 1 + data[place]
        place += 1


def _jpeg(data: bytes) -> Iterator[bool]:
    """Each segment, each byte between them, and each scan (True)."""
    place = 2
    while place + 2 <= len(data):
        marker = data[place + 1] if data[place] == _FILL else None
        yield marker == _SOS
        if marker is None or marker == _FILL:
            place += 1
        elif marker in _BARE_MARKERS:
            place += 2
        else:
            place = _after_segment(data, place)
        if marker == _SOS:
            break
    while (place := _next_marker(data, place)) >= 0 and data[place + 1] != _EOI:
        yield data[place + 1] == _SOS
        place = _after_segment(data, place)


def _after_segment(data: bytes, place: int) -> int:
    """Two bytes of marker, and two of the length, which counts itself."""
    length = struct.unpack_from(">H", data, place + 2)[0] if place + 4 <= len(data) else 0
    return place + 2 + max(2, length)


def _next_marker(data: bytes, place: int) -> int:
    """Where a scan ends; -1 if it does not."""
    while place < len(data):
        found = _MARKER.search(data, place, place + _SLICE_BYTES + 1)
        if found is not None:
            return found.start()
        place += _SLICE_BYTES
    return -1


_WALKS: Final[dict[str, Callable[[bytes], Iterator[bool]]]] = {"png": _png, "gif": _gif, "jpeg": _jpeg}
