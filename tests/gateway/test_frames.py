"""The exact bytes of an answer, and that OpenAI's own client finds its shapes in them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway import answer_schema
from gateway.frames import (
    DONE,
    PING,
    TEXT_MARK,
    ChatShape,
    CompletionShape,
    Shape,
    data_frame,
    json_bytes,
    json_string,
    text_template,
    usage_object,
)
from gateway.whole_message import WholeCall, WholeMessage
from pipeline.events import CONTENT, REASONING, Finish, ToolCallDelta
from pipeline.values import Dropped, Usage
from tests.gateway.test_answer_logprobs import Texts, entry

CHAT = ChatShape("r1", 1_700_000_000, "m")
RAW = CompletionShape("r1", 1_700_000_000, "m")
BOTH_NAMES = ChatShape("r1", 1_700_000_000, "m", reasoning_content=True)
FIRST = ToolCallDelta(1, "get_weather", "", "call_1")
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


def quick_frame(shape: Shape, index: int, text: str, channel: str = CONTENT) -> bytes:
    return json_string(text).join(text_template(shape, shape.delta(index, TEXT_MARK, None, channel)))


def content(*texts: str) -> WholeMessage:
    return WholeMessage(content=list(texts))


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
    assert quick_frame(CHAT, 1, "hi") == (
        head + b'{"index":1,"delta":{"content":"hi"},"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert quick_frame(CHAT, 1, "hi", REASONING) == (
        head + b'{"index":1,"delta":{"reasoning":"hi"},"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert quick_frame(BOTH_NAMES, 1, "hi", REASONING) == (
        head + b'{"index":1,"delta":{"reasoning":"hi","reasoning_content":"hi"},'
        b'"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert data_frame(CHAT.chunk([CHAT.tool_call(0, FIRST)])) == (
        head + b'{"index":0,"delta":{"tool_calls":[{"index":1,"id":"call_1","type":"function",'
        b'"function":{"name":"get_weather","arguments":""}}]},"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert data_frame(CHAT.chunk([CHAT.tool_call(0, ToolCallDelta(1, None, '{"a'))])) == (
        head + b'{"index":0,"delta":{"tool_calls":[{"index":1,"function":{"arguments":"{\\"a"}}]},'
        b'"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert data_frame(CHAT.chunk([CHAT.ending(0, Finish("stop"))])) == (
        head + b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n'
    )
    assert data_frame(CHAT.chunk([]) | {"usage": USAGE}) == (
        head + b'],"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8,'
        b'"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
    )


def test_frames_of_a_completion_are_these_bytes() -> None:
    head = b'data: {"id":"cmpl-r1","object":"text_completion","created":1700000000,"model":"m","choices":['
    assert RAW.opening(0) is None
    assert quick_frame(RAW, 0, "hi") == (
        head + b'{"index":0,"text":"hi","logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert data_frame(RAW.chunk([RAW.ending(0, Finish("stop", "END"))])) == (
        head + b'{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":"END"}]}\n\n'
    )


def test_fixed_frames_are_whole() -> None:
    assert (DONE, PING) == (b"data: [DONE]\n\n", b": ping\n\n")


@pytest.mark.parametrize("shape", [CHAT, RAW], ids=lambda shape: shape.kind)
@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_the_quick_frame_equals_the_encoded_one(shape: Shape, text: str) -> None:
    assert quick_frame(shape, 2, text) == data_frame(shape.chunk([shape.delta(2, text, None)]))


@pytest.mark.parametrize("shape", [CHAT, BOTH_NAMES], ids=["one name", "two names"])
@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_the_quick_frame_equals_the_encoded_one_in_every_channel(shape: Shape, text: str) -> None:
    whole = data_frame(shape.chunk([shape.delta(2, text, None, REASONING)]))
    assert quick_frame(shape, 2, text, REASONING) == whole
    quick = text_template(shape, shape.tool_call(2, ToolCallDelta(3, None, TEXT_MARK)))
    whole = data_frame(shape.chunk([shape.tool_call(2, ToolCallDelta(3, None, text))]))
    assert json_string(text).join(quick) == whole


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_no_client_cuts_a_frame_within_its_text(text: str) -> None:
    for encoded in (json_string(text), json_bytes(text)):
        assert json.loads(encoded) == text
        assert len(encoded.decode().splitlines()) == 1
    called = ToolCallDelta(0, text, text, text)
    for choice in (
        BOTH_NAMES.delta(0, text, None, REASONING),
        BOTH_NAMES.tool_call(0, called),
        BOTH_NAMES.ending(0, Finish("stop", text, text)),
    ):
        assert len(data_frame(BOTH_NAMES.chunk([choice])).decode().splitlines()) == 2


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
        BOTH_NAMES.chunk([BOTH_NAMES.delta(0, "hm", logprobs, REASONING)]),
        CHAT.chunk([CHAT.tool_call(0, FIRST)]),
        CHAT.chunk([CHAT.tool_call(0, ToolCallDelta(1, None, '{"a'))]),
        CHAT.chunk([CHAT.ending(0, Finish("tool_calls"))]),
        CHAT.chunk([CHAT.ending(0, Finish("length"))]),
        CHAT.chunk([CHAT.ending(0, Finish("content_filter"))]),
        CHAT.chunk([CHAT.ending(0, Finish("stop", None, "not JSON"))]),
        CHAT.chunk([]) | {"usage": USAGE, "timings": {"ttft_ms": 1.5}},
        CHAT.chunk([]) | {"usage": usage_object(Usage(5, 3, 2, reasoning_tokens=1))},
    ]


def whole_chats() -> list[dict[str, Any]]:
    """Every kind of message in one answer, with one name for reasoning and with both."""
    logprobs = CHAT.logprobs([entry(0, [0, 0, 2], [-0.5, -0.5, -1.5])], Texts())
    calls = [WholeCall("c1", "f", ['{"a"', ":1}"]), WholeCall("c2", "g", [""])]
    answers = []
    for shape in (CHAT, BOTH_NAMES):
        choices = [
            shape.whole(0, content("h", "i"), logprobs, Finish("stop", 7)),
            shape.whole(1, WholeMessage(["a"], ["h", "m"], calls), None, Finish("tool_calls")),
            shape.whole(2, WholeMessage(calls=calls), None, Finish("tool_calls")),
            shape.whole(3, WholeMessage(), None, Finish("length", None, "not JSON")),
        ]
        answers.append(shape.document(choices, usage_object(Usage(5, 3, 2, reasoning_tokens=1))))
    return answers


def test_openais_client_reads_chat_chunks() -> None:
    for chunk in chat_chunks():
        parsed = ChatCompletionChunk.model_validate_json(json_bytes(chunk), strict=True)
        assert parsed.to_dict(mode="json", exclude_unset=True) == chunk
        assert parsed.choices or parsed.usage


def test_openais_client_reads_a_whole_chat() -> None:
    for answer in whole_chats():
        parsed = ChatCompletion.model_validate_json(json_bytes(answer), strict=True)
        assert parsed.to_dict(mode="json", exclude_unset=True) == answer
        assert [choice.message.content for choice in parsed.choices] == ["hi", "a", None, ""]
        assert [len(choice.message.tool_calls or ()) for choice in parsed.choices] == [0, 2, 2, 0]
        assert parsed.usage is not None
        assert parsed.usage.completion_tokens_details is not None
        assert parsed.usage.completion_tokens_details.reasoning_tokens == 1


def test_a_whole_chat_has_only_the_fields_that_it_needs() -> None:
    plain, both = (answer["choices"] for answer in whole_chats())
    assert [list(choice["message"]) for choice in plain] == [
        ["role", "content", "refusal"],
        ["role", "content", "refusal", "reasoning", "tool_calls"],
        ["role", "content", "refusal", "tool_calls"],
        ["role", "content", "refusal"],
    ]
    assert plain[1]["message"]["reasoning"] == "hm"
    assert both[1]["message"]["reasoning_content"] == "hm"
    assert plain[1]["message"]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
    ]
    assert ["format_results" in choice for choice in plain] == [False, False, False, True]
    assert plain[3]["format_results"] == {"valid": False, "problem": "not JSON"}


def test_a_raw_completion_takes_no_other_channel() -> None:
    with pytest.raises(AssertionError):
        RAW.delta(0, "hm", None, REASONING)
    with pytest.raises(AssertionError):
        RAW.tool_call(0, FIRST)
    for message in (WholeMessage(reasoning=["hm"]), WholeMessage(calls=[WholeCall("c", "f")])):
        with pytest.raises(AssertionError):
            RAW.whole(0, message, None, Finish("stop"))


def test_usage_has_reasoning_tokens_only_where_they_are_known() -> None:
    assert "completion_tokens_details" not in USAGE
    details = usage_object(Usage(5, 3, 2, reasoning_tokens=0))["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0}


def test_usage_does_not_know_what_was_cached_where_the_engine_does_not_tell() -> None:
    assert usage_object(Usage(5, 3, None))["prompt_tokens_details"] == {"cached_tokens": None}


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
    whole = RAW.document([RAW.whole(0, content("a"), logprobs, Finish("stop"))], USAGE)
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
    raw_logprobs = RAW.logprobs([entry(0, [0, 0, 2], [-0.5, -0.5, -1.5])], Texts())
    written = [
        *((answer_schema.ChatChunk, chunk) for chunk in chat_chunks()),
        *((answer_schema.ChatCompletion, answer) for answer in whole_chats()),
        (
            answer_schema.Completion,
            RAW.document([RAW.whole(0, content("a"), raw_logprobs, Finish("stop", "END"))], USAGE),
        ),
        (answer_schema.Completion, RAW.chunk([RAW.ending(0, Finish("content_filter"))])),
    ]
    for kind, value in written:
        read = msgspec.json.decode(json_bytes(value), type=kind)
        assert msgspec.json.decode(msgspec.json.encode(read)) == value


@pytest.mark.parametrize("shape", [CHAT, RAW], ids=lambda shape: shape.kind)
def test_only_a_content_filter_has_results(shape: Shape) -> None:
    for choice in (
        shape.ending(0, Finish("content_filter")),
        shape.whole(0, content("a"), None, Finish("content_filter")),
    ):
        assert choice["content_filter_results"] == {"blocked": True}
    for choice in (shape.ending(0, Finish("stop")), shape.whole(0, content("a"), None, Finish("stop"))):
        assert "content_filter_results" not in choice
