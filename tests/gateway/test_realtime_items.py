"""Items of a conversation, and that a prompt of them is a chat request's with the same messages."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import msgspec
import pytest

from gateway.chat_messages import MAX_ARGUMENT_VALUES, Message, to_messages
from gateway.realtime_items import PART_BYTES, Item, answer_item, heard, messages, of_item, read_item
from gateway.sampling_fields import DEFAULT_LIMITS
from pipeline.errors import InvalidRequest
from tests.gateway.realtime_values import call, item, mutated, numbered, outcome, refusal, said

IMAGE = "data:image/png;base64,iVBORw0KGgo="
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


def stateless(*chat: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The messages of a chat body."""
    return to_messages([msgspec.convert(message, Message) for message in chat], DEFAULT_LIMITS.max_depth)


def asked(*calls: tuple[str, str, str]) -> list[dict[str, Any]]:
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments, call_id in calls
    ]


def test_items_are_shown_as_they_were_read() -> None:
    message = item(said("user", "hi", "mine"))
    assert message.wire() == {
        "id": "mine",
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "hi"}],
    }
    assert item(call("f", "{}", "c1")).wire() == {
        "id": "item_1",
        "object": "realtime.item",
        "type": "function_call",
        "status": "completed",
        "name": "f",
        "call_id": "c1",
        "arguments": "{}",
    }
    assert item(OUTPUT).wire() == {
        "id": "item_1",
        "object": "realtime.item",
        "type": "function_call_output",
        "status": "completed",
        "call_id": "c1",
        "output": "42",
    }
    assert answer_item(message.wire() | {"role": "assistant"}).role == "assistant"


def test_what_a_client_says_of_a_status_has_no_effect() -> None:
    assert item({**said("user", "hi"), "status": "in_progress"}).status == "completed"


def test_ids_are_the_clients_or_new() -> None:
    new_id = numbered()
    read = [
        read_item(data, DEFAULT_LIMITS, new_id)
        for data in (
            said("user", "a", "Az09_.:-" * 16),
            {"type": "function_call", "name": "f", "arguments": "{}"},
            said("user", "b"),
        )
    ]
    assert [each.id for each in read] == ["Az09_.:-" * 16, "item_1", "item_3"]
    assert read[1].call_id == "call_2"


@pytest.mark.parametrize(
    ("change", "param", "said_of_it"),
    [
        ({"type": "thought"}, "type", 'message, function_call, function_call_output; got "thought"'),
        ({"type": []}, "type", "got an array of 0"),
        ({"type": None}, "type", "got null"),
        ({"role": "tool"}, "role", 'one of user, system, assistant; got "tool"'),
        ({"role": None}, "role", "got null"),
        ({"id": 5}, "id", "got 5"),
        ({"id": ""}, "id", "1 to 128 characters of A-Z, a-z, 0-9, _ . : - and not 'root', got \"\""),
        ({"id": "a b"}, "id", 'got "a b"'),
        ({"id": "a\n"}, "id", "got"),
        ({"id": "i" * 129}, "id", "got a string of 129 characters"),
        ({"id": "root"}, "id", 'got "root"'),
        ({"content": 5}, "content", "must be an array or a string, got 5"),
        ({"content": [{"type": "input_text"}]}, "content[0].text", "must be a string, got null"),
        (
            {"content": [{"type": "input_image", "image_url": "ftp://x"}]},
            "content[0].image_url",
            "must begin with",
        ),
        (
            {
                "content": [
                    {"type": "input_text", "text": ""},
                    {"type": "input_audio", "audio": "", "format": "x"},
                ]
            },
            "content[1].format",
            "must be one of",
        ),
        ({"type": "function_call", "arguments": "{}"}, "name", "must be a string, got null"),
        ({"type": "function_call", "name": "", "arguments": "{}"}, "name", "1 to 256 characters, got 0"),
        ({"type": "function_call", "name": "f" * 257, "arguments": "{}"}, "name", "got 257"),
        ({"type": "function_call", "name": "f"}, "arguments", "must be a string, got null"),
        ({"type": "function_call", "name": "f", "arguments": "{}", "call_id": 3}, "call_id", "got 3"),
        (
            {"type": "function_call", "name": "f", "arguments": "[" * 66 + "]" * 66},
            "arguments",
            "deeper than 64 levels",
        ),
        (
            {"type": "function_call", "name": "f", "arguments": f"[{'0,' * MAX_ARGUMENT_VALUES}0]"},
            "arguments",
            "131073 values",
        ),
        ({"type": "function_call_output", "output": ""}, "call_id", "got null"),
        ({"type": "function_call_output", "call_id": "c"}, "output", "must be a string, got null"),
    ],
)
def test_what_is_no_item_is_refused_by_name(change: dict[str, Any], param: str, said_of_it: str) -> None:
    data = {**said("user", "secret"), **change}
    error = refusal(lambda: read_item(data, DEFAULT_LIMITS, numbered(), "response.input[3]"))
    assert error.param == f"response.input[3].{param}"
    assert said_of_it in str(error)
    assert "messages" not in str(error)
    assert "secret" not in str(error)


