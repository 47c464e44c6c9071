"""The content parts of Realtime items: what a client sends, what is shown of them, and the same as parts of a
chat message. What a medium may be is checked with those (`gateway/media_parts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gateway.json_body import show
from pipeline.errors import InvalidRequest
from pipeline.values import Json

MAX_PARTS: Final = 1024  # of one item: reading them takes about 2 ms
_TEXTS: Final = ("input_text", "output_text")
# Where a medium's data is, and what may be said of it.
_MEDIA: Final = {
    "input_image": ("image_url", ("detail",)),
    "input_audio": ("audio", ("format", "transcript")),
}
_PARTS: Final = {
    "user": ("input_text", "input_image", "input_audio"),
    "system": ("input_text",),
    "assistant": ("output_text",),
}
ROLES: Final = tuple(_PARTS)


@dataclass(frozen=True, slots=True)
class Part:
    """One content part. `data`: an image's URL, or a sound's bytes in base64, as the client sent them.

    `others`: further fields of an image or a sound that are shown again (detail, format, transcript).
    """

    type: str  # input_text, output_text, input_image, input_audio
    text: str = ""
    data: str = field(default="", repr=False)
    others: tuple[tuple[str, str], ...] = ()

    @property
    def num_bytes(self) -> int:
        """About what it takes to keep: a sound as it came and as a chat has it; of both, the decoded file."""
        copies = 2 if self.type == "input_audio" else 1
        size = num_bytes(self.data)
        return (
            num_bytes(self.text)
            + copies * size
            + size * 3 // 4
            + sum(num_bytes(value) for _, value in self.others)
        )

    def wire(self, with_media: bool) -> dict[str, Json]:
        """The part as events show it. `with_media`: with the data of an image or a sound."""
        if self.type in _TEXTS:
            return {"type": self.type, "text": self.text}
        shown = {"type": self.type, **dict(self.others)}
        return {**shown, _MEDIA[self.type][0]: self.data} if with_media else shown


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
    if kind not in _MEDIA:
        return Part(kind, _text_of(part, "text", param))
    key, other_names = _MEDIA[kind]
    if isinstance(part.get(key), dict):  # as in a chat's image_url
        part, key, param = part[key], "url", f"{param}.{key}"
    others = tuple((name, _text_of(part, name, param)) for name in other_names if part.get(name) is not None)
    return Part(kind, data=_text_of(part, key, param), others=others)


def _text_of(part: dict[str, Any], key: str, param: str) -> str:
    text = part.get(key)
    if not isinstance(text, str):
        got = show(text, is_text=True)
        raise InvalidRequest(f"'{param}.{key}' must be a string, got {got}.", f"{param}.{key}")
    return text


def chat_content(parts: Sequence[Part]) -> str | list[str | dict[str, Any]]:
    """The content of a chat message with these parts: a plain string if it is one text."""
    if len(parts) == 1 and parts[0].type in _TEXTS:
        return parts[0].text
    return [_chat_part(part) for part in parts]


def _chat_part(part: Part) -> dict[str, Any]:
    return {"type": "text", "text": part.text} if part.type in _TEXTS else part.wire(with_media=True)


def cut(parts: Sequence[Part], index: int, text_end: int) -> tuple[Part, ...]:
    """The parts up to the first `text_end` characters of the one at `index`; those after it are dropped.

    One that becomes empty is dropped, too, unless it is the first.
    """
    if not text_end and index:
        return tuple(parts[:index])
    return (*parts[:index], replace(parts[index], text=parts[index].text[:text_end]))


def num_bytes(text: str) -> int:
    """Of its UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
