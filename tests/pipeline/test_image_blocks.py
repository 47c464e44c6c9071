"""Blocks of image files are counted as their decoders meet them: real files pass, hollow ones do not."""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Callable

import pytest
from PIL import Image

from pipeline.image_blocks import FORMATS, MAX_BLOCKS, MAX_SCANS, check_blocks, format_of
from tests.gateway.media_files import image, png_head


def noise(form: str, **options: object) -> bytes:
    """An image that does not shrink."""
    file = io.BytesIO()
    Image.frombytes("RGB", (700, 500), random.Random(form).randbytes(1_050_000)).save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("form", FORMATS)
def test_images_pass(form: str) -> None:
    for data in (image(form), noise(form)):
        assert format_of(data) == form
        check_blocks(data, form)


def test_progressive_images_pass_with_anything_behind_their_end() -> None:
    data = noise("jpeg", progressive=True, quality=95)
    assert data.count(b"\xff\xda") > 5
    check_blocks(data + b"\xff\xda\0\2" * 1000, "jpeg")  # cameras put films there


def scans(number: int) -> bytes:
    """A progressive JPEG whose scans are those of an image, and one of them again and again."""
    data = noise("jpeg", progressive=True)
    start = data.rindex(b"\xff\xda")
    return data[:start] + b"\xff\xda\0\x08\1\1\0\1\x3f\0\0\xff\0" * (
        number - data.count(b"\xff\xda", 0, start)
    )


def test_scans_are_counted() -> None:
    check_blocks(scans(MAX_SCANS), "jpeg")
    with pytest.raises(ValueError, match=r"is a jpeg image of more than 100 scans\."):
        check_blocks(scans(MAX_SCANS + 1), "jpeg")


def repeated(form: str, block: bytes) -> Callable[[int], bytes]:
    """A file with so many of these behind its head."""
    whole = image(form)
    place = {"jpeg": 2, "gif": 13}[form]
    if form == "gif" and whole[10] & 0x80:
        place += 3 << (whole[10] & 7) + 1
    return lambda number: whole[:place] + block * number + whole[place:]


@pytest.mark.parametrize(
    "file",
    [
        lambda number: png_head(4, 4, *[(b"abCd", b"")] * number),
        lambda number: (
            image() + struct.pack(">I4sI", 0, b"abCd", 0) * number
        ),  # read at the end of the pixels
        repeated("jpeg", b"\xff"),
        repeated("jpeg", b"\xff\xd0"),
        repeated("jpeg", b"\xff\xfe\0\2"),
        repeated("jpeg", b"\xff\xfe\0\0"),
        lambda number: image("jpeg")[:-2] + b"\xff\xfe\0\2" * number,  # behind the first scan
        repeated("gif", b"\0"),
        repeated("gif", b"!\xfe\0"),
        repeated("gif", b"!\xfe\1a\0"),
        lambda number: repeated("gif", b"!\xfe" + b"\1a" * number + b"\0")(1),
    ],
)
def test_blocks_are_counted(file: Callable[[int], bytes]) -> None:
    few, many = file(100), file(MAX_BLOCKS + 1)
    form = format_of(few)
    assert form is not None
    check_blocks(few, form)
    with pytest.raises(ValueError, match=f"is a {form} image of more than {MAX_BLOCKS} blocks"):
        check_blocks(many, form)


@pytest.mark.parametrize("form", FORMATS)
def test_whatever_the_bytes_are_nothing_else_is_raised(form: str) -> None:
    whole, rng = image(form, (40, 30)), random.Random(form)
    for end in range(12, len(whole)):
        check_blocks(whole[:end], form)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(12, len(data))] = rng.randrange(256)
        check_blocks(bytes(data), form)
    check_blocks(whole[:12] + b"\xff" * 100 + b"\xff\xda" * 9, form)
