"""Messages as templates expect them."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.content_format import ContentFormat
from pipeline.conversation import conversation

STRINGS = ContentFormat(takes_parts=False, takes_strings=True)
BOTH = ContentFormat(takes_parts=True, takes_strings=True)
PARTS = ContentFormat(takes_parts=True, takes_strings=False)


def prepare(
    message: dict[str, Any], content_format: ContentFormat = STRINGS, knows_developer: bool = True
) -> Any:
    return conversation([message], content_format, knows_developer)[0]


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("content", "content_format", "expected"),
    [
        ("a", STRINGS, "a"),
        ("a", BOTH, "a"),
        ("a", PARTS, text("a")),
        (text("a", "b"), STRINGS, "a\nb"),
        (text("a", "b"), BOTH, text("a", "b")),
        (text("a", "b"), PARTS, text("a", "b")),
        (None, STRINGS, ""),
        (None, BOTH, ""),
        (None, PARTS, []),
        ([], STRINGS, ""),
    ],
)
def test_content_has_the_templates_format(content: Any, content_format: ContentFormat, expected: Any) -> None:
    assert prepare({"role": "user", "content": content}, content_format)["content"] == expected


def test_tool_content_is_always_a_string() -> None:
    message = {"role": "tool", "content": text("a", "b"), "tool_call_id": "1"}
    assert prepare(message, PARTS) == {"role": "tool", "content": "a\nb", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("{", {}), ("[1]", {}), (3, {})],
)
def test_arguments_are_an_object(arguments: Any, expected: dict[str, Any]) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    prepared = prepare({"role": "assistant", "content": None, "tool_calls": [call]})
    assert prepared["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": expected}}]


def test_arguments_too_deep_to_walk_over_are_an_empty_object() -> None:
    for depth, expected in ((65, 1), (66, 0), (900, 0), (100_000, 0)):
        text = '{"a":' * depth + "1" + "}" * depth
        call = {"id": "1", "function": {"name": "f", "arguments": text}}
        prepared = prepare({"role": "assistant", "content": None, "tool_calls": [call]})
        assert len(prepared["tool_calls"][0]["function"]["arguments"]) == expected, depth


@pytest.mark.parametrize("tool_calls", [None, []])
def test_empty_tool_calls_are_left_out(tool_calls: Any) -> None:
    assert "tool_calls" not in prepare({"role": "assistant", "content": "a", "tool_calls": tool_calls})


def test_reasoning_is_there_under_both_names() -> None:
    prepared = prepare({"role": "assistant", "content": "a", "reasoning": "why"})
    assert (prepared["reasoning"], prepared["reasoning_content"]) == ("why", "why")


def test_developer_is_a_system_message_where_the_template_does_not_know_it() -> None:
    message = {"role": "developer", "content": "a"}
    assert prepare(message)["role"] == "developer"
    assert prepare(message, knows_developer=False)["role"] == "system"


def test_name_is_kept_and_unknown_fields_are_not() -> None:
    message = {"role": "user", "content": "a", "name": "Bo", "extra": 1}
    assert prepare(message) == {"role": "user", "content": "a", "name": "Bo"}