CONVERSATION: list[dict[str, Any]] = [
    said("user", "hello"),
    said("assistant", "hi"),
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": each} for each in "ab"]},
    said("assistant", "let me look"),
    call("f", '{"a": 1}', "c1"),
    call("g", "{", "c2"),
    OUTPUT,
    {**OUTPUT, "call_id": "c2", "output": ""},
    call("f", "", "c3"),
    {**OUTPUT, "call_id": "c3"},
    said("system", "be brief"),
    said("user", ""),
    said("assistant", "fine"),
    said("assistant", "still here"),
    call("f", "{}", "c4"),
]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You are kind."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {
        "role": "assistant",
        "content": "let me look",
        "tool_calls": asked(("f", '{"a": 1}', "c1"), ("g", "{", "c2")),
    },
    {"role": "tool", "content": "42", "tool_call_id": "c1"},
    {"role": "tool", "content": "", "tool_call_id": "c2"},
    {"role": "assistant", "content": None, "tool_calls": asked(("f", "", "c3"))},
    {"role": "tool", "content": "42", "tool_call_id": "c3"},
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "fine"},
    {"role": "assistant", "content": "still here", "tool_calls": asked(("f", "{}", "c4"))},
]


def test_the_messages_are_those_of_the_same_chat_request() -> None:
    items = [item(data) for data in CONVERSATION]
    assert messages(items, "You are kind.") == stateless(*CHAT)
    assert messages(items) == stateless(*CHAT[1:])
    assert json.dumps(messages(items)) == json.dumps(stateless(*CHAT[1:]))  # the order of keys, too
    assert messages(items) == messages(items)  # and nothing was changed on the way
    assert messages([]) == ()


def test_every_split_of_a_conversation_gives_the_messages_of_its_parts() -> None:
    """Except that calls join the message before them."""
    items = [item(data) for data in CONVERSATION]
    for end in range(len(items) + 1):
        if end < len(items) and items[end].kind == "function_call":
            continue
        assert messages(items[:end]) + messages(items[end:]) == messages(items)


def test_a_medium_is_named_by_its_item() -> None:
    content = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": IMAGE}]
    made = item({"type": "message", "role": "user", "content": content, "id": "pic"}).message
    assert made is not None
    text, image = made["content"]
    assert text == {"type": "text", "text": "see"}
    assert image["type"] == "image"
    assert (image["media"].url, image["media"].path) == (IMAGE, "items[pic].content[1]")


