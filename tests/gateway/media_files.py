"""Images and sounds as files, made in microseconds."""

from __future__ import annotations

import base64
import io
import struct
import zlib

from PIL import Image

from gateway.sound_files import wav_head


def image(form: str = "png", size: tuple[int, int] = (8, 6), color: str = "red") -> bytes:
    """An image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, form)
    return file.getvalue()


def png_head(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG that says it has so many pixels, and has none."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", b""), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )


def wav(length_s: float = 0.1, rate: int = 8000) -> bytes:
    """Silence."""
    samples = bytes(2 * int(length_s * rate))
    return wav_head(len(samples), rate) + samples


def data_uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
