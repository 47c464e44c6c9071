"""Whether a refusal is about one field, in the ways in which servers say that; and errors that are odd."""

from __future__ import annotations

import json

import pytest

from backend.upstream_errors import MAX_WORDS, blames, body_words, words_of
from backend.upstream_faults import server_error

FIELD = "stream_options"
QUOTED = {"model": "m", FIELD: {"include_usage": True}, "messages": [{"role": "user", "content": "hi"}]}


def message(words: str) -> bytes:
    return json.dumps({"error": {"message": words, "type": "BadRequestError", "code": 400}}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b'{"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options"], "msg": "no"}]}',
        b'{"detail": [{"loc": ["body", "x"]}, {"loc": ["body", "stream_options", "include_usage"]}]}',
        b'{"error": {"message": "bad", "param": "stream_options"}}',
        b'{"error": {"message": "bad", "param": "body.stream_options"}}',
        b'{"object": "error", "message": "bad", "param": "stream_options.include_usage"}',
        b"Failed to deserialize the JSON: unknown field `stream_options`, expected one of `model`, `top_p`",
        message("stream_options: Extra inputs are not permitted"),
        message("Unrecognized request argument supplied: stream_options"),
        message("property 'stream_options' is unsupported"),
        message("got an unexpected keyword argument 'stream_options'"),
        message("Additional properties are not allowed ('stream_options' was unexpected)"),
        message("[{'type': 'extra_forbidden', 'loc': ('body', 'stream_options'), 'msg': 'no', 'input': {}}]"),
    ],
)
def test_field_that_is_refused_is_blamed(body: bytes) -> None:
    assert blames(body, FIELD)


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"detail": [{"loc": ["body", "foo"], "msg": "bad foo", "input": QUOTED}]}).encode(),
        json.dumps({"detail": [{"msg": "bad temperature", "input": QUOTED}]}).encode(),
        json.dumps({"error": {"message": "bad", "param": "temperature", "request": QUOTED}}).encode(),
        message(f"temperature must not be negative. The request was {QUOTED}"),
        message(f"[{{'type': 'x', 'loc': ('body', 'foo'), 'msg': 'no', 'input': {QUOTED}}}]"),
        message("messages[0].content: I like stream_options"),
        json.dumps({"detail": [{"loc": ["body", "messages", 0, FIELD], "msg": "no"}]}).encode(),
        b'{"error": {"param": "my_stream_options"}}',
        *(b"", b"{", b"null", b"[]", b"5", b'{"detail": 5}', b"[" * 50_000, b"{" * 9),
    ],
)
def test_field_that_is_only_quoted_is_not_blamed(body: bytes) -> None:
    assert not blames(body, FIELD)


@pytest.mark.parametrize("depth", [100, 900, 5_000, 100_000])
@pytest.mark.parametrize(("opens", "closes"), [(b"[", b"]"), (b'{"error":', b"}")])
def test_error_that_is_nested_deeply_is_an_error_at_once(depth: int, opens: bytes, closes: bytes) -> None:
    body = opens * depth + b'"x"' + closes * depth
    words, code = body_words(body)
    assert words == "x" or body.decode().startswith(words)
    assert code is None
    assert len(server_error(400, words).message) < MAX_WORDS + 100


def test_words_within_lists_are_found() -> None:
    assert words_of({"error": [[[["boom"]]]]}) == ("boom", None)
    assert words_of({"error": [{"message": "boom", "code": 429}, {"message": "other"}]}) == ("boom", 429)
    assert words_of([]) == words_of({}) == words_of({"error": []}) == ("", None)
