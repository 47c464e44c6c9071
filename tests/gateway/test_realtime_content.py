"""Content parts of an item: what is read, shown, and given to a chat message."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.realtime_content import MAX_PARTS, Part, chat_content, cut, num_bytes, read_parts
from tests.gateway.realtime_values import refusal

IMAGE = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("role", "content", "parts"),
    [
        ("user", "hi", (Part("input_text", "hi"),)),
        ("assistant", "hi", (Part("output_text", "hi"),)),
        ("user", [{"type": "input_text", "text": "a"}, {"type": "text", "text": ""}], None),
        ("system", [{"type": "input_text", "text": "a"}], (Part("input_text", "a"),)),
        ("assistant", [{"type": "text", "text": "a"}], (Part("output_text", "a"),)),
        ("assistant", [], ()),
        (
            "user",
            [{"type": "input_image", "image_url": IMAGE, "detail": "low", "other": 1}],
            (Part("input_image", data=IMAGE, others=(("detail", "low"),)),),
        ),
        (
            "user",
            [{"type": "input_image", "image_url": {"url": IMAGE, "detail": None}}],
            (Part("input_image", data=IMAGE),),
        ),
        (
            "user",
            [{"type": "input_audio", "audio": "AAAA", "transcript": "ah", "format": "wav"}],
            (Part("input_audio", data="AAAA", others=(("format", "wav"), ("transcript", "ah"))),),
        ),
    ],
)
def test_parts_are_read(role: str, content: Any, parts: tuple[Part, ...] | None) -> None:
    wanted = (Part("input_text", "a"), Part("input_text", "")) if parts is None else parts
    assert read_parts(content, role, "item.content") == wanted


@pytest.mark.parametrize(
    ("role", "content", "param", "said_of_it"),
    [
        ("user", None, "", "must be an array or a string, got null"),
        ("user", {"type": "input_text"}, "", "got an object with 1 keys"),
        ("user", [], "", "at least one part"),
        ("system", [], "", "at least one part"),
        ("user", [{}] * (MAX_PARTS + 1), "", "at most 1024 parts, got an array of 1025"),
        ("user", ["secret"], "[0]", "must be an object, got a string of 6 characters"),
        ("user", [{}], "[0].type", "input_text, input_image, input_audio with the role user; got null"),
        ("user", [{"type": []}], "[0].type", "got an array of 0"),
        ("user", [{"type": "output_text", "text": "a"}], "[0].type", 'got "output_text"'),
        (
            "system",
            [{"type": "input_image", "image_url": IMAGE}],
            "[0].type",
            "one of input_text with the role",
        ),
        (
            "assistant",
            [{"type": "output_audio", "audio": ""}],
            "[0].type",
            "one of output_text with the role",
        ),
        ("user", [{"type": "input_text"}], "[0].text", "must be a string, got null"),
        ("user", [{"type": "input_text", "text": "a"}, {"type": "text", "text": 3}], "[1].text", "got 3"),
        ("user", [{"type": "input_image"}], "[0].image_url", "must be a string, got null"),
        ("user", [{"type": "input_image", "image_url": {}}], "[0].image_url.url", "got null"),
        ("user", [{"type": "input_image", "image_url": IMAGE, "detail": 5}], "[0].detail", "got 5"),
        ("user", [{"type": "input_audio", "audio": 5}], "[0].audio", "must be a string, got 5"),
        ("user", [{"type": "input_audio", "audio": "", "format": []}], "[0].format", "an array of 0"),
    ],
)
def test_what_is_no_content_is_refused_by_name(role: str, content: Any, param: str, said_of_it: str) -> None:
    error = refusal(lambda: read_parts(content, role, "item.content"))
    assert error.param == f"item.content{param}"
    assert f"'{error.param}'" in str(error)
    assert said_of_it in str(error)
    assert "secret" not in str(error)


def test_the_data_of_a_medium_is_shown_only_where_it_is_asked_for() -> None:
    parts = read_parts(
        [
            {"type": "input_text", "text": "see"},
            {"type": "input_image", "image_url": IMAGE, "detail": "high"},
            {"type": "input_audio", "audio": "AAAA"},
        ],
        "user",
        "item.content",
    )
    assert [part.wire(with_media=False) for part in parts] == [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "detail": "high"},
        {"type": "input_audio"},
    ]
    assert [part.wire(with_media=True) for part in parts] == [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "detail": "high", "image_url": IMAGE},
        {"type": "input_audio", "audio": "AAAA"},
    ]


def test_one_text_is_a_chats_plain_string() -> None:
    text, image = Part("input_text", "a"), Part("input_image", data="")
    assert chat_content((text,)) == "a"
    assert chat_content((text, text)) == [{"type": "text", "text": "a"}] * 2
    assert chat_content((image,)) == [{"type": "input_image", "image_url": ""}]


def test_parts_are_cut_to_characters() -> None:
    parts = (Part("output_text", "aé🙂b"), Part("output_text", "cd"))
    assert cut(parts, 0, 3) == (Part("output_text", "aé🙂"),)
    assert cut(parts, 0, 0) == (Part("output_text", ""),)
    assert cut(parts, 1, 1) == (parts[0], Part("output_text", "c"))
    assert cut(parts, 1, 0) == (parts[0],)


def test_bytes_are_counted_as_utf8_and_sounds_twice() -> None:
    assert num_bytes("aé🙂") == 7
    assert num_bytes("\ud800") == 3
    assert Part("input_text", "aé").num_bytes == 3
    assert Part("input_image", data="abcd", others=(("detail", "low"),)).num_bytes == 10
    assert Part("input_audio", data="abcd").num_bytes == 11
