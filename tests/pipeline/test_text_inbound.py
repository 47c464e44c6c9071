"""Requests on their way to servers that render and tokenize by themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from filters.patterns import Patterns
from filters.rules import load_rules
from pipeline.errors import ContentBlocked, InvalidRequest
from pipeline.inbound import InboundOptions, InputRules
from pipeline.media_errors import TooManyMedia
from pipeline.needs import LoadMedia, Steps, served
from pipeline.prompt_templates import PromptTemplate, TemplateMessage
from pipeline.text_inbound import TextInbound, TextReady
from pipeline.values import (
    AnswerFormat,
    ChatRequest,
    CompletionRequest,
    Generation,
    MediaRef,
    Medium,
    ModelInfo,
    TemplateUse,
    ToolChoice,
)
from tests.pipeline.requests import chat, completion, generation

RULES = InputRules(
    Patterns(
        load_rules(
            "- {id: no, match: [forbidden], action: block}\n- {id: hide, match: [secret], action: mask}\n",
            "rules.yaml",
        )
    )
)
PICTURE = MediaRef("image", "data:image/png;base64,AAAA", "messages[0].content[1]")


def inbound(**options: Any) -> TextInbound:
    return TextInbound(ModelInfo("m", 0, 1, {}, "", is_text=True), InboundOptions(**options))


def prepared(
    request: ChatRequest | CompletionRequest,
    source: Mapping[str, Any] | None = None,
    rules: InputRules | None = None,
    **options: Any,
) -> TextReady:
    return served(inbound(**options).prepare(request, source, rules))


def source_of(request: ChatRequest, **fields: Any) -> dict[str, Any]:
    """The body that a client would have sent."""
    return {"model": request.model, "messages": list(request.messages), **fields}


def test_what_steers_the_generation_goes_on_and_nothing_else() -> None:
    request = chat("hi")
    steering = {"top_p": 0.5, "logit_bias": {"5": 1}, "stop": ["x"], "max_completion_tokens": 9, "seed": None}
    numbers = {"repeat_penalty": 1.1, "cache_prompt": True, "mirostat": "a text"}
    other = {"user": "u", "prompt": "p", "input_ids": [1], "system": "s", "lora_path": "/x", "echo": False}
    source = source_of(request, **steering, **numbers, **other, stream=True, n=1, stream_options={})
    (call,) = prepared(request, source).calls
    assert call.model == "m"
    assert call.target == "/v1/chat/completions"
    assert call.fields == {
        "messages": [{"role": "user", "content": "hi"}],
        **{name: value for name, value in steering.items() if name != "seed"},
        "repeat_penalty": 1.1,
        "cache_prompt": True,
    }


def test_what_the_operator_names_goes_on_and_rules_see_it() -> None:
    request = chat("hi")
    source = source_of(request, user="my secret", metadata={"a": ["secret"]}, messages=[], model="x")
    fields = frozenset({"user", "metadata", "messages", "model"})
    (call,) = prepared(request, source, upstream_fields=fields).calls
    assert (call.fields["user"], call.fields["metadata"]) == ("my secret", {"a": ["secret"]})
    assert call.fields["messages"] == [{"role": "user", "content": "hi"}]
    (call,) = prepared(request, source, RULES, upstream_fields=fields).calls
    assert (call.fields["user"], call.fields["metadata"]) == ("my ******", {"a": ["******"]})


@pytest.mark.parametrize("name", ["response_format", "structured_outputs"])
def test_what_a_server_may_write_into_the_prompt_is_scanned(name: str) -> None:
    request = chat("hi")
    source = source_of(request, **{name: {"json": {"description": "a secret"}}})
    (call,) = prepared(request, source, RULES).calls
    assert call.fields[name] == {"json": {"description": "a ******"}}
    source[name]["json"]["description"] = "forbidden"
    with pytest.raises(ContentBlocked):
        prepared(request, source, RULES)


def test_messages_are_made_anew_so_that_nothing_unread_goes_on() -> None:
    messages = [{"role": "assistant", "content": "a", "reasoning": "r"}, {"role": "user", "content": "hi"}]
    request = chat(messages=messages)
    source = source_of(request) | {"messages": [{"role": "user", "content": "hi", "thinking": "secret"}]}
    (call,) = prepared(request, source).calls
    assert call.fields["messages"] == [messages[0] | {"reasoning_content": "r"}, messages[1]]


def test_tools_are_those_that_may_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = chat("hi", tools=tools, tool_choice=ToolChoice("required"))
    source = source_of(request, tools=[*tools, {"type": "function", "function": {"name": "hidden"}}])
    (call,) = prepared(request, source | {"tool_choice": {"type": "allowed_tools"}}).calls
    assert call.fields["tools"] == tools
    assert call.fields["tool_choice"] == "required"


def test_reasoning_effort_goes_on_under_its_own_name_alone() -> None:
    request = chat("hi", chat_template_kwargs={"reasoning_effort": "low", "enable_thinking": True})
    (call,) = prepared(request, source_of(request, reasoning_effort="low")).calls
    assert call.fields.keys() == {"messages", "reasoning_effort"}
    source = source_of(request, chat_template_kwargs={"a": 1}, reasoning_effort="low")
    (call,) = prepared(request, source).calls
    assert call.fields["chat_template_kwargs"] == request.chat_template_kwargs


def test_what_a_rule_masks_is_masked_for_the_server() -> None:
    request = chat(
        "my secret", tools=[{"type": "function", "function": {"name": "f", "description": "secret"}}]
    )
    ready = prepared(request, source_of(request, tools=request.tools), RULES)
    (call,) = ready.calls
    assert "secret" not in json.dumps(call.fields)
    assert call.fields["messages"][0]["role"] == "user"
    assert {hit.rule_id for hit in ready.hits} == {"hide"}


def test_what_a_rule_blocks_goes_nowhere() -> None:
    with pytest.raises(ContentBlocked, match="no"):
        prepared(chat("this is forbidden"), None, RULES)


def test_a_word_cut_into_two_parts_is_found() -> None:
    parts = [{"type": "text", "text": "forb"}, {"type": "text", "text": "idden"}]
    with pytest.raises(ContentBlocked):
        prepared(chat(parts), None, RULES)


def test_a_prompt_template_is_filled_in_here() -> None:
    template = PromptTemplate("t", (TemplateMessage("system", "You are {who}."),))
    request = replace(chat("hi"), template=TemplateUse("t", {"who": "a mill"}))
    source = source_of(request, template={"name": "t", "variables": {"who": "a mill"}})
    (call,) = prepared(request, source, templates={"t": template}).calls
    assert call.fields["messages"] == [
        {"role": "system", "content": "You are a mill."},
        {"role": "user", "content": "hi"},
    ]
    assert "template" not in call.fields


def test_without_a_body_all_comes_from_the_request() -> None:
    gen = Generation(
        {"temperature": 0.5, "structured_outputs": {"json": {"type": "object"}}},
        max_tokens=9,
        stop=("END",),
        answer_format=AnswerFormat({"type": "object"}),
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = chat("hi", gen, tools=tools, tool_choice=ToolChoice("named", "f"))
    (call,) = prepared(request).calls
    assert call.fields == {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "max_tokens": 9,
        "stop": ["END"],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}},
        },
        "tools": tools,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": True,
    }
    assert call.max_tokens == 9


def test_tool_arguments_are_text_on_the_wire() -> None:
    calls = [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for arguments in ('{"a": 1}', {"a": "é"}, None)
    ]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "user", "content": "x"}]
    (call,) = prepared(chat(messages=messages)).calls
    written = [each["function"]["arguments"] for each in call.fields["messages"][0]["tool_calls"]]
    assert written == ['{"a": 1}', '{"a": "é"}', "{}"]


def test_choices_are_calls_with_seeds_of_their_own() -> None:
    request = chat("hi", generation(n=3, sampling={"seed": 7}))
    calls = prepared(request, source_of(request, n=3, seed=7)).calls
    assert [call.fields["seed"] for call in calls] == [7, 8, 9]
    assert all("n" not in call.fields for call in calls)
    assert {call.prompt_index for call in calls} == {0}


def test_prompts_are_calls_of_their_own() -> None:
    request = completion("one", "two", [3, 4], gen=generation(n=2))
    calls = prepared(request, {"model": "m", "prompt": ["one", "two", [3, 4]], "echo": False}).calls
    assert [call.fields["prompt"] for call in calls] == ["one", "one", "two", "two", [3, 4], [3, 4]]
    assert [call.prompt_index for call in calls] == [0, 0, 1, 1, 2, 2]
    assert {call.target for call in calls} == {"/v1/completions"}


def test_a_masked_prompt_of_a_completion() -> None:
    (call,) = prepared(completion("my secret"), {"model": "m", "prompt": "my secret"}, RULES).calls
    assert call.fields["prompt"] == "my ******"


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (chat("hi", replace(generation(), logprobs=0)), "logprobs"),
        (chat("hi", context_policy="drop_oldest"), "context_policy"),
        (completion([1, 2]), "prompt"),
        (completion("a", [1, 2]), "prompt[1]"),
    ],
)
def test_what_needs_token_ids_is_refused_by_its_name(
    request_: ChatRequest | CompletionRequest, param: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        prepared(request_, None, RULES)
    assert raised.value.param == param
    assert "m gives text, not tokens" in str(raised.value)


def test_images_are_looked_at_here_and_go_on_with_their_data() -> None:
    remote = MediaRef("image", "https://images.example/x.png", "messages[0].content[2]")
    sound = MediaRef("audio", "data:audio/wav;base64,AAAA", "messages[0].content[3]")
    content = [
        {"type": "text", "text": "see"},
        {"type": "image", "media": PICTURE},
        {"type": "image", "media": remote},
        {"type": "audio", "media": sound},
    ]
    request = chat(content)
    steps = inbound().prepare(request, source_of(request))
    need = next(steps)
    assert isinstance(need, LoadMedia)
    assert need.refs == (PICTURE, remote, sound)
    media = (
        Medium("image", b"\0\0\0", "png", "1"),
        Medium("image", b"xyz", "png", "2"),
        Medium("audio", b"abc", "wav", "3"),
    )
    (call,) = finished(steps, media).calls
    assert call.fields["messages"][0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": PICTURE.url}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,eHl6"}},
        {"type": "input_audio", "input_audio": {"data": "YWJj", "format": "wav"}},
    ]


def test_too_many_images_are_refused() -> None:
    content = [{"type": "image", "media": PICTURE}] * 3
    with pytest.raises(TooManyMedia):
        prepared(chat(content), None, max_media=2)
    with pytest.raises(TooManyMedia):
        inbound(max_media=2).check(chat(content))


def test_equal_beginnings_prefer_the_same_server() -> None:
    system = {"role": "system", "content": "s" * 2000}
    first, second, third = (
        prepared(chat(messages=[system, {"role": "user", "content": text}])).calls[0]
        for text in ("one", "two", "one")
    )
    assert first.affinity == second.affinity == third.affinity
    (other,) = prepared(chat(messages=[{"role": "user", "content": "one"}])).calls
    assert other.affinity != first.affinity
    assert first.num_prompt_tokens == 2003 // 4


def finished(steps: Steps[TextReady], answer: Any) -> TextReady:
    with pytest.raises(StopIteration) as stopped:
        steps.send(answer)
    ready: TextReady = stopped.value.value
    return ready
