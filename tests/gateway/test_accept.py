"""Who gets a stream in another form than SSE, and what plain text refuses to carry."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gateway.accept import MAX_ACCEPT_BYTES, accepted_form, stream_form
from gateway.openai_schema import parse_chat, parse_completion
from pipeline.errors import InvalidRequest
from tests.gateway.bodies import TOOL, chat, completion

TEXT = {b"accept": b"text/plain"}
NDJSON = {b"accept": b"application/x-ndjson"}


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("text/plain", "text"),
        ("Text/PLAIN", "text"),
        ("text/plain; charset=utf-8", "text"),
        ("text/plain;q=0.1", "text"),
        ("application/x-ndjson", "ndjson"),
        ("application/ndjson", "ndjson"),
        ("application/jsonl", "ndjson"),
        ("application/x-ndjson;format=a;q=0.9, text/plain;q=0.8", "ndjson"),
        ("application/x-ndjson;q=0.8, text/plain;q=0.9", "text"),
        ("text/plain, application/x-ndjson", "text"),
        ("application/x-ndjson, text/plain", "ndjson"),
        ("text/plain, */*", "text"),
        ("*/*, text/plain", "text"),
        ("*/*;q=1, text/*, text/plain;q=0.5", "text"),
        ("text/html;q=0.9, text/plain ; Q = 1.0", "text"),
    ],
)
def test_a_form_that_is_named_before_all_else_is_given(accept: str, form: str) -> None:
    assert accepted_form(accept.encode()) == form


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/*",
        "application/*",
        "application/json",
        "text/event-stream",
        "application/json, text/plain, */*",  # axios
        "text/html,application/xhtml+xml,application/xml;q=0.9,image/webp,*/*;q=0.8",  # a browser
        "text/event-stream, application/x-ndjson",
        "text/plain;q=0.9, text/event-stream",
        "text/plain;q=0",
        "text/plain;q=0, */*",
        "application/json;q=0.5, text/plain;q=0.4, */*",
        "text/plainest",
        'application/json; a="text/plain"',
    ],
)
def test_everybody_else_gets_sse(accept: str) -> None:
    assert accepted_form(accept.encode()) == "sse"


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (b"text/plain;q=high", "sse"),
        (b"text/plain;q=", "sse"),
        (b"text/plain;q=nan", "sse"),
        (b"text/plain;q=2", "sse"),
        (b"text/plain;q=-1, application/x-ndjson;q=0.1", "ndjson"),
        (b",,;;, text/plain,;q=1", "text"),
        (b"\xff\xfe, *, text/plain;q=0.5", "text"),
        (b"text/plain" + b" " * (1 << 16), "text"),
        (b"a," * MAX_ACCEPT_BYTES + b"text/plain", "sse"),
    ],
)
def test_a_malformed_part_is_as_good_as_absent(accept: bytes, form: str) -> None:
    assert accepted_form(accept) == form


@pytest.mark.parametrize("seed", range(20))
def test_no_accept_fails(seed: int) -> None:
    rng = random.Random(seed)
    parts = (
        b"text/plain",
        b"application/jsonl",
        b"*/*",
        b";",
        b",",
        b"q=",
        b"0.5",
        b" ",
        b'"',
        b"\xe9",
        b"=",
    )
    for _ in range(50):
        assert accepted_form(b"".join(rng.choices(parts, k=rng.randrange(12)))) in ("sse", "ndjson", "text")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"logprobs": True}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_timings": True}}, "stream_options"),
    ],
)
def test_what_plain_text_cannot_carry_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    request = parse_chat(chat(stream=True, **fields))
    with pytest.raises(InvalidRequest, match=f"'{param}'.*text/plain") as refused:
        stream_form(TEXT, request)
    assert refused.value.param == param
    assert stream_form(NDJSON, request) == "ndjson"
    assert stream_form({}, request) == "sse"


@pytest.mark.parametrize(
    ("fields", "param"), [({"n": 2}, "n"), ({"logprobs": 0}, "logprobs"), ({"prompt": ["a", "b"]}, "prompt")]
)
def test_a_completion_that_plain_text_cannot_carry_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    request = parse_completion(completion(stream=True, **fields))
    with pytest.raises(InvalidRequest) as refused:
        stream_form(TEXT, request)
    assert refused.value.param == param
    assert stream_form(NDJSON, request) == "ndjson"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1},
        {"tools": [TOOL], "tool_choice": "none"},
        {"logprobs": False},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
    ],
)
def test_what_asks_for_nothing_more_than_text_gets_it(fields: dict[str, Any]) -> None:
    assert stream_form(TEXT, parse_chat(chat(stream=True, **fields))) == "text"


def test_plain_text_is_refused_over_http_1_0_where_a_cut_answer_looks_whole() -> None:
    request = parse_chat(chat(stream=True))
    with pytest.raises(InvalidRequest, match=r"HTTP/1\.0") as refused:
        stream_form(TEXT, request, "1.0")
    assert refused.value.param == "accept"
    assert stream_form(NDJSON, request, "1.0") == "ndjson"
    assert stream_form({}, request, "1.0") == "sse"


def test_one_prompt_in_a_list_is_one_choice() -> None:
    assert stream_form(TEXT, parse_completion(completion(stream=True, prompt=["a"]))) == "text"
