"""The head of an image file is read, its pixels are not."""

from __future__ import annotations

import io
import random
import warnings
import zlib
from typing import Any

import pytest
from PIL import Image

from gateway.image_files import ImageHead, read_image
from pipeline.image_blocks import FORMATS, MAX_BLOCKS
from tests.gateway.media_files import image, png_head


@pytest.mark.parametrize("form", FORMATS)
def test_head_of_every_format(form: str) -> None:
    assert read_image(image(form, (37, 21))) == ImageHead(form, 37, 21)


@pytest.mark.parametrize("form", ["gif", "webp", "png"])
def test_an_animation_has_the_size_of_its_first_frame(form: str) -> None:
    file = io.BytesIO()
    frames = [Image.new("RGB", (9, 7), color) for color in ("red", "green", "blue")]
    frames[0].save(file, form, save_all=True, append_images=frames[1:])
    assert read_image(file.getvalue()) == ImageHead(form, 9, 7)


@pytest.mark.parametrize("form", ["bmp", "tiff", "ppm", "pdf", "eps", "ico"])
def test_other_formats_are_refused(form: str) -> None:
    with pytest.raises(ValueError, match="is no image in one of the formats png, jpeg, webp, gif"):
        read_image(image(form, (16, 16)))


@pytest.mark.parametrize("data", [b"", b"x", b"<svg/>", b"\x89PNG", b"RIFF\0\0\0\0WAVE"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="is no image"):
        read_image(data)


def test_a_bomb_is_measured_and_not_opened() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow's own, which its limit gives
        assert read_image(png_head(100_000, 100_000)) == ImageHead("png", 100_000, 100_000)


@pytest.mark.parametrize("chunk", ["zTXt", "iTXt", "iCCP"])
def test_texts_that_grow_are_bounded(chunk: str) -> None:
    bomb = zlib.compress(bytes(4 << 20), 9)
    data = {"zTXt": b"a\0\0", "iTXt": b"a\0\1\0\0\0", "iCCP": b"a\0\0"}[chunk] + bomb
    with pytest.raises(ValueError, match="is a broken png image"):
        read_image(png_head(4, 4, *[(chunk.encode(), data)] * 3))


@pytest.mark.parametrize("form", FORMATS)
def test_damaged_files_raise_nothing_else(form: str) -> None:
    whole, rng = image(form, (40, 30)), random.Random(form)
    for _ in range(150):
        data = bytearray(whole[: rng.randrange(4, len(whole))])
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        head: Any = None
        try:
            head = read_image(bytes(data))
        except ValueError as problem:
            assert str(problem).startswith("is ")  # noqa: PT017 - most raise, some do not
        assert head is None or head.width * head.height > 0


def test_an_image_of_no_pixels_is_refused() -> None:
    with pytest.raises(ValueError, match="png image"):
        read_image(png_head(0, 5))


def test_a_file_of_a_million_blocks_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [(b"abCd", b"")] * MAX_BLOCKS
    assert read_image(png_head(4, 4, *blocks[:1000])) == ImageHead("png", 4, 4)
    monkeypatch.setattr("gateway.image_files._OPENERS", {})
    with pytest.raises(ValueError, match=f"is a png image of more than {MAX_BLOCKS} blocks"):
        read_image(png_head(4, 4, *blocks))
