"""Bodies in, frozen values or a 400 that names the field out."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from gateway.openai_schema import RequestLimits, parse_chat, parse_completion
from pipeline.errors import ClientError, InvalidRequest
from pipeline.values import AnswerFormat, Delivery, TemplateUse, ToolChoice
from tests.gateway.bodies import CHAT, COMPLETION, FIELDS, SCHEMA, TOOL, chat, completion, encode

SECRET = "correct horse battery staple"


def refusal(parse: Any, body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    assert caught.value.status_hint == 400
    assert len(caught.value.message) < 300
    return caught.value


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


# -- what is accepted --------------------------------------------------------------------------------


def test_minimal_chat_has_no_sampling_values_of_its_own() -> None:
    request = parse_chat(chat())
    assert request.model == "m"
    assert list(request.messages) == [{"role": "user", "content": "hi"}]
    assert request.generation.sampling == {}
    assert request.generation.max_tokens is None
    assert request.delivery == Delivery()
    assert request.add_generation_prompt
    assert not request.continue_final_message


@pytest.mark.parametrize("messages", [{}, {"messages": []}])
def test_after_a_template_there_may_be_no_messages(messages: dict[str, Any]) -> None:
    body = {"model": "m", "template": {"name": "qa", "variables": {"shop": "A", "q": ""}}, **messages}
    request = parse_chat(encode(body))
    assert request.messages == ()
    assert request.template == TemplateUse("qa", {"shop": "A", "q": ""})


def test_a_template_may_come_without_variables_and_before_messages() -> None:
    request = parse_chat(chat(template={"name": "qa"}))
    assert request.template == TemplateUse("qa", {})
    assert len(request.messages) == 1
    assert parse_chat(chat(template=None)).template is None


def test_without_a_template_messages_are_required() -> None:
    refused = refusal(parse_chat, encode({"model": "m"}))
    assert (refused.message, refused.param) == ("'messages' is required.", "messages")


@pytest.mark.parametrize("policy", ["error", "drop_oldest", "middle_out", None])
def test_a_context_policy_is_read(policy: str | None) -> None:
    assert parse_chat(chat(context_policy=policy)).context_policy == policy


def test_a_bad_context_policy_names_those_that_exist() -> None:
    message = refusal(parse_chat, chat(context_policy="drop")).message
    assert message == "'context_policy' must be one of error, drop_oldest, middle_out, got \"drop\"."


def test_every_sampling_field_reaches_the_generation() -> None:
    generation = parse_chat(chat(**FIELDS)).generation
    sampling = dict(generation.sampling)
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "ignore_eos",
        "min_tokens",
        "watermarking",
    ):
        assert sampling.pop(name) == FIELDS[name]
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids"):
        assert sampling.pop(name) == FIELDS[name]
    assert sampling == {
        "stop_token_ids": [3, 4],
        "logit_bias": {5: 100.0, 6: -1.5},
        "bad_words": ["ugly", "bad"],
        "thinking_token_budget": 11,
        "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3},
        "extra_args": {"a": 1, "b": "x", "c": [1, 2.5, "y"]},
        "structured_outputs": {"regex": "[a-z]+", "whitespace_pattern": " "},
    }
    assert generation.stop == ("END", "\n\n")
    assert generation.include_stop_str_in_output
    assert not generation.skip_special_tokens


def test_null_means_not_given() -> None:
    nulls = dict.fromkeys([*FIELDS, "n", "max_tokens", "stream", "tools", "tool_choice", "user", "priority"])
    assert parse_chat(chat(**nulls)) == parse_chat(chat())
    assert parse_completion(completion(**nulls)) == parse_completion(completion())


def test_unknown_fields_are_accepted() -> None:
    assert parse_chat(chat(metadata={"a": [1]}, store=True, brand_new={"x": 1})) == parse_chat(chat())


@pytest.mark.parametrize(
    ("name", "value"), [("n", 2.0), ("max_tokens", 16.0), ("top_k", -1.0), ("min_tokens", 3.0)]
)
def test_integers_may_be_written_as_floats(name: str, value: float) -> None:
    generation = parse_chat(chat(**{name: value, "temperature": 1})).generation
    read = generation.sampling.get(name, getattr(generation, name, None))
    assert read == value
    assert type(read) is int


def test_seed_of_minus_one_is_no_seed() -> None:
    assert "seed" not in parse_chat(chat(seed=-1)).generation.sampling
    assert parse_chat(chat(seed=0)).generation.sampling["seed"] == 0


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert parse_chat(chat(max_tokens=5, max_completion_tokens=7)).generation.max_tokens == 7
    assert parse_chat(chat(max_tokens=5)).generation.max_tokens == 5


def test_completion_without_max_tokens_gets_openais_sixteen() -> None:
    assert parse_completion(completion()).generation.max_tokens == 16
    assert parse_completion(completion(max_tokens=None)).generation.max_tokens == 16


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"top_logprobs": 0}, None),
    ],
)
def test_chat_logprobs(fields: dict[str, Any], logprobs: int | None) -> None:
    assert parse_chat(chat(**fields)).generation.logprobs == logprobs


@pytest.mark.parametrize("value", [None, 0, 20])
def test_completion_logprobs(value: int | None) -> None:
    assert parse_completion(completion(logprobs=value)).generation.logprobs == value


@pytest.mark.parametrize(
    ("options", "delivery"),
    [
        ({}, Delivery(stream=True)),
        ({"include_usage": True}, Delivery(stream=True, include_usage=True)),
        ({"continuous_usage_stats": True}, Delivery(stream=True)),
        (
            {"include_usage": True, "continuous_usage_stats": True},
            Delivery(stream=True, include_usage=True, continuous_usage=True),
        ),
        ({"include_timings": True}, Delivery(stream=True, include_usage=True, include_timings=True)),
    ],
)
def test_stream_options(options: dict[str, Any], delivery: Delivery) -> None:
    assert parse_chat(chat(stream=True, stream_options=options)).delivery == delivery


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_prompt_forms(prompt: Any, prompts: list[Any]) -> None:
    assert list(parse_completion(completion(prompt=prompt)).prompts) == prompts


def test_tools_with_choice_none_reach_the_template_in_vllms_shape() -> None:
    function = {"name": "f", "description": None, "parameters": {"type": "object"}}
    request = parse_chat(chat(tools=[TOOL], tool_choice="none"))
    assert request.tools == [{"type": "function", "function": function}]


def test_reasoning_effort_becomes_template_variables() -> None:
    assert parse_chat(chat(reasoning_effort="low")).chat_template_kwargs == {
        "reasoning_effort": "low",
        "enable_thinking": True,
    }
    assert parse_chat(chat(reasoning_effort="none")).chat_template_kwargs["enable_thinking"] is False
    kwargs = {"enable_thinking": False}
    assert parse_chat(chat(reasoning_effort="high", chat_template_kwargs=kwargs)).chat_template_kwargs == {
        "reasoning_effort": "high",
        "enable_thinking": False,
    }


def test_continue_final_message_switches_the_generation_prompt_off() -> None:
    request = parse_chat(chat(continue_final_message=True))
    assert request.continue_final_message
    assert not request.add_generation_prompt


def test_response_formats_become_constraints() -> None:
    def constraint(**fields: Any) -> Any:
        return parse_chat(chat(**fields)).generation.sampling.get("structured_outputs")

    named = {"name": "s", "schema": SCHEMA}
    assert constraint(response_format={"type": "text"}) is None
    assert constraint(response_format={"type": "json_object"}) == {"json_object": True}
    assert constraint(response_format={"type": "json_schema", "json_schema": named}) == {"json": SCHEMA}
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    assert json.loads(constraint(response_format=tag)["structural_tag"]) == tag
    both = {
        "structured_outputs": {"json": {}},
        "response_format": {"type": "json_schema", "json_schema": named},
    }
    assert constraint(**both) == {"json": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "answer_format"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, AnswerFormat()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            AnswerFormat(SCHEMA),
        ),
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}, None),
        ({"structured_outputs": {"json_object": True}}, AnswerFormat()),
        ({"structured_outputs": {"json": SCHEMA}}, AnswerFormat(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, AnswerFormat(SCHEMA)),
        ({"structured_outputs": {"json": " true"}}, AnswerFormat(True)),
        ({"structured_outputs": {"regex": "[{]}"}}, None),
    ],
)
def test_json_answers_are_told_to_who_checks_them(
    fields: dict[str, Any], answer_format: AnswerFormat | None
) -> None:
    assert parse_chat(chat(**fields)).generation.answer_format == answer_format
    assert parse_completion(completion(**fields)).generation.answer_format == answer_format


@pytest.mark.parametrize(
    ("choice", "expected", "is_checked"),
    [
        (None, ToolChoice("auto"), True),
        ("auto", ToolChoice("auto"), True),
        ("none", ToolChoice("none"), True),
        ("required", ToolChoice("required"), False),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("named", "f"), False),
        ({"function": {"name": "f"}}, ToolChoice("named", "f"), False),
    ],
)
def test_tool_choices_are_read_and_a_forced_call_has_no_answer_to_check(
    choice: Any, expected: ToolChoice, is_checked: bool
) -> None:
    request = parse_chat(chat(tools=[TOOL], tool_choice=choice, response_format={"type": "json_object"}))
    assert request.tool_choice == expected
    assert (request.generation.answer_format is not None) == is_checked
    assert request.tools is not None
    assert len(request.tools) == 1


def test_without_tools_nothing_is_called() -> None:
    assert parse_chat(chat()).tool_choice == ToolChoice()
    assert parse_chat(chat(tool_choice="none")).tool_choice == ToolChoice()


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_leave_those_that_they_name(mode: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    request = parse_chat(chat(tools=tools, tool_choice=allowed(mode, "c", "a")))
    assert request.tool_choice.kind == mode
    assert request.tools is not None
    assert [tool["function"]["name"] for tool in request.tools] == ["a", "c"]


def test_calls_may_be_parallel_and_reasoning_is_given_unless_the_body_says_otherwise() -> None:
    for value in (None, True):
        request = parse_chat(chat(parallel_tool_calls=value, include_reasoning=value))
        assert request.parallel_tool_calls
        assert request.include_reasoning
    request = parse_chat(chat(parallel_tool_calls=False, include_reasoning=False))
    assert not request.parallel_tool_calls
    assert not request.include_reasoning


def test_a_whole_loop_of_tool_calls_is_a_chat() -> None:
    """As clients send an answer of this server back, with all that it had."""

    def call(call_id: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}

    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    messages = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [{"index": 0, **call("a", '{"q": "北京"}')}, call("b", "{}")],
            **empty,
        },
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "done", "tool_calls": [], **empty},
    ]
    read = parse_chat(chat(messages=messages, tools=[TOOL], tool_choice="auto")).messages
    calls = read[1]["tool_calls"]
    assert [each["id"] for each in calls] == ["a", "b"]
    assert [each["function"] for each in calls] == [
        {"name": "f", "arguments": '{"q": "北京"}'},
        {"name": "f", "arguments": "{}"},
    ]
    assert read[1]["content"] is None
    assert read[1]["reasoning"] == "hm"
    assert [message.get("tool_call_id") for message in read] == [None, None, "a", "b", None]
    assert "tool_calls" not in read[4]


def test_an_answer_is_escaped_as_the_request_says_where_that_is_allowed() -> None:
    limits = RequestLimits(allow_escape=True)
    for escape in ("none", "html", "markdown", None):
        fields = {"output": {"escape": escape}}
        assert parse_chat(chat(**fields), limits).delivery == Delivery(escape=escape)
        streamed = parse_completion(completion(**fields, stream=True, stream_options={}), limits)
        assert streamed.delivery == Delivery(stream=True, escape=escape)
    for output in (None, {}, {"escape": None}):
        assert parse_chat(chat(output=output)).delivery == Delivery()
    refused = refusal(parse_chat, chat(output={"escape": "none"}))
    assert refused.code == "unsupported_field"
    assert refused.message == "'output.escape' is not allowed by this server's configuration, got \"none\"."


# -- what is refused ---------------------------------------------------------------------------------

MESSAGE = {"role": "user", "content": "x"}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DEEP: Any = "leaf"
for _ in range(80):
    DEEP = [DEEP]

BOTH_REFUSE: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": 3}, "model"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-50}, "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"seed": 2**63 - 1, "n": 2}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**400}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "a"}}, "logit_bias"),
    ({"bad_words": [" "]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    (
        {"repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 2}},
        "repetition_detection.min_pattern_size",
    ),
    ({"repetition_detection": {"max_pattern_size": 1, "min_count": 1}}, "repetition_detection.min_count"),
    ({"vllm_xargs": {"a": {}}}, "vllm_xargs"),
    ({"priority": 2**63}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"spaces_between_special_tokens": False, "skip_special_tokens": False}, "spaces_between_special_tokens"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
    (
        {"response_format": {"type": "structural_tag", "structures": [{}], "triggers": []}},
        "response_format.structures[0].begin",
    ),
    ({"response_format": {"type": "structural_tag", "format": DEEP}}, "response_format.format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": " "}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"a": DEEP}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "a\0"}}, "structured_outputs.regex"),
    ({"structured_outputs": 3}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": '{"const": NaN}'}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"type": "objekt"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"$ref": "#/$defs/x"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"$ref": "file:///etc/hostname"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"pattern": "("}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"anyOf": [{"pattern": "a"}] * 101}}}, "structured_outputs.json"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": 1}}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"json": '{"const": "\\ud800"}'}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps({"const": DEEP})}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "false"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"title": "x" * 65_536}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps({"title": "x" * 65_536})}}, "structured_outputs.json"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"x": ["敏"] * 12_000}},
            }
        },
        "response_format.json_schema.schema",
    ),
    ({"output": "html"}, "output"),
    ({"output": {"escape": 1}}, "output.escape"),
    ({"output": {"escape": "xml"}}, "output.escape"),
    ({"output": {"escape": "html"}}, "output.escape"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"guided_json": SCHEMA}, "guided_json"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
]

CHAT_REFUSES: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"template": "x"}, "template"),
    ({"template": {}}, "template.name"),
    ({"template": {"name": None}}, "template.name"),
    ({"template": {"name": "x", "variables": []}}, "template.variables"),
    ({"template": {"name": "x", "variables": {"a": "", "b": 3}}}, "template.variables.b"),
    ({"template": {"name": "x", "variables": {"a": None}}}, "template.variables.a"),
    ({"context_policy": "drop"}, "context_policy"),
    ({"context_policy": 1}, "context_policy"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [MESSAGE, {"role": ""}]}, "messages[1].role"),
    ({"messages": [{"role": "x" * 65, "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [MESSAGE, MESSAGE, {"role": "user", "content": [3]}]}, "messages[2].content[0]"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].image_url",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "audio_url"}]}]},
        "messages[0].content[0].audio_url",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL | {"type": "x"}]}]},
        "messages[0].tool_calls[0].type",
    ),
    ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "developer", "content": "x", "tools": []}]}, "messages[0].tools"),
    ({"messages": [MESSAGE | {"task": "x"}]}, "messages[0].task"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"tools": []}, "tools"),
    ({"tools": [{}]}, "tools[0].function"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}], "tool_choice": "none"}, "tools[0].type"),
    ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "f", "parameters": {"a": DEEP}}}]}, "tools[0].function.parameters"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": 5}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {}}, "tool_choice.function"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom", "function": {"name": "f"}}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": {}}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"function": "f"}}, "tool_choice.function"),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": 3}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [TOOL], "tool_choice": allowed("none", "f")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [TOOL], "tool_choice": allowed([], "f")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    (
        {"tools": [TOOL], "tool_choice": allowed("auto", "f", "g")},
        "tool_choice.allowed_tools.tools[1].function.name",
    ),
    ({"tool_choice": {"function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"include_reasoning": 1}, "include_reasoning"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"documents": [{"text": 3}]}, "documents[0]"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"chat_template_kwargs": {"a": DEEP}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
]

COMPLETION_REFUSES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt[1]"),
    ({"prompt": [[1, 2**31]]}, "prompt[0][1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 11}, "prompt"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), BOTH_REFUSE + CHAT_REFUSES)
def test_chat_refuses_and_names_the_field(fields: dict[str, Any], param: str) -> None:
    assert refusal(parse_chat, chat(**fields)).param == param


@pytest.mark.parametrize(("fields", "param"), BOTH_REFUSE + COMPLETION_REFUSES)
def test_completion_refuses_and_names_the_field(fields: dict[str, Any], param: str) -> None:
    assert refusal(parse_completion, completion(**fields)).param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"null", None),
        (b'{"model":', None),
        (b'{"model":"m","messages":[]} x', None),
        (b"\xff\xfe{}", None),
        (b'{"model":"m","other":"\xff"}', None),
        (b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', None),
        (b'{"model":"m","other":"\\udc00"}', None),
        (b'{"model":"m","temperature":NaN}', None),
        (b'{"model":"m","temperature":Infinity}', None),
        (b'{"model":"m","messages":[],"temperature":1e999}', "temperature"),
        (b'{"model":"m","messages":[],"model":"n"}', "model"),
        (b'{"model":"m","messages":[{"role":"user","content":"a","content":"b"}]}', "content"),
        (b'{"model":"m","messages":[],"other":{"a":{"b":1,"b":2}}}', "b"),
        (b'{"model":"m","messages":[],"other":' + b"[" * 100_000, None),
        (b'{"model":"m","messages":[],"other":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", None),
        (b'{"model":"m","messages":[],"other":1' + b"0" * 5000 + b"}", None),
        (b'{"model":"m","messages":[],"n":1' + b"0" * 5000 + b"}", "n"),
        (b'{"model":"m","messages":[],"other":[' + b"[]," * 1_000_000 + b"[]]}", None),
    ],
    ids=lambda value: repr(value[:60]) if isinstance(value, bytes) else str(value),
)
def test_malformed_body_is_refused(body: bytes, param: str | None) -> None:
    assert refusal(parse_chat, body).param == param


def test_syntax_error_names_the_place() -> None:
    assert "line 2, column 9" in refusal(parse_chat, b'{"model":"m",\n"other":]}').message


def test_message_names_the_value_and_the_limit() -> None:
    assert refusal(parse_chat, chat(temperature=3.5)).message == "'temperature' must be at most 2.0, got 3.5."
    assert refusal(parse_chat, chat(n=17)).message == "'n' must be at most 16, got 17."
    assert "'hot'" not in refusal(parse_chat, chat(temperature="hot")).message
    assert '"hot"' in refusal(parse_chat, chat(temperature="hot")).message


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": SECRET},
        {"messages": [{"role": SECRET * 9, "content": "x"}]},
        {"messages": [{"role": "user", "content": {"type": SECRET}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": {"a": SECRET}}]}]},
        {"messages": [{"role": "user", "content": "x", "name": [SECRET]}]},
        {"stop": [SECRET * 20]},
        {"documents": SECRET},
        {"template": SECRET},
        {"template": {"name": [SECRET]}},
        {"template": {"name": "x", "variables": {"a": [SECRET]}}},
        {"tools": SECRET},
        {"functions": SECRET},
        {"suffix": SECRET},
        {"temperature": SECRET * 9},
    ],
)
def test_message_never_repeats_user_text(fields: dict[str, Any]) -> None:
    assert SECRET not in refusal(parse_chat, chat(**fields)).message


def test_limits_are_arguments() -> None:
    limits = RequestLimits(max_n=2, max_stop_strings=1, max_containers=3)
    assert parse_chat(chat(n=2), limits).generation.n == 2
    for body in (chat(n=3), chat(stop=["a", "b"]), chat(other=[[]] * 1_000_000)):
        with pytest.raises(InvalidRequest):
            parse_chat(body, limits)


def test_tool_call_arguments_stay_as_the_client_sent_them() -> None:
    """Rendering makes of them what the template wants, an object or text."""

    def parse(arguments: Any) -> Any:
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        return parse_chat(chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]))

    for arguments in ('{"a":  [1, {"b": null}]}', {"a": 1}, "", "{", "[1]", None, '"\\ud800"', "[" * 100_000):
        assert parse(arguments).messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_tool_call_arguments_that_nest_too_deeply_are_refused_decoded_or_not() -> None:
    for arguments in ({"a": DEEP}, json.dumps({"a": DEEP})):
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        refused = refusal(parse_chat, chat(messages=[{"role": "assistant", "tool_calls": calls}]))
        assert refused.param == "messages[0].tool_calls[0].function.arguments"
        assert "64" in refused.message


# -- fuzz --------------------------------------------------------------------------------------------

JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 0.5, -0.0, 1e308, 1e-320,
    "", "x", "auto", "none", "\0", "敏感词", "\u2028", "x" * 5000, [], [[]], [None], [1, "a"], {}, {"": {}},
    {"type": "text"}, {"type": "image_url"}, DEEP,
]  # fmt: skip


TOOL_CHAT = CHAT | {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ],
    "tools": [TOOL],
    "tool_choice": "none",
}


def test_fuzzed_bodies_only_ever_raise_client_errors() -> None:
    check_fuzzed_bodies(seed=20260, num_bodies=3_000)


@pytest.mark.long
def test_many_fuzzed_bodies_only_ever_raise_client_errors() -> None:
    check_fuzzed_bodies(seed=20261, num_bodies=12_000)


def check_fuzzed_bodies(seed: int, num_bodies: int) -> None:
    rng = random.Random(seed)
    patches = [fields for fields, _ in BOTH_REFUSE + CHAT_REFUSES + COMPLETION_REFUSES]
    names = sorted(set(FIELDS).union(*patches))
    accepted = 0
    for _ in range(num_bodies):
        parse, base = rng.choice(
            [(parse_chat, CHAT), (parse_chat, TOOL_CHAT), (parse_completion, COMPLETION)]
        )
        body = copy.deepcopy(base)
        for _ in range(rng.choice([0, 0, 1])):
            body |= copy.deepcopy(rng.choice(patches))
        for _ in range(rng.choice([0, 0, 1, 2])):
            body[rng.choice(names)] = copy.deepcopy(rng.choice(JUNK))
        for _ in range(rng.choice([0, 1, 2])):
            replace_somewhere(body, rng)
        accepted += accepts(parse, mutate(encode(body), rng))
    assert num_bodies // 24 < accepted < num_bodies * 5 // 6  # the seed exercises both ways


def replace_somewhere(node: Any, rng: random.Random) -> None:
    """Put junk in the place of one value, at any depth."""
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = rng.choice(keys)
        if not node[key] or not isinstance(node[key], (dict, list)) or rng.random() < 0.2:
            node[key] = copy.deepcopy(rng.choice(JUNK))
            return
        node = node[key]


def mutate(body: bytes, rng: random.Random) -> bytes:
    """Mostly the body itself, sometimes with a few bytes changed, cut out or doubled."""
    if rng.random() < 0.6:
        return body
    out = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out))
        change = rng.choice(
            [b"", b'"', b"{", b"]", b"\\", b"\xff", b"\\ud800", b"1e9999", b",", b"\0", b"9" * 50]
        )
        out[at : at + rng.randint(0, 4)] = change
    return bytes(out)


def accepts(parse: Any, body: bytes) -> bool:
    try:
        parse(body)
    except ClientError as refused:
        error = refused
    else:
        return True
    assert len(error.message.encode()) < 500
    return False


def test_more_tools_than_the_limit() -> None:
    limits = RequestLimits(max_tools=2)
    assert len(parse_chat(chat(tools=[TOOL] * 2), limits).tools or ()) == 2
    error = refusal(lambda body: parse_chat(body, limits), chat(tools=[TOOL] * 3))
    assert (error.param, error.message) == ("tools", "'tools' has 3 entries; the limit is 2.")
