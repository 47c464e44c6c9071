"""The reference is Hugging Face's `apply_chat_template`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pytest

from pipeline.errors import InvalidRequest
from pipeline.rendering import ChatTemplate
from pipeline.values import ChatRequest, Delivery, Generation
from tests.pipeline import chat_templates, small_tokenizers

SPECIAL_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
TEMPLATES = {
    name: source for name, source in vars(chat_templates).items() if name.isupper() and name != "WITH_DATE"
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "<b>wetter & \"é\" '敏'</b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def chat(messages: list[dict[str, Any]], **fields: Any) -> ChatRequest:
    return ChatRequest("m", messages, Generation({}), Delivery(), **fields)


def render(source: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    return ChatTemplate(source, SPECIAL_TOKENS).render(chat(messages, **fields), now_s=0.0).text


def random_chat(rng: random.Random) -> list[dict[str, Any]]:
    def content() -> str:
        spice = ["", " ", "\n\n", "<think>\nhm\n</think>\n\n", "<|im_end|>", "{{ 7 * 7 }}", "</think>"]
        return rng.choice(spice) + small_tokenizers.text(rng, rng.randint(1, 4)) + rng.choice(spice)

    messages = [{"role": "system", "content": content()}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 4)):
        messages += [{"role": "user", "content": content()}, {"role": "assistant", "content": content()}]
    return messages[: rng.randint(1, len(messages))]


@pytest.fixture(scope="module")
def hugging_face() -> Mapping[str, Any]:
    from transformers import PreTrainedTokenizerFast

    return {
        name: PreTrainedTokenizerFast(
            tokenizer_object=small_tokenizers.byte_level(), chat_template=source, **SPECIAL_TOKENS
        )
        for name, source in TEMPLATES.items()
    }


@pytest.mark.parametrize("name", ["CHATML", "WITH_TOOLS", "PARTS_OR_STRINGS", "PARTS_IN_MACRO"])
def test_result_is_hugging_faces_for_random_chats(hugging_face: Mapping[str, Any], name: str) -> None:
    rng = random.Random(name)
    template = ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS)
    for _ in range(100):
        messages = random_chat(rng)
        is_continued = messages[-1]["role"] == "assistant" and rng.random() < 0.5
        fields: dict[str, Any] = {
            "tools": rng.choice([None, TOOLS]),
            "documents": rng.choice([None, [{"title": "T", "text": "x < y"}]]),
            "add_generation_prompt": not is_continued and rng.random() < 0.5,
            "continue_final_message": is_continued,
        }
        arguments = rng.choice([{}, {"enable_thinking": False}])
        expected = hugging_face[name].apply_chat_template(messages, tokenize=False, **fields, **arguments)
        request = chat(messages, chat_template_kwargs=arguments, **fields)
        assert template.render(request, now_s=0.0).text == expected, (messages, fields)


@pytest.mark.parametrize("name", ["PARTS_OR_STRINGS", "PARTS_ONLY", "PARTS_IN_MACRO"])
def test_result_is_hugging_faces_for_parts(hugging_face: Mapping[str, Any], name: str) -> None:
    parts = [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    expected = hugging_face[name].apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert render(TEMPLATES[name], messages) == expected


def test_tool_call_arguments_become_an_object(hugging_face: Mapping[str, Any]) -> None:
    def messages(arguments: Any) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "42 <b>"},
        ]

    expected = hugging_face["WITH_TOOLS"].apply_chat_template(
        messages({"city": "北京"}), tokenize=False, add_generation_prompt=True, tools=TOOLS
    )
    assert render(chat_templates.WITH_TOOLS, messages('{"city": "北京"}'), tools=TOOLS) == expected
    assert '"city": "北京"' in expected


def test_parts_are_joined_by_newlines_where_a_template_takes_strings() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user\na\nb<|im_end|>" in render(chat_templates.CHATML, messages)


def test_string_becomes_a_part_where_a_template_takes_parts_only() -> None:
    assert render(chat_templates.PARTS_ONLY, [{"role": "user", "content": "hi"}]) == "user:hiAssistant:"


def test_missing_content_is_empty() -> None:
    assert "user\n<|im_end|>" in render(chat_templates.CHATML, [{"role": "user", "content": None}])


def test_date_is_the_one_that_was_given() -> None:
    template = ChatTemplate(chat_templates.WITH_DATE, {})
    request = chat([{"role": "user", "content": "hi"}])
    for now_s in (0.0, 1.7e9):
        date = datetime.fromtimestamp(now_s).strftime("%Y-%m-%d %H:%M")
        assert template.render(request, now_s).text == f"{date} hi"


@pytest.mark.parametrize("name", ["messages", "tools", "raise_exception", "strftime_now"])
def test_template_arguments_replace_nothing_that_the_request_or_the_server_sets(name: str) -> None:
    source = "{{ messages[0].content }}{{ tools is none }}{% if false %}{{ raise_exception('x') }}{% endif %}"
    arguments = {name: "mine"}
    assert render(source, [{"role": "user", "content": "a"}], chat_template_kwargs=arguments) == "aTrue"


@pytest.mark.parametrize("name", ["chat_template", "tokenize"])
def test_template_of_the_request_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        render("x", [{"role": "user", "content": "a"}], chat_template_kwargs={name: "{{ 1 }}"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ undefined_name.x }}", "undefined_name"),
        ("{% include 'other' %}", "no loader"),
        ("{{ missing | tojson }}", "not JSON serializable"),
    ],
)
def test_template_error_is_the_clients_with_the_templates_message(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        render(source, [{"role": "user", "content": "a"}])
    assert caught.value.param == "messages"
    assert caught.value.status_hint == 400


def test_template_error_message_is_bounded() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("{{ raise_exception(messages[0].content) }}", [{"role": "user", "content": "x" * 10_000}])
    assert len(caught.value.message) < 1000


def test_broken_template_names_the_line() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("a\n{% if %}", {})


@pytest.mark.parametrize(
    ("messages", "source"),
    [
        ([{"role": "user", "content": ""}], chat_templates.CHATML),
        ([{"role": "user", "content": "gone"}], "{{ 'constant' }}"),
        ([{"role": "user", "content": "abc"}], "{{ messages[0].content | upper }}"),
    ],
)
def test_final_message_that_cannot_be_continued_is_refused(
    messages: list[dict[str, Any]], source: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_messages_are_not_changed_by_rendering() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [call]}]
    before = repr(messages)
    render(chat_templates.PARTS_ONLY, messages, add_generation_prompt=False, continue_final_message=True)
    assert repr(messages) == before