@pytest.mark.parametrize(
    ("change", "is_in_the_prompt"),
    [
        ({}, True),
        ({"status": "incomplete"}, True),
        ({"status": "in_progress"}, False),
        ({"content": [{"type": "output_text", "text": ""}]}, False),
        ({"content": []}, False),
        ({"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}, True),
        (
            {
                "type": "function_call",
                "name": "f",
                "call_id": "c",
                "arguments": '{"a',
                "status": "incomplete",
            },
            False,
        ),
        ({"type": "function_call", "name": "f", "call_id": "c", "arguments": "[" * 99 + "]" * 99}, False),
    ],
)
def test_only_what_was_said_of_an_answer_is_in_a_prompt(
    change: dict[str, Any], is_in_the_prompt: bool
) -> None:
    fields = {**item(said("assistant", "yes")).wire(), **change}
    answer = answer_item(fields)
    assert bool(messages([answer])) == is_in_the_prompt
    assert {**fields, **answer.wire()} == fields


def test_nul_in_an_answer_is_in_no_prompt() -> None:
    fields = item(said("assistant", "yes")).wire()
    answer = answer_item(fields | {"content": [{"type": "output_text", "text": "y\x00es\x00"}]})
    assert messages([answer]) == messages([item(said("assistant", "yes"))])


def test_an_answer_is_the_same_message_as_what_a_client_sends_back() -> None:
    theirs, ours = item(said("assistant", "yes")), item(call("f", '{"a": 1}', "c1"))
    assert messages([answer_item(theirs.wire()), answer_item(ours.wire())]) == messages([theirs, ours])


def test_what_was_heard_is_the_message_of_that_text() -> None:
    whole = item(said("assistant", "aé🙂 and the rest", "a"))
    rest = heard(whole, 0, 3)
    assert messages([rest]) == stateless({"role": "assistant", "content": "aé🙂"})
    assert (rest.status, rest.text, rest.num_bytes) == ("incomplete", "aé🙂", 7)
    assert messages([heard(whole, 0, 0)]) == ()


@pytest.mark.parametrize(
    ("data", "path", "param"),
    [
        (said("user", "hi", "a"), "messages[0].content", "item.content"),
        (said("user", "hi", "a"), "messages", "item"),
        (said("user", "hi", "a"), "items[a].content[0]", "item.content[0]"),
        (call("f", "{}", "c1", "a"), "messages[0].tool_calls[0].function.arguments.x", "item.arguments"),
        (call("f", "{}", "c1", "a"), "messages", "item.arguments"),
    ],
)
def test_an_error_of_a_request_with_one_item_names_the_items_field(
    data: dict[str, Any], path: str, param: str
) -> None:
    error = of_item(InvalidRequest(f"'{path}' is too long.", path), item(data), "item")
    assert (error.param, str(error)) == (param, f"'{param}' is too long.")


def test_empty_parts_take_memory() -> None:
    one = {"type": "input_text", "text": ""}
    sizes = [
        item({"type": "message", "role": "user", "content": [one] * number}).num_bytes
        for number in (1, 2, 1024)
    ]
    assert sizes == [0, 2 * PART_BYTES, 1024 * PART_BYTES]


def test_all_calls_of_a_prompt_have_one_limit_of_values() -> None:
    half = call("f", f"[{'0,' * (MAX_ARGUMENT_VALUES // 2 - 1)}0]", "c1")
    items = [item(half), item(half)]
    assert len(messages(items)) == 1
    error = refusal(lambda: messages([*items, item(call("f", "[0]", "c2"))]))
    assert f"{MAX_ARGUMENT_VALUES + 1} values" in str(error)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_is_an_item_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    image = {"type": "input_image", "image_url": IMAGE, "detail": "low"}
    sound = {"type": "input_audio", "audio": "AAAA", "transcript": "a"}
    seen: list[Item] = []
    for _ in range(400):
        data = chance.choice([*CONVERSATION, {**CONVERSATION[2], "id": "i", "content": [image, sound]}])
        data = {key: mutated(value, chance) for key, value in data.items() if chance.random() < 0.97}
        read = outcome(partial(read_item, data, DEFAULT_LIMITS, numbered()))
        if isinstance(read, Item):
            seen.append(read)
        else:
            assert isinstance(read, InvalidRequest)
            assert (read.param or "").startswith("item.")
    assert len(seen) > 50
    assert len(json.dumps([each.wire(with_media=True) for each in seen])) > 0
    messages(seen)
