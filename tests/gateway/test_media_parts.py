"""Content parts that are images or sounds: every form of each, and errors that show no data."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.chat_messages import Message, to_messages
from gateway.media_parts import MEDIA_PARTS, OTHER_MEDIA_PARTS
from gateway.openai_schema import parse_chat
from pipeline.errors import InvalidRequest
from pipeline.values import MediaRef
from tests.gateway.bodies import chat

PATH = "messages[0].content[0]"
URL = "data:image/png;base64,AAAA"
SECRET = "c2VjcmV0" * 20


def media_in(part: Any, role: str = "user") -> MediaRef:
    body = chat(messages=[{"role": role, "content": [part, {"type": "text", "text": "b"}]}])
    request = parse_chat(body)
    first, second = request.messages[0]["content"]
    assert second == {"type": "text", "text": "b"}
    found: MediaRef = first["media"]
    assert first == {"type": found.kind, "media": found}
    assert found.path == PATH
    return found


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_image", "image_url": {"url": URL}},
    ],
)
def test_forms_of_an_image(part: dict[str, Any]) -> None:
    for role in ("user", "system", "assistant", "own"):
        assert (media_in(part, role).kind, media_in(part, role).url) == ("image", URL)


@pytest.mark.parametrize(
    ("part", "url"),
    [
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            "data:audio/wav;base64,AAAA",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
            "data:audio/mp3;base64,AAAA",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "pcm16"}},
            "data:audio/pcm;rate=24000;base64,AAAA",
        ),
        ({"type": "input_audio", "audio": "AAAA"}, "data:audio/pcm;rate=24000;base64,AAAA"),
        (
            {"type": "input_audio", "audio": "AAAA", "transcript": "x"},
            "data:audio/pcm;rate=24000;base64,AAAA",
        ),
        ({"type": "input_audio", "audio": "AAAA", "format": "wav"}, "data:audio/wav;base64,AAAA"),
        ({"type": "audio_url", "audio_url": {"url": "https://a/b.wav"}}, "https://a/b.wav"),
        ({"type": "audio_url", "audio_url": "HTTP://a/b.wav"}, "HTTP://a/b.wav"),
    ],
)
def test_forms_of_a_sound(part: dict[str, Any], url: str) -> None:
    assert (media_in(part).kind, media_in(part).url) == ("audio", url)


def test_parts_of_a_message_that_did_not_come_as_a_body() -> None:
    message = Message(role="user", content=[{"type": "input_image", "image_url": URL}])
    [made] = to_messages([message], max_depth=8)
    assert made["content"][0]["media"] == MediaRef("image", URL, PATH)


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, ".image_url"),
        ({"type": "image_url", "image_url": None}, ".image_url"),
        ({"type": "image_url", "image_url": [SECRET]}, ".image_url"),
        ({"type": "image_url", "image_url": {}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": 3}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": SECRET}}, ".image_url.url"),
        ({"type": "image_url", "image_url": SECRET}, ".image_url"),
        ({"type": "image_url", "image_url": "file:///" + SECRET}, ".image_url"),
        ({"type": "image_url", "image_url": " data:" + SECRET}, ".image_url"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": 3}}, ".image_url.detail"),
        ({"type": "input_image", "image_url": URL, "detail": [SECRET]}, ".detail"),
        ({"type": "input_image", "file_id": SECRET}, ".image_url"),
        ({"type": "audio_url", "image_url": URL}, ".audio_url"),
        ({"type": "input_audio"}, ".input_audio"),
        ({"type": "input_audio", "input_audio": SECRET}, ".input_audio"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, ".input_audio.data"),
        ({"type": "input_audio", "input_audio": {"data": SECRET}}, ".input_audio.format"),
        ({"type": "input_audio", "input_audio": {"data": SECRET, "format": "g711"}}, ".input_audio.format"),
        ({"type": "input_audio", "input_audio": {"data": SECRET, "format": [SECRET]}}, ".input_audio.format"),
        ({"type": "input_audio", "audio": 3}, ".audio"),
        *(({"type": kind, "file": SECRET}, "") for kind in sorted(OTHER_MEDIA_PARTS)),
    ],
)
def test_bad_parts_are_named_and_no_data_is_shown(part: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        media_in(part)
    assert caught.value.param == PATH + param
    assert f"'{PATH}{param}'" in caught.value.message
    assert SECRET[:8] not in caught.value.message


@pytest.mark.parametrize("kind", sorted(MEDIA_PARTS))
def test_a_tool_s_result_is_text(kind: str) -> None:
    with pytest.raises(InvalidRequest, match="role 'tool' takes text only") as caught:
        media_in({"type": kind, "image_url": URL, "audio_url": URL}, "tool")
    assert caught.value.param == PATH


def test_no_part_shows_its_data_in_its_own_text() -> None:
    assert "AAAA" not in repr(media_in({"type": "image_url", "image_url": URL}))
