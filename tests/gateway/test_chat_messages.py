"""A chat's messages and tools reach the template as vLLM's own server would hand them over."""

from __future__ import annotations

import copy
import json
import random
import warnings
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gateway.chat_messages import UNSUPPORTED, Message, to_messages
from gateway.openai_schema import parse_chat
from pipeline.content_format import ContentFormat
from pipeline.conversation import conversation
from pipeline.errors import InvalidRequest
from tests.components import need
from tests.gateway.bodies import TOOL, chat

STRINGS = ContentFormat(takes_parts=False, takes_strings=True)
PARTS = ContentFormat(takes_parts=True, takes_strings=False)


def text(value: str, kind: str = "text", key: str = "text") -> dict[str, str]:
    return {"type": kind, key: value}


def call(arguments: str, **fields: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, **fields}


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi", "name": "ann"},
    {"role": "user", "content": [text("a"), text("b"), text("c", "input_text")]},
    {"role": "user", "content": []},
    {"role": "user", "content": ["plain", text("part")]},
    {"role": "assistant", "content": "yes"},
    {"role": "assistant", "content": None},
    {"role": "assistant"},
    {"role": "assistant", "content": [text("no", "refusal", "refusal")]},
    {"role": "assistant", "content": "x", "tool_calls": []},
    {"role": "assistant", "content": None, "tool_calls": [call('{"a": [1, null, {"b": "敏"}]}'), call("")]},
    {"role": "assistant", "tool_calls": [call("{"), call("[1]"), call("3")]},
    {"role": "assistant", "content": "x", "reasoning": "because"},
    {"role": "assistant", "content": "x", "reasoning_content": "because"},
    {"role": "tool", "content": "42", "tool_call_id": "c1"},
    {"role": "tool", "content": [text("4"), text("2")], "tool_call_id": "c1", "name": "f"},
    {"role": "weird", "content": "own role"},
]
TOOLS: list[dict[str, Any]] = [
    TOOL,
    {"type": "function", "function": {"name": "f"}},
    {
        "type": "function",
        "function": {"name": "f", "description": "d", "strict": True, "other": 1},
        "other": 2,
    },
]


@pytest.fixture(scope="module")
def vllm() -> SimpleNamespace:
    """vLLM's request class and the two steps of its message parsing."""
    need("vllm")
    with warnings.catch_warnings(action="ignore"):  # torch's own, at import
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.renderers import chat_utils
    return SimpleNamespace(
        request=ChatCompletionRequest,
        parse=chat_utils._parse_chat_message_content,
        finish=chat_utils._postprocess_messages,
    )


class TextOnly:
    """In the place of vLLM's collector of images: there are none."""

    model_config = SimpleNamespace(enable_prompt_embeds=False)

    def create_parser(self, **_: Any) -> TextOnly:
        return self

    def mm_placeholder_storage(self) -> dict[str, list[Any]]:
        return {}


def theirs(
    vllm: SimpleNamespace, messages: list[dict[str, Any]], content_format: str
) -> list[dict[str, Any]]:
    request = vllm.request(model="m", messages=copy.deepcopy(messages))
    parsed: list[dict[str, Any]] = []
    for message in request.messages:
        parsed += vllm.parse(message, TextOnly(), content_format, interleave_strings=False)
    vllm.finish(parsed)
    return [{**message, "content": _list(message["content"])} for message in parsed]


def _list(content: Any) -> Any:
    return content if isinstance(content, str) else list(content)


def ours(messages: list[dict[str, Any]], content_format: ContentFormat) -> list[dict[str, Any]]:
    request = parse_chat(chat(messages=messages))
    return conversation(request.messages, content_format, knows_developer=True)


@pytest.mark.parametrize(("name", "content_format"), [("string", STRINGS), ("openai", PARTS)])
def test_each_message_is_what_vllm_makes_of_it(
    vllm: SimpleNamespace, name: str, content_format: ContentFormat
) -> None:
    for message in MESSAGES:
        assert ours([message], content_format) == theirs(vllm, [message], name)


def test_random_chats_are_what_vllm_makes_of_them(vllm: SimpleNamespace) -> None:
    rng = random.Random(4)
    for _ in range(100):
        messages = rng.choices(MESSAGES, k=rng.randint(1, 8))
        assert ours(messages, STRINGS) == theirs(vllm, messages, "string")
        assert ours(messages, PARTS) == theirs(vllm, messages, "openai")


def test_tool_calls_keep_vllms_order_of_keys(vllm: SimpleNamespace) -> None:
    messages = [{"role": "assistant", "tool_calls": [call('{"b": 1, "a": 2}')]}]
    assert str(ours(messages, STRINGS)[0]["tool_calls"]) == str(
        theirs(vllm, messages, "string")[0]["tool_calls"]
    )


def test_tools_are_what_vllm_makes_of_them(vllm: SimpleNamespace) -> None:
    body = {"tools": TOOLS, "tool_choice": "none"}
    request = vllm.request(model="m", messages=[{"role": "user", "content": "x"}], **copy.deepcopy(body))
    assert str(list(parse_chat(chat(**body)).tools or ())) == str(
        [tool.model_dump() for tool in request.tools]
    )


@pytest.mark.parametrize(
    "calls",
    [
        [call('{"a": [' + "[]," * 70_000 + "[]]}")],
        [call('{"a": [' + "1," * 70_000 + '"]"]}')] * 2,
        [call('["\\"",' + "{}," * 70_000 + "{")],  # no JSON after all, once it is decoded that far
    ],
)
def test_arguments_with_too_many_values_are_refused_before_they_are_decoded(calls: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"arguments of tool calls have 1\d{5} values"):
        ours([{"role": "assistant", "tool_calls": calls}], STRINGS)


def test_arguments_with_a_long_text_of_many_commas_are_taken() -> None:
    text = json.dumps({"csv": '1,2,"x",[]\n' * 40_000})
    assert ours([{"role": "assistant", "tool_calls": [call(text)]}], STRINGS)


# A value for each field of a message beside role and content: by any of them it is no plain one.
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OTHER_FIELDS = {
    "name": "n",
    "tool_calls": [CALL],
    "tool_call_id": "c",
    "reasoning": "r",
    "reasoning_content": "r",
    "audio": {"id": "a"},
    "function_call": {"name": "f"},
    "task": "t",
    "tools": [{}],
}


def test_every_field_of_a_message_is_looked_at() -> None:
    assert OTHER_FIELDS.keys() == set(Message.__struct_fields__) - {"role", "content"}


@pytest.mark.parametrize("name", OTHER_FIELDS)
def test_message_with_another_field_is_read_with_it_or_refused(name: str) -> None:
    role = "tool" if name == "tool_call_id" else "assistant"
    message = msgspec.convert({"role": role, "content": "a", name: OTHER_FIELDS[name]}, Message)
    if name in UNSUPPORTED:
        with pytest.raises(InvalidRequest) as refused:
            to_messages([message], 8)
        assert refused.value.param == f"messages[0].{name}"
        return
    (read,) = to_messages([message], 8)
    assert read.keys() == {"role", "content", name.removesuffix("_content")}


def test_content_that_is_missing_is_refused_whatever_the_role_but_the_assistants() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content"):
        to_messages([Message(role="user", content="a"), Message(role="user")], 8)
