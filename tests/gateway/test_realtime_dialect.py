"""The fields of a session or response, in both generations of OpenAI's names, are those of a chat body."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gateway.realtime_schema import SessionUpdate, read_event
from gateway.realtime_session import Session
from gateway.sampling_fields import DEFAULT_LIMITS
from pipeline.errors import ClientError, InvalidRequest
from tests.gateway.realtime_values import (
    CHAT_TOOL,
    FIRST,
    TOOL,
    as_told,
    chat_request,
    mutated,
    numbered,
    outcome,
    planned,
    refusal,
    with_items,
)


@pytest.mark.parametrize(
    ("fields", "shown", "chat"),
    [
        ({}, {}, {}),
        ({"type": "realtime", "model": "m", "output_modalities": ["text"]}, {}, {}),
        ({"modalities": ["text"], "voice": "ash", "turn_detection": {"type": "server_vad"}}, {}, {}),
        (
            {"audio": {"input": {"turn_detection": None}, "output": {"voice": "ash"}}, "tracing": "auto"},
            {},
            {},
        ),
        ({"audio": {"input": {"format": {"type": "audio/pcm", "rate": 24000}}}}, {}, {}),
        ({"input_audio_format": "pcm16", "output_audio_format": "g711_ulaw", "unknown": [1]}, {}, {}),
        ({"max_output_tokens": 7}, {"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"max_response_output_tokens": 7}, {"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 7}, {"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": 7.0}, {"max_output_tokens": 7.0}, {"max_tokens": 7}),
        ({"max_tokens": 6, "max_output_tokens": 7}, {"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"max_output_tokens": 7, "max_tokens": 6}, {"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"max_output_tokens": "inf"}, {"max_output_tokens": "inf"}, {}),
        (
            {"temperature": 0.8, "top_p": 0.5},
            {"temperature": 0.8, "top_p": 0.5},
            {"temperature": 0.8, "top_p": 0.5},
        ),
        ({"stop": ["a"], "seed": 2**60}, {"stop": ["a"], "seed": 2**60}, {"stop": ["a"], "seed": 2**60}),
        ({"tools": [TOOL]}, {"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
        ({"tools": [CHAT_TOOL]}, {"tools": [CHAT_TOOL]}, {"tools": [CHAT_TOOL]}),
        ({"tools": [{"name": "f"}]}, {"tools": [{"name": "f"}]}, {"tools": [{"function": {"name": "f"}}]}),
        ({"tools": [], "tool_choice": "auto"}, {}, {}),
        ({"tool_choice": "none"}, {"tool_choice": "none"}, {"tool_choice": "none"}),
        (
            {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            {"reasoning": {"effort": "low"}},
            {"reasoning": {"effort": "low"}},
            {"reasoning_effort": "low"},
        ),
        ({"reasoning": {}}, {"reasoning": {}}, {}),
        ({"truncation": "auto"}, {"truncation": "auto"}, {"context_policy": "drop_oldest"}),
        ({"truncation": "disabled"}, {"truncation": "disabled"}, {"context_policy": "error"}),
        (
            {"truncation": {"type": "retention_ratio", "retention_ratio": 0.8}},
            {"truncation": {"type": "retention_ratio", "retention_ratio": 0.8}},
            {"context_policy": "drop_oldest"},
        ),
        (
            {"truncation": "auto", "context_policy": "middle_out"},
            {"truncation": "auto", "context_policy": "middle_out"},
            {"context_policy": "middle_out"},
        ),
        (
            {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"a": 1}},
            {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"a": 1}},
            {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"a": 1}},
        ),
        ({"n": 1, "logprobs": False, "top_logprobs": 0, "stream": True, "prompt": None}, {}, {}),
    ],
)
def test_settings_make_the_request_that_a_chat_body_makes(
    fields: dict[str, Any], shown: dict[str, Any], chat: dict[str, Any]
) -> None:
    session = FIRST.update(fields)
    assert session.wire() == {**FIRST.wire(), **shown}
    assert planned(session).request == as_told(chat_request(**chat))
    assert planned(FIRST, {name: value for name, value in fields.items() if name != "model"}) == planned(
        session
    )


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "transcription"}, "type", 'one of realtime; got "transcription"'),
    ({"output_modalities": ["audio"]}, "output_modalities", 'an array of 1 with "audio" in it'),
    ({"modalities": ["text", "audio"]}, "modalities", 'must be ["text"], for this server answers in text'),
    ({"modalities": "text"}, "modalities", 'got "text"'),
    ({"instructions": 5}, "instructions", "must be a string, got 5"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1, got 0"),
    ({"max_output_tokens": 2**31}, "max_output_tokens", "at most 2147483647, got 2147483648"),
    ({"max_output_tokens": True}, "max_output_tokens", "an integer or null, got true"),
    ({"max_response_output_tokens": "all"}, "max_response_output_tokens", 'or "inf", got "all"'),
    ({"max_tokens": -1}, "max_tokens", "at least 1, got -1"),
    ({"temperature": 2.5}, "temperature", "at most 2.0, got 2.5"),
    ({"stop": ["a"] * 5}, "stop", "at most 4 strings, got 5"),
    ({"tools": "f"}, "tools", "must be an array or null"),
    ({"tools": ["f"]}, "tools[0]", "must be an object"),
    ({"tools": [TOOL, {"type": "function"}]}, "tools[1].name", "is required"),
    ({"tools": [{**TOOL, "parameters": 3}]}, "tools[0].parameters", "an object or null, got 3"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", 'one of function; got "mcp"'),
    ({"tools": [{"function": {}}]}, "tools[0].function.name", "is required"),
    ({"tool_choice": "sometimes"}, "tool_choice", 'got "sometimes"'),
    ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs 'tools'"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
        'got "g"',
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice.name",
        "one of 'tools', got \"g\"",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name", "got null"),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type", 'got "mcp"'),
    ({"reasoning": "low"}, "reasoning", 'must be an object, got "low"'),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", 'got "huge"'),
    ({"reasoning_effort": "huge"}, "reasoning_effort", 'got "huge"'),
    ({"truncation": "some"}, "truncation", 'one of auto, disabled; got "some"'),
    ({"truncation": {"type": "x"}}, "truncation.type", 'one of retention_ratio; got "x"'),
    ({"context_policy": "x"}, "context_policy", 'got "x"'),
    ({"speech": "word"}, "speech", 'one of token, clause, sentence; got "word"'),
    ({"include": "timings"}, "include", 'array of at most 16, got "timings"'),
    ({"include": ["a"] * 17}, "include", "got an array of 17"),
    ({"include": [1]}, "include[0]", "; got 1"),
    ({"include": ["timings", "timing"]}, "include[1]", "must be one of timings, item."),
    ({"audio": []}, "audio", "must be an object, got an array of 0"),
    (
        {"audio": {"input": {"format": {"type": "audio/pcmu"}}}},
        "audio.input.format.type",
        'must be "audio/pcm", got "audio/pcmu"',
    ),
    (
        {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}},
        "audio.input.format.rate",
        "must be 24000, got 16000",
    ),
    ({"input_audio_format": "g711_ulaw"}, "input_audio_format", 'must be "pcm16", got "g711_ulaw"'),
    ({"n": 2}, "n", "a response has one choice. Got 2"),
    ({"n": True}, "n", "Got true"),
    ({"messages": []}, "messages", "create conversation items"),
    ({"logprobs": True}, "logprobs", "Got true"),
    ({"stream": False}, "stream", "always streamed"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "an object with 1 keys"),
    ({"prompt": {"id": "p"}}, "prompt", "'instructions' or 'template'"),
    ({"functions": [{}]}, "functions", "use 'tools'"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", "is not allowed"),
    ({"cache_salt": ""}, "cache_salt", ""),
]


@pytest.mark.parametrize(("fields", "param", "said_of_it"), BAD)
def test_a_bad_setting_is_refused_by_the_clients_name_for_it(
    fields: dict[str, Any], param: str, said_of_it: str
) -> None:
    acts: dict[str, Callable[[], object]] = {
        "session": lambda: FIRST.update(fields),
        "response": lambda: planned(FIRST, fields),
    }
    for where, act in acts.items():
        error = refusal(act)
        assert error.param == f"{where}.{param}"
        assert f"'{error.param}'" in str(error)
        assert said_of_it in str(error)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_is_a_setting_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    session, num_taken = FIRST, 0
    for _ in range(150):
        known = {**chance.choice(BAD)[0], "tools": [TOOL], "temperature": 0.5}
        fields = {name: mutated(value, chance) for name, value in known.items() if chance.random() < 0.6}
        event = read_event(json.dumps({"type": "session.update", "session": fields}), DEFAULT_LIMITS)
        assert isinstance(event, SessionUpdate)
        updated = outcome(partial(session.update, event.session))
        for done in (updated, outcome(partial(session.plan, event.session, with_items("hi"), numbered()))):
            if isinstance(done, ClientError):
                assert isinstance(done, InvalidRequest)
                assert (done.param or "").split(".")[0] in ("session", "response")
            else:
                num_taken += 1
        session = updated if isinstance(updated, Session) else session
        json.dumps(session.wire())
    assert num_taken > 50
