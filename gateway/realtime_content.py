"""The content parts of Realtime items: what a client sends, what is shown of them, and the same as parts of a
chat message. How parts of a chat message are checked is in `gateway/chat_messages.py`.
"""

from __future__ import annotations

import binascii
import struct
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gateway.json_body import show
from pipeline.errors import InvalidRequest
from pipeline.values import Json

MAX_PARTS: Final = 1024  # of one item: reading them takes about 2 ms
PCM_HZ: Final = 24_000  # of raw sound: the Realtime API's only rate, 16 bits, one channel
# The first bytes of sound files; what begins otherwise is raw.
_SOUND_FILES: Final = {b"RIFF": "wav", b"fLaC": "flac", b"OggS": "ogg", b"ID3": "mp3"}
_TEXTS: Final = ("input_text", "output_text")
_PARTS: Final = {
    "user": ("input_text", "input_image", "input_audio"),
    "system": ("input_text",),
    "assistant": ("output_text",),
}
ROLES: Final = tuple(_PARTS)


@dataclass(frozen=True, slots=True)
class Part:
    """One content part. `data`: an image's URL, or a sound's bytes in base64, as the client sent them.

    `transcript` and `detail` are only shown again.
    """

    type: str  # input_text, output_text, input_image, input_audio
    text: str = ""
    data: str = field(default="", repr=False)
    transcript: str | None = None
    detail: str | None = None

    @property
    def num_bytes(self) -> int:
        """About what it takes to keep: a sound is kept twice, as it came and as a chat has it."""
        text = len(self.text) if self.text.isascii() else len(self.text.encode("utf-8", "surrogatepass"))
        copies = 2 if self.type == "input_audio" else 1
        return text + copies * len(self.data) + len(self.transcript or "")

    def wire(self, with_media: bool) -> dict[str, Json]:
        """The part as events show it. `with_media`: with the data of an image or a sound."""
        if self.type == "input_image":
            shown: dict[str, Json] = {"type": self.type}
            if with_media:
                shown["image_url"] = self.data
            return shown if self.detail is None else {**shown, "detail": self.detail}
        if self.type == "input_audio":
            shown = {"type": self.type, "transcript": self.transcript}
            return {**shown, "audio": self.data} if with_media else shown
        return {"type": self.type, "text": self.text}


def read_parts(content: Json, role: str, param: str) -> tuple[Part, ...]:
    """The parts of a message with this role; a plain string is one of text. Raises `InvalidRequest`."""
    text_type = _PARTS[role][0]
    if isinstance(content, str):
        return (Part(text_type, content),)
    if not isinstance(content, list):
        raise InvalidRequest(
            f"'{param}' must be an array or a string, got {show(content, is_text=True)}.", param
        )
    if not content and role != "assistant":
        raise InvalidRequest(f"'{param}' must have at least one part, got an empty array.", param)
    if len(content) > MAX_PARTS:
        raise InvalidRequest(
            f"'{param}' must have at most {MAX_PARTS} parts, got an array of {len(content)}.", param
        )
    return tuple(_part(part, role, f"{param}[{index}]") for index, part in enumerate(content))


def _part(part: Json, role: str, param: str) -> Part:
    allowed = _PARTS[role]
    if not isinstance(part, dict):
        raise InvalidRequest(f"'{param}' must be an object, got {show(part, is_text=True)}.", param)
    kind = part.get("type")
    if kind == "text":  # an older name
        kind = allowed[0]
    if kind not in allowed:
        raise InvalidRequest(
            f"'{param}.type' must be one of {', '.join(allowed)} with the role {role}; got {show(kind)}.",
            f"{param}.type",
        )
    if kind == "input_image":
        return _image(part, param)
    if kind == "input_audio":
        transcript = part.get("transcript")
        if transcript is not None:
            _text_of(part, "transcript", param)
        return Part(kind, data=_text_of(part, "audio", param), transcript=transcript)
    return Part(kind, _text_of(part, "text", param))


def _image(part: dict[str, Any], param: str) -> Part:
    url: Json = part.get("image_url")
    detail: Json = part.get("detail")
    if isinstance(url, dict):  # as in a chat's image_url
        url, detail = url.get("url"), url.get("detail", detail)
    if not isinstance(url, str):
        raise InvalidRequest(f"'{param}.image_url' must be a string, got {show(url)}.", f"{param}.image_url")
    if detail is not None and detail not in ("auto", "low", "high"):
        raise InvalidRequest(
            f"'{param}.detail' must be one of auto, low, high; got {show(detail)}.", f"{param}.detail"
        )
    return Part("input_image", data=url, detail=detail)


def _text_of(part: dict[str, Any], key: str, param: str) -> str:
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequest(f"'{param}.{key}' must be a string, got {show(text)}.", f"{param}.{key}")
    return text


def chat_content(parts: Sequence[Part], param: str) -> str | list[str | dict[str, Any]]:
    """The content of a chat message with these parts: a plain string if it is one text.

    Raises `InvalidRequest` for a sound that is none.
    """
    if len(parts) == 1 and parts[0].type in _TEXTS:
        return parts[0].text
    return [_chat_part(part, f"{param}[{index}]") for index, part in enumerate(parts)]


def _chat_part(part: Part, param: str) -> dict[str, Any]:
    if part.type == "input_image":
        return {"type": "image_url", "image_url": {"url": part.data}}
    if part.type == "input_audio":
        return {"type": "input_audio", "input_audio": _sound_file(part.data, f"{param}.audio")}
    return {"type": "text", "text": part.text}


def _sound_file(audio: str, param: str) -> dict[str, str]:
    """The sound as a chat has it. Raw samples get the head of a WAV file."""
    try:
        data = b64decode(audio, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(
            f"'{param}' must be base64, got a string of {len(audio)} characters that is not.", param
        ) from None
    for start, name in _SOUND_FILES.items():
        if data.startswith(start):
            return {"data": audio, "format": name}
    if not data or len(data) % 2:
        raise InvalidRequest(
            f"'{param}' must be a sound file or 16-bit samples at {PCM_HZ} Hz, got {len(data)} bytes.", param
        )
    return {"data": b64encode(_wav_head(len(data)) + data).decode(), "format": "wav"}


def _wav_head(num_bytes: int) -> bytes:
    """The 44 bytes before PCM samples: RIFF, the format, the length."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, PCM_HZ, 2 * PCM_HZ, 2, 16)
    return (
        struct.pack("<4sI4s", b"RIFF", 36 + num_bytes, b"WAVE")
        + form
        + struct.pack("<4sI", b"data", num_bytes)
    )


def cut(parts: Sequence[Part], index: int, text_end: int) -> tuple[Part, ...]:
    """The parts up to the first `text_end` characters of the one at `index`; those after it are dropped.

    One that becomes empty is dropped, too, unless it is the first.
    """
    if not text_end and index:
        return tuple(parts[:index])
    return (*parts[:index], replace(parts[index], text=parts[index].text[:text_end]))
