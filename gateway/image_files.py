"""What an image file says of itself: format, width and height. No pixel is decoded.

Pillow reads the head, as it will in the engine: two readers that disagree about a file's size are how a limit
is passed. Its own formats are many and some run programs, so only four are tried, told by their first bytes.
Its own limit of pixels is not used, for that is a global variable that only warns. Importing this takes 20 ms
and 3 MB: it is done when the first image comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Final

from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from pipeline.image_blocks import FORMATS, check_blocks, format_of

_OPENERS: Final[dict[str, Callable[[BytesIO], ImageFile]]] = {
    "png": PngImageFile,
    "jpeg": JpegImageFile,
    "webp": WebPImageFile,
    "gif": GifImageFile,
}


@dataclass(frozen=True, slots=True)
class ImageHead:
    """Of an animation the first frame counts, which is what the engine sees."""

    format: str
    width: int
    height: int


def read_image(data: bytes) -> ImageHead:
    """The head of an image file. Raises `ValueError`, whose text goes on after the image's name."""
    name = format_of(data)
    if name is None:
        raise ValueError(f"is no image in one of the formats {', '.join(FORMATS)}.")
    check_blocks(data, name)
    try:
        with _OPENERS[name](BytesIO(data)) as image:
            width, height = image.size
    except Exception as error:  # a reader of foreign bytes raises whatever it likes; its words may quote them
        raise ValueError(f"is a broken {name} image.") from error
    if width < 1 or height < 1:
        raise ValueError(f"is a {name} image of {width} x {height} pixels.")
    return ImageHead(name, width, height)
