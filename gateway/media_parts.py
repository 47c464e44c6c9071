"""Content parts of a message that are images or sounds -> `MediaRef`: types and names of fields, no more.

What is behind an address or in the data is looked at when the request is known to be good
(`gateway/media.py`), and whether the model takes it is not known here (`pipeline/media.py`).
"""

from __future__ import annotations

import re
from typing import Any, Final

from gateway.json_body import show
from pipeline.errors import InvalidRequest
from pipeline.values import MediaKind, MediaRef

# Kinds of part that are taken. Realtime's parts have the same names, and `audio` for the data.
MEDIA_PARTS: Final[dict[str, MediaKind]] = {
    "image_url": "image",
    "input_image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
}
# Kinds that are known, and not served.
OTHER_MEDIA_PARTS: Final = frozenset(
    {"image_embeds", "audio_embeds", "video_url", "video_embeds", "input_video", "input_file", "file"}
)
# What `input_audio` may be. The file itself tells what it is, but raw samples cannot.
AUDIO_FORMATS: Final = ("wav", "mp3", "flac", "ogg", "opus", "pcm16")
PCM_TYPE: Final = "audio/pcm"  # 16 bits, little-endian, one channel
PCM_RATE: Final = 24_000  # Hz, as Realtime has it
_SCHEMES: Final = re.compile(r"(?:data|https?):", re.IGNORECASE)


def media_part(kind: str, part: dict[str, Any], param: str) -> dict[str, Any]:
    """One part of a kind in `MEDIA_PARTS`, as templates' messages have it. Raises `InvalidRequest`.

    `detail` is checked and not used: the model's own processor decides how large it sees an image.
    """
    if kind == "input_audio":
        url = _input_audio(part, param)
    else:
        url = _address(part, "audio_url" if kind == "audio_url" else "image_url", param)
    medium = MEDIA_PARTS[kind]
    return {"type": medium, "media": MediaRef(medium, url, param)}


def _address(part: dict[str, Any], key: str, param: str) -> str:
    """`{"url": …, "detail": …}`, or the address alone."""
    value, path = part.get(key), f"{param}.{key}"
    _check_detail(part, param)
    if isinstance(value, dict):
        _check_detail(value, path)
        value, path = value.get("url"), f"{path}.url"
    if not isinstance(value, str):
        raise InvalidRequest(f"'{path}' must be a string, got {show(value, is_text=True)}.", path)
    if _SCHEMES.match(value) is None:
        raise InvalidRequest(
            f"'{path}' must begin with data:, https: or http:, got {show(value, is_text=True)}.", path
        )
    return value


def _check_detail(holder: dict[str, Any], param: str) -> None:
    detail = holder.get("detail")
    if detail is not None and not isinstance(detail, str):
        raise InvalidRequest(
            f"'{param}.detail' must be a string, got {show(detail, is_text=True)}.", f"{param}.detail"
        )


def _input_audio(part: dict[str, Any], param: str) -> str:
    """`{"input_audio": {"data": …, "format": …}}`, or Realtime's `{"audio": …}`, which is raw samples."""
    holder, path, key, default = part.get("input_audio"), f"{param}.input_audio", "data", None
    if holder is None and "audio" in part:
        holder, path, key, default = part, param, "audio", "pcm16"
    if not isinstance(holder, dict):
        raise InvalidRequest(f"'{path}' must be an object, got {show(holder, is_text=True)}.", path)
    data, form = holder.get(key), holder.get("format") or default
    if not isinstance(data, str):
        raise InvalidRequest(
            f"'{path}.{key}' must be a string, got {show(data, is_text=True)}.", f"{path}.{key}"
        )
    if form not in AUDIO_FORMATS:
        raise InvalidRequest(
            f"'{path}.format' must be one of {', '.join(AUDIO_FORMATS)}; got {show(form, is_text=True)}.",
            f"{path}.format",
        )
    media_type = f"{PCM_TYPE};rate={PCM_RATE}" if form == "pcm16" else f"audio/{form}"
    return f"data:{media_type};base64,{data}"
