"""The exact bytes of an answer, and that OpenAI's own client finds its shapes in them."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway import answer_schema
from gateway.frames import (
    DONE,
    MIN_LOGPROB,
    PING,
    ChatShape,
    CompletionShape,
    Shape,
    TextFrames,
    data_frame,
    json_bytes,
    json_string,
    usage_object,
)
from pipeline.events import PositionLogprobs
from pipeline.values import Dropped, TokenLogprobs, Usage
from tests.gateway.answering import vocabulary

CHAT = ChatShape("r1", 1_700_000_000, "m")
RAW = CompletionShape("r1", 1_700_000_000, "m")
USAGE = usage_object(Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2))
TEXTS = [
    "",
    "hi",
    '"quoted" \\ \x00\x1f\n\t',
    "敏感词👋",
    "a\u2028b\u2029c\u0085d",
    "\x7f\ufffd\u00a0",
    "</script>",
]


class Texts:
    """A vocabulary of three tokens."""

    WORDS = (b"a", "é".encode()[:1], "敏".encode())

    def token_bytes(self, token_id: int) -> bytes:
        return self.WORDS[token_id]

    def token_text(self, token_id: int) -> str:
        return self.WORDS[token_id].decode(errors="replace")


def entry(start: int, ids: list[int], values: list[float], length: int = 1) -> PositionLogprobs:
    return PositionLogprobs(ids[0], start, start + length, TokenLogprobs(ids, values, 1))


# -- bytes ---------------------------------------------------------------------------------------------------


def test_frames_of_a_chat_are_these_bytes() -> None:
    head = (
        b'data: {"id":"chatcmpl-r1","object":"chat.completion.chunk",'
        b'"created":1700000000,"model":"m","choices":['
    )
    assert data_frame(CHAT.chunk([CHAT.opening(0)])) == (
        head
        + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert TextFrames(CHAT, 1).frame("hi") == (
        head + b'{"index":1,"delta":{"content":"hi"},"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert data_frame(CHAT.chunk([CHAT.ending(0, "stop", None)])) == (
        head + b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n'
    )
    assert data_frame(CHAT.chunk([]) | {"usage": USAGE}) == (
        head + b'],"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8,'
        b'"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
    )


def test_frames_of_a_completion_are_these_bytes() -> None:
    head = b'data: {"id":"cmpl-r1","object":"text_completion","created":1700000000,"model":"m","choices":['
    assert RAW.opening(0) is None
    assert TextFrames(RAW, 0).frame("hi") == (
        head + b'{"index":0,"text":"hi","logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert data_frame(RAW.chunk([RAW.ending(0, "stop", "END")])) == (
        head + b'{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":"END"}]}\n\n'
    )


def test_fixed_frames_are_whole() -> None:
    assert (DONE, PING) == (b"data: [DONE]\n\n", b": ping\n\n")


@pytest.mark.parametrize("shape", [CHAT, RAW], ids=lambda shape: shape.kind)
@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_the_quick_frame_equals_the_encoded_one(shape: Shape, text: str) -> None:
    frame = TextFrames(shape, 2).frame(text)
    assert frame == data_frame(shape.chunk([shape.delta(2, text, None)]))


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_no_client_cuts_a_frame_within_its_text(text: str) -> None:
    for encoded in (json_string(text), json_bytes(text)):
        assert json.loads(encoded) == text
        assert len(encoded.decode().splitlines()) == 1


def test_line_ends_are_escaped_at_any_depth() -> None:
    value = {"a\u2028": ["\u2029", {"b": "\u0085"}]}
    encoded = json_bytes(value)
    assert json.loads(encoded) == value
    assert encoded.isascii()


# -- shapes --------------------------------------------------------------------------------------------------


def chat_chunks() -> list[dict[str, Any]]:
    logprobs = CHAT.logprobs([entry(0, [0, 0, 2], [-0.5, -0.5, -1.5])], Texts())
    return [
        CHAT.chunk([CHAT.opening(0)]),
        CHAT.chunk([CHAT.delta(0, "hi", None)]),
        CHAT.chunk([CHAT.delta(0, "hi", logprobs)]),
        CHAT.chunk([CHAT.ending(0, "length", None)]),
        CHAT.chunk([CHAT.ending(0, "content_filter", None)]),
        CHAT.chunk([]) | {"usage": USAGE, "timings": {"ttft_ms": 1.5}},
    ]


def test_openais_client_reads_chat_chunks() -> None:
    for chunk in chat_chunks():
        parsed = ChatCompletionChunk.model_validate_json(json_bytes(chunk), strict=True)
        assert parsed.to_dict(mode="json", exclude_unset=True) == chunk
        assert parsed.choices or parsed.usage


def test_openais_client_reads_a_whole_chat() -> None:
    logprobs = CHAT.logprobs([entry(0, [0, 0], [-0.5, -0.5])], Texts())
    choices = [CHAT.whole(0, "hi", logprobs, "stop", None), CHAT.whole(1, "", None, "length", None)]
    parsed = ChatCompletion.model_validate_json(json_bytes(CHAT.document(choices, USAGE)), strict=True)
    assert parsed.choices[0].message.content == "hi"
    assert parsed.choices[0].logprobs is not None
    assert parsed.choices[0].logprobs.content is not None
    assert parsed.choices[0].logprobs.content[0].top_logprobs[0].token == "a"
    assert parsed.choices[1].finish_reason == "length"
    assert parsed.usage is not None
    assert parsed.usage.prompt_tokens_details is not None
    assert parsed.usage.prompt_tokens_details.cached_tokens == 2


def test_usage_says_what_a_context_policy_dropped() -> None:
    def details(dropped: Dropped | None) -> Any:
        return usage_object(Usage(5, 3, 2, dropped))["prompt_tokens_details"]

    assert details(None) == {"cached_tokens": 2}
    turns = {"cached_tokens": 2, "dropped_messages": 4, "dropped_tokens": 900}
    assert details(Dropped("drop_oldest", 4, 900)) == turns
    middle = {"cached_tokens": 2, "dropped_messages": 0, "dropped_tokens": 900, "dropped_characters": 70}
    assert details(Dropped("middle_out", 0, 900, 70)) == middle
    usage = usage_object(Usage(5, 3, 2, Dropped("middle_out", 0, 900, 70)))
    chunk = CHAT.chunk([]) | {"usage": usage}
    parsed = ChatCompletionChunk.model_validate_json(json_bytes(chunk), strict=True)
    assert parsed.usage is not None
    assert parsed.usage.to_dict()["prompt_tokens_details"] == middle
    read = msgspec.json.decode(json_bytes(chunk), type=answer_schema.ChatChunk)
    assert msgspec.json.decode(msgspec.json.encode(read)) == chunk


def test_openais_client_reads_completions() -> None:
    logprobs = RAW.logprobs([entry(0, [0, 0, 2], [-0.5, -0.5, -1.5])], Texts())
    whole = RAW.document([RAW.whole(0, "a", logprobs, "stop", None)], USAGE)
    parsed = Completion.model_validate_json(json_bytes(whole), strict=True)
    assert parsed.choices[0].text == "a"
    assert parsed.choices[0].logprobs is not None
    assert parsed.choices[0].logprobs.tokens == ["a"]
    # On OpenAI's own wire a chunk's finish_reason is null; the client's type for it has no null.
    delta = RAW.delta(0, "a", logprobs) | {"finish_reason": "length"}
    for chunk in (RAW.chunk([delta]), RAW.chunk([]) | {"usage": USAGE}):
        Completion.model_validate_json(json_bytes(chunk), strict=True)


def test_what_is_written_is_what_the_documentation_says() -> None:
    """The documented structs take every frame and know every field of it."""
    logprobs = CHAT.logprobs([entry(0, [0, 0, 2], [-0.5, -0.5, -1.5])], Texts())
    raw_logprobs = RAW.logprobs([entry(0, [0, 0, 2], [-0.5, -0.5, -1.5])], Texts())
    written = [
        *((answer_schema.ChatChunk, chunk) for chunk in chat_chunks()),
        (answer_schema.ChatCompletion, CHAT.document([CHAT.whole(0, "a", logprobs, "stop", 7)], USAGE)),
        (answer_schema.Completion, RAW.document([RAW.whole(0, "a", raw_logprobs, "stop", "END")], USAGE)),
        (answer_schema.Completion, RAW.chunk([RAW.ending(0, "content_filter", None)])),
    ]
    for kind, value in written:
        read = msgspec.json.decode(json_bytes(value), type=kind)
        assert msgspec.json.decode(msgspec.json.encode(read)) == value


@pytest.mark.parametrize("shape", [CHAT, RAW], ids=lambda shape: shape.kind)
def test_only_a_content_filter_has_results(shape: Shape) -> None:
    for choice in (
        shape.ending(0, "content_filter", None),
        shape.whole(0, "a", None, "content_filter", None),
    ):
        assert choice["content_filter_results"] == {"blocked": True}
    for choice in (shape.ending(0, "stop", None), shape.whole(0, "a", None, "stop", None)):
        assert "content_filter_results" not in choice


# -- logprobs ------------------------------------------------------------------------------------------------


def test_chat_logprobs_have_the_sampled_token_and_then_the_likeliest() -> None:
    assert CHAT.logprobs([entry(0, [1, 0, 2], [-2.5, -0.25, -0.5])], Texts()) == {
        "content": [
            {
                "token": "\ufffd",
                "logprob": -2.5,
                "bytes": [0xC3],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.25, "bytes": [97]},
                    {"token": "敏", "logprob": -0.5, "bytes": list("敏".encode())},
                ],
            }
        ],
        "refusal": None,
    }


def test_legacy_logprobs_are_four_lists() -> None:
    entries = [entry(0, [0, 0, 2], [-0.5, -0.5, -1.5]), entry(1, [2, 0, 2], [-1.25, -0.75, -1.25])]
    assert RAW.logprobs(entries, Texts()) == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -1.25],
        "tokens": ["a", "敏"],
        "top_logprobs": [{"a": -0.5, "敏": -1.5}, {"敏": -1.25, "a": -0.75}],
    }


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_logprobs_that_json_lacks_are_openais_least(value: float) -> None:
    entries = [entry(0, [0, 0, 2], [value, value, value])]
    for shape in (CHAT, RAW):
        encoded = json_bytes(shape.logprobs(entries, Texts()))
        assert encoded.count(b"%.1f" % MIN_LOGPROB) == 3
        assert b"null" not in encoded.replace(b'"refusal":null', b"")


def test_logprobs_of_a_real_vocabulary_join_to_the_text() -> None:
    ids = vocabulary().tokenizer.encode("敏感词 👋 café", add_special_tokens=False).ids
    shown = CHAT.logprobs([entry(0, [each], [-1.0]) for each in ids], vocabulary())["content"]
    assert b"".join(bytes(each["bytes"]) for each in shown).decode() == "敏感词 👋 café"
