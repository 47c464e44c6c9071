"""Streams of OpenAI-compatible servers, as each of them speaks, read into channels and ends."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from backend import tool_call_order
from backend.sse_reader import SseReader
from backend.tool_call_order import CallDelta, ToolCallOrder
from backend.upstream_errors import MAX_WORDS, body_words
from backend.upstream_faults import server_error
from backend.upstream_openai import HEAL_S, OpenAiWire
from pipeline.errors import EngineFailed, EngineRejected, HeadraceError, QueueFull
from pipeline.events import CONTENT, REASONING, TOOL_ARGUMENTS, TOOL_NAME, Fragment
from pipeline.values import TextCall, TextUsage
from tests.fake_openai_server import DIALECTS, DONE, Play, events, playing, refusal, whole
from tests.fake_upstream import event
from tests.pipeline.splits import random_split

CALL = TextCall("m", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 3, 1, 16)
CALLS = (("find", ['{"a"', ': "b}"', "}"]), ("stop", ['{"x": [', "1]}"]))


class Sink:
    """What a choice was told. `calls`: name, id and arguments of each tool call."""

    def __init__(self) -> None:
        self.fragments: list[Fragment] = []
        self.num_tokens: list[int] = []
        self.last: tuple[str, int | str | None, TextUsage] | None = None
        self.error: HeadraceError | None = None

    def text(self, fragments: Sequence[Fragment], num_tokens: int, now_s: float) -> None:
        assert self.last is None
        assert self.error is None
        self.fragments += fragments
        self.num_tokens.append(num_tokens)

    def ended(self, finish: str, stop: int | str | None, usage: TextUsage, now_s: float) -> None:
        assert self.last is None
        assert self.error is None
        self.last = finish, stop, usage

    def failed(self, error: HeadraceError) -> None:
        assert self.last is None
        assert self.error is None
        self.error = error

    def said(self, channel: str) -> str:
        return "".join(fragment.text for fragment in self.fragments if fragment.channel == channel)

    @property
    def calls(self) -> list[tuple[str, str | None, str]]:
        return calls_of(self.fragments)


def calls_of(fragments: Sequence[Fragment]) -> list[tuple[str, str | None, str]]:
    """Checks the order that `pipeline.events.Fragment` promises."""
    calls: list[tuple[str, str | None, str]] = []
    is_open = False
    for fragment in fragments:
        if fragment.channel == TOOL_NAME:
            assert fragment.call == len(calls)
            calls.append((fragment.text, fragment.call_id, ""))
            is_open = True
        elif fragment.channel == TOOL_ARGUMENTS:
            assert is_open
            assert fragment.call == len(calls) - 1
            name, call_id, arguments = calls[-1]
            calls[-1] = (name, call_id, arguments + fragment.text)
        else:
            is_open = False
    return calls


def read(payloads: Sequence[bytes], ends: bool = True) -> tuple[Sink, bool | None]:
    """All events, and the end of the body. What `closed` said, None where the reader was done before."""
    sink = Sink()
    reader = OpenAiWire().reader(CALL, sink)
    for payload in payloads:
        if reader.event(payload, 1.0):
            return sink, None
    return sink, reader.closed(1.0) if ends else None


def played(play: Play, *, is_chat: bool = True) -> tuple[Sink, bool | None]:
    """A whole stream of the fake server, cut into payloads as the gateway does it."""
    body = json.loads(OpenAiWire().request(CALL, "r").body)
    return read(SseReader(1 << 20).feed(b"".join(events(play, body, is_chat))))


def data(*values: Any) -> list[bytes]:
    return [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {"choices": choices, **fields}


# -- requests ------------------------------------------------------------------------------------------------


def test_request_has_the_clients_fields_and_what_is_decided_here() -> None:
    fields = {"messages": [], "n": 3, "temperature": 0, "stream": False, "stream_options": {"x": 1}, "é": "ü"}
    call = TextCall("m", "/v1/chat/completions", fields, 3, 1, 16)
    request = OpenAiWire().request(call, "id-1")
    assert (request.method, request.target) == ("POST", "/v1/chat/completions")
    assert dict(request.headers) == {
        b"content-type": b"application/json",
        b"accept": b"text/event-stream",
        b"x-request-id": b"id-1",
    }
    assert json.loads(request.body) == {
        "messages": [],
        "temperature": 0,
        "é": "ü",
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


REFUSES = b'{"detail": [{"loc": ["body", "stream_options"]}]}'


def asks(wire: OpenAiWire) -> bool:
    """Whether the next request asks for usage."""
    return "stream_options" in json.loads(wire.request(CALL, "r").body)


def test_server_that_refuses_stream_options_is_not_asked_again_when_it_has_answered_without() -> None:
    now_s = 5.0
    wire = OpenAiWire(lambda: now_s)
    readers = [wire.reader(CALL, Sink()) for _ in range(3)]
    assert not readers[0].refused(400, b'{"error": "temperature"}')
    assert not readers[0].refused(500, REFUSES)
    assert asks(wire)
    for reader in readers[:2]:  # several at once, which were all sent before the first refusal came
        assert reader.refused(422, REFUSES)
        assert not asks(wire), "the same again, in another way"
        assert asks(wire), "the next one"
    assert readers[2].event(data(chunk({"content": "a"}, "stop"))[0], 1.0) is False
    assert readers[2].event(b"[DONE]", 1.0)
    assert asks(wire), "one that was not refused has shown nothing"
    assert readers[0].event(data(chunk({"content": "a"}, "stop"))[0], 1.0) is False
    assert asks(wire)
    assert readers[0].event(b"[DONE]", 1.0)
    assert not asks(wire)
    now_s += HEAL_S
    assert asks(wire), "what a server refuses may change"


def test_request_that_is_refused_again_without_stream_options_has_taught_nothing() -> None:
    wire = OpenAiWire()
    reader = wire.reader(CALL, sink := Sink())
    assert reader.refused(400, b'{"error": "stream_options: the client\'s own words"}')
    assert not asks(wire)
    assert reader.event(data({"error": {"message": "bad role", "code": 400}})[0], 1.0)
    assert isinstance(sink.error, EngineRejected)
    assert asks(wire)


# -- dialects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_content_and_reasoning_of_every_dialect(dialect: str) -> None:
    sink, closed = played(Play(dialect, content=("你", "好", "!"), reasoning=("h", "m")))
    assert closed is None, "the stream itself has told its end"
    assert (sink.said(REASONING), sink.said(CONTENT)) == ("hm", "你好!")
    assert sink.num_tokens == [1] * 5
    assert sink.last is not None
    finish, stop, usage = sink.last
    assert (finish, stop) == ("stop", None)
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 5)
    assert usage.cached_tokens == (None if dialect in ("tgi", "ollama", "llamacpp") else 4)
    assert usage.reasoning_tokens == (2 if dialect in ("sglang", "openai") else None)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tool_calls_of_every_dialect(dialect: str) -> None:
    sink, _ = played(Play(dialect, content=("so:",), calls=CALLS))
    ids = ["chatcmpl-0"] * 2 if dialect == "tgi" else ["call-0", "call-1"]
    assert sink.calls == [("find", ids[0], '{"a": "b}"}'), ("stop", ids[1], '{"x": [1]}')]
    assert sink.last is not None
    assert sink.last[0] == "tool_calls"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_completions_of_every_dialect(dialect: str) -> None:
    sink, closed = played(Play(dialect), is_chat=False)
    assert closed is None
    assert sink.said(CONTENT) == "Hello!"
    assert sink.num_tokens == [1] * 3
    assert sink.last == ("stop", None, sink.last[2] if sink.last else None)
    assert sink.last is not None
    assert sink.last[2].completion_tokens == 3


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "trtllm"])
def test_stop_string_is_told_where_the_server_tells_it(dialect: str) -> None:
    sink, _ = played(Play(dialect, stop="END"))
    assert sink.last is not None
    assert sink.last[:2] == ("stop", "END")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("fault", ["no_done", "no_usage"])
def test_end_without_usage_or_without_done_is_an_end(dialect: str, fault: str) -> None:
    sink, closed = played(Play(dialect, fault=fault))
    assert sink.said(CONTENT) == "Hello!"
    assert sink.last is not None
    assert sink.last[0] == "stop"
    has_counts = fault == "no_done" or dialect == "llamacpp"  # which tells them by its timings
    assert sink.last[2].completion_tokens == (3 if has_counts else None)
    assert closed is None


def test_body_that_ends_after_the_finish_is_complete() -> None:
    sink, closed = read(data(chunk({"content": "a"}), chunk({}, "length")))
    assert (closed, sink.last) == (True, ("length", None, TextUsage()))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_body_that_ends_before_the_finish_is_not(dialect: str) -> None:
    sink, closed = played(Play(dialect, fault="cut"))
    assert (closed, sink.last, sink.error) == (False, None, None)


@pytest.mark.parametrize("dialect", [each for each in DIALECTS if each != "ollama"])
def test_error_event_ends_the_choice(dialect: str) -> None:
    sink, closed = played(Play(dialect, fault="error"))
    assert isinstance(sink.error, EngineFailed)
    assert "the engine died" in sink.error.message
    assert sink.error.log_detail == "", "the server's words may quote the request"
    assert closed is None


def test_ollamas_error_is_a_stream_that_broke_off() -> None:
    assert played(Play("ollama", fault="error"))[1] is False


@pytest.mark.parametrize("is_chat", [True, False])
def test_answer_that_is_no_stream_is_read_as_one(is_chat: bool) -> None:
    play = Play("openai", content=("Hello",), reasoning=("hm",) * is_chat, calls=CALLS[:is_chat])
    sink, closed = read(data(whole(play, {}, is_chat)))
    assert closed is (None if is_chat else True)
    assert (sink.said(CONTENT), sink.said(REASONING)) == ("Hello", "hm" if is_chat else "")
    assert sink.calls == ([("find", "call-0", '{"a": "b}"}')] if is_chat else [])
    assert sink.last is not None
    assert sink.last[2].prompt_tokens == 7


# -- chunks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "delta",
    [
        {},
        {"role": "assistant"},
        {"role": "assistant", "content": ""},
        {"content": None, "reasoning_content": None, "reasoning": None, "refusal": None, "tool_calls": None},
        {"tool_calls": []},
        {"something": {"new": [1]}},
    ],
    ids=str,
)
def test_delta_without_text_says_nothing(delta: dict[str, Any]) -> None:
    sink, _ = read(data(chunk(delta)))
    assert sink.num_tokens == []


@pytest.mark.parametrize(
    ("delta", "shown"),
    [
        ({"content": "a"}, [(CONTENT, "a")]),
        ({"reasoning": "a"}, [(REASONING, "a")]),
        ({"reasoning_content": "a", "reasoning": "a"}, [(REASONING, "a")]),
        ({"reasoning_content": "a", "content": "b"}, [(REASONING, "a"), (CONTENT, "b")]),
        ({"reasoning": {"effort": "low"}, "content": "b"}, [(CONTENT, "b")]),
        ({"refusal": "No."}, [(CONTENT, "No.")]),
        ({"content": [{"type": "text", "text": "a"}, {"type": "x"}, "b"]}, [(CONTENT, "ab")]),
    ],
    ids=str,
)
def test_text_goes_to_its_channel(delta: dict[str, Any], shown: list[tuple[str, str]]) -> None:
    sink, _ = read(data(chunk(delta)))
    assert [(fragment.channel, fragment.text) for fragment in sink.fragments] == shown


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("eos_token", "stop"),
        ("stop_sequence", "stop"),
        ("function_call", "tool_calls"),
        ("content_filter", "content_filter"),
        ("something_new", "something_new"),
    ],
)
def test_finish_is_told_in_openais_words(word: str, shown: str) -> None:
    sink, _ = read(data(chunk({"content": "a"}, word), DONE[6:-2]))
    assert sink.last is not None
    assert sink.last[0] == shown


@pytest.mark.parametrize("word", ["abort", "error", "cancelled"])
def test_finish_that_is_a_fault_is_a_failure(word: str) -> None:
    sink, _ = read(data(chunk({"content": "a"}), chunk({}, word)))
    assert isinstance(sink.error, EngineFailed)
    assert word in sink.error.message


def test_done_without_a_finish_is_a_failure() -> None:
    sink, _ = read(data(chunk({"content": "a"}), b"[DONE]"))
    assert isinstance(sink.error, EngineFailed)
    assert "finish reason" in sink.error.message


def test_continuous_usage_counts_the_tokens_of_each_event() -> None:
    usages = [{"prompt_tokens": 5, "completion_tokens": count} for count in (0, 2, 2, 5, 6)]
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        *({"content": "x"} for _ in range(4)),
    ]
    chunks = [chunk(delta, usage=usage) for delta, usage in zip(deltas, usages, strict=True)]
    sink, _ = read(data(*chunks, chunk({}, "stop", usage=usages[-1]), b"[DONE]"))
    assert sink.num_tokens == [2, 0, 3, 1]
    assert sink.last == ("stop", None, TextUsage(5, 6))


def test_usage_in_the_chunk_with_the_finish_is_kept() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 0}}
    sink, _ = read(data(chunk({"content": "a"}), chunk({}, "stop", usage=usage), b"[DONE]"))
    assert sink.last == ("stop", None, TextUsage(5, 1, None, 0))


def test_usage_of_zeros_is_none() -> None:
    zeros = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    sink, _ = read(data(chunk({"content": "a"}, usage=zeros), chunk({}, "stop", usage=zeros), b"[DONE]"))
    assert (sink.num_tokens, sink.last) == ([1], ("stop", None, TextUsage()))


def test_text_and_calls_in_one_delta_are_both_read() -> None:
    call = {"index": 0, "id": "i", "function": {"name": "f", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    deltas: list[dict[str, Any]] = [
        {"content": "a", "tool_calls": [call]},
        {"content": "b"},
        {"tool_calls": [rest]},
    ]
    sink, _ = read(data(*map(chunk, deltas), chunk({}, "tool_calls"), b"[DONE]"))
    assert (sink.said(CONTENT), sink.calls) == ("ab", [("f", "i", '{"a": 1}')])
    assert sink.fragments[-1] == Fragment(CONTENT, "b"), "it waits for the end of the call"


def test_other_choices_are_not_looked_at() -> None:
    others: list[Any] = [
        {"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": finish}]}
        for finish in (None, "length")
    ]
    sink, closed = read(data(chunk({"content": "a"}), *others))
    assert (sink.said(CONTENT), closed) == ("a", False)


@pytest.mark.parametrize(
    "payload",
    [
        *(b"{", b'{"choices": 1}', b'[{"choices": []}]', b"<html>"),
        *(b'{"choices": [{"delta": {"content": 5}}]}', b'{"choices": [{"delta": "hi"}]}', b'{"a": 1} {'),
        *(b'{"x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"error": ' + b"[" * 50_000),
    ],
    ids=lambda payload: payload[:30].decode(),
)
def test_what_may_have_held_text_and_is_no_chunk_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read([payload])
    sink, closed = read([*data(chunk({"content": "a"}, "stop")), payload])
    assert (closed, sink.last, sink.error) == (True, ("stop", None, TextUsage()), None), "after the finish"


@pytest.mark.parametrize("payload", [b"", b" ", b"[]", b"null", b"5", b'"x"', b"\xff", b"ping"], ids=str)
def test_event_that_says_nothing_is_none(payload: bytes) -> None:
    sink, closed = read([payload, *data(chunk({"content": "a"}, "stop")), payload])
    assert (sink.said(CONTENT), closed) == ("a", True)


# -- trifles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "told"),
    [
        ({"prompt_tokens": 3.0, "completion_tokens": 2.0}, TextUsage(3, 2)),
        ({"prompt_tokens": 3.5, "completion_tokens": 2}, TextUsage(None, 2)),
        ({"prompt_tokens": "3", "completion_tokens": 2}, TextUsage(None, 2)),
        ({"prompt_tokens": -5, "completion_tokens": -7}, TextUsage()),
        ({"prompt_tokens": 1 << 62, "completion_tokens": 1 << 70}, TextUsage()),
        ({"prompt_tokens": 3, "completion_tokens": 2, "reasoning_tokens": -9}, TextUsage(3, 2)),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": -9}}, TextUsage(3)),
        ({"prompt_tokens": 3, "prompt_tokens_details": "x", "completion_tokens_details": [1]}, TextUsage(3)),
        ([1], TextUsage()),
        ("x", TextUsage()),
    ],
    ids=str,
)
def test_counts_that_can_be_none_are_passed_over(usage: Any, told: TextUsage) -> None:
    sink, _ = read(
        data(chunk({"content": "a"}), chunk({}, "stop"), {"choices": [], "usage": usage}, b"[DONE]")
    )
    assert (sink.said(CONTENT), sink.last) == ("a", ("stop", None, told))
    sink, _ = read(data(chunk({"content": "a"}, usage=usage), chunk({}, "stop"), b"[DONE]"))
    assert sink.num_tokens == [told.completion_tokens or 1]


@pytest.mark.parametrize("value", [-1, 1 << 62, 1.5, "1", None])
def test_llamacpps_timings_that_can_be_none_are_passed_over(value: Any) -> None:
    timings = {"cache_n": value, "prompt_n": 2, "predicted_n": value}
    sink, _ = read(data(chunk({"content": "a"}), chunk({}, "stop", timings=timings), b"[DONE]"))
    assert sink.last == ("stop", None, TextUsage(2))
    assert read(data(chunk({"content": "a"}, "stop", timings=[1]), b"[DONE]"))[0].last


@pytest.mark.parametrize("index", [0, "0", 0.0, None])
def test_choice_may_be_numbered_in_any_way(index: Any) -> None:
    one = {"choices": [{"index": index, "delta": {"content": "a"}, "finish_reason": None}]}
    end = {"choices": [{"index": index, "delta": {}, "finish_reason": "stop"}]}
    sink, _ = read(data(one, end, b"[DONE]"))
    assert (sink.said(CONTENT), sink.last) == ("a", ("stop", None, TextUsage()))


def test_all_of_one_event_is_read() -> None:
    choices = [
        *({"index": 1, "delta": {"content": "x"}}, {"index": 0, "delta": {"content": "a"}}),
        *({"index": 0, "delta": {"content": "b"}}, {"index": 1, "delta": {}, "finish_reason": "length"}),
    ]
    sink, _ = read(data({"choices": choices}, chunk({}, "stop"), b"[DONE]"))
    assert (sink.said(CONTENT), sink.last and sink.last[0]) == ("ab", "stop")
    sink, _ = read(data({"choices": choices[1:3]}))
    assert sink.said(CONTENT) == "ab"


@pytest.mark.parametrize(
    ("value", "told"),
    [([1], None), (1.5, None), ({"a": 1}, None), (True, None), ("x" * 257, None), (1 << 80, None), (7, 7)],
)
def test_stop_reason_that_can_be_none_is_passed_over(value: Any, told: int | None) -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": value}]}
    assert read(data(chunk({"content": "a"}), end, b"[DONE]"))[0].last == ("stop", told, TextUsage())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"a\\ud800b", "a\ufffdb"),
        (b"a\xffb", "a\ufffdb"),
        (b"a\x01b", "a\x01b"),
        (b"\\ud83d\\ude00", "\U0001f600"),
    ],
)
def test_text_that_strict_readers_refuse_is_not_lost(text: bytes, shown: str) -> None:
    sink, _ = read([b'{"choices": [{"index": 0, "delta": {"content": "' + text + b'"}, "logprobs": NaN}]}'])
    assert sink.said(CONTENT) == shown
    shown.encode()


def test_call_may_be_numbered_and_named_in_any_way() -> None:
    for index in (0, "0", 0.0, None, 1 << 62, -3):
        call = {"index": index, "id": 5, "type": 7, "function": {"name": "f", "arguments": "{}"}}
        sink, _ = read(data(chunk({"tool_calls": [call]}), chunk({}, "tool_calls"), b"[DONE]"))
        assert sink.calls == [("f", None, "{}")]
    deltas = [
        {"tool_calls": [{"index": place, "function": function}]}
        for place, function in (
            *(("0", {"name": "f", "arguments": "["}), ("1", {"name": "g", "arguments": "{"})),
            *(("0", {"arguments": "]"}), ("1", {"arguments": "}"})),
        )
    ]
    sink, _ = read(data(*map(chunk, deltas), chunk({}, "tool_calls"), b"[DONE]"))
    assert sink.calls == [("f", None, "[]"), ("g", None, "{}")]


LATE: list[Any] = [
    *(
        {"error": {"message": "late"}},
        chunk({}, "length"),
        chunk({}, "error"),
        {"choices": 3},
        b"{",
        b"<html>",
    ),
    *(chunk({"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]}), b"ping"),
]


@pytest.mark.parametrize("late", LATE, ids=lambda late: str(late)[:40])
def test_what_comes_after_the_finish_cannot_undo_it(late: Any) -> None:
    calls = [{"index": n, "id": f"i{n}", "function": {"name": "f", "arguments": "{}"}} for n in range(2)]
    sink, closed = read(data(chunk({"tool_calls": calls}), chunk({}, "tool_calls"), late))
    assert (sink.last is None, closed) in ((False, None), (False, True))
    assert sink.last is not None
    assert (sink.last[0], sink.error, len(sink.calls)) == ("tool_calls", None, 2)


def test_reader_says_when_it_has_the_finish() -> None:
    reader = OpenAiWire().reader(CALL, Sink())
    reader.event(data(chunk({"content": "a"}))[0], 1.0)
    assert not reader.has_finish
    reader.event(data(chunk({}, "stop"))[0], 1.0)
    assert reader.has_finish


def test_finish_reason_that_is_a_text_is_no_answer() -> None:
    with pytest.raises(ValueError, match="a finish reason of 5000 characters"):
        read(data(chunk({"content": "a"}, "x" * 5000)))


def test_calls_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="name has"):
        ordered(*(piece(0, f"{number}-") for number in range(1000)))
    monkeypatch.setattr(tool_call_order, "MAX_WAITING_CHARS", 1000)
    for late in (piece(1, "g", "x" * 100), Fragment(CONTENT, "x" * 100)):
        ordered(piece(0, "f", "{"), *[late] * 10)
        with pytest.raises(ValueError, match="the limit is 1000"):
            ordered(piece(0, "f", "{"), *[late] * 11)
    order = ToolCallOrder()
    for number in range(30):
        order.calls([piece(number, "f", '{"a": "' + "x" * 100), piece(number + 1, "g", "{}")])
        order.calls([piece(number, arguments='"}')])


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ({"error": {"message": "boom", "type": "server_error", "code": 500}}, EngineFailed, "boom"),
        ({"error": {"message": "bad field", "code": "400"}}, EngineRejected, "bad field"),
        ({"error": {"message": "bad", "type": "invalid_request_error", "code": None}}, EngineRejected, "bad"),
        ({"error": "Model is overloaded", "error_type": "overloaded"}, QueueFull, ""),
        ({"error": "died", "error_type": "generation"}, EngineFailed, "died"),
        ({"object": "error", "message": "old", "code": 400}, EngineRejected, "old"),
        ({"error": {"message": "no key", "code": 401}}, EngineFailed, "no key"),
        ({"error": {"message": "queue", "code": 503}}, QueueFull, ""),
        ({"detail": [{"loc": ["body"], "msg": "missing"}]}, EngineFailed, "missing"),
        ({"error": {"message": "x" * 5000}}, EngineFailed, "x" * MAX_WORDS),
    ],
    ids=str,
)
def test_errors_of_every_form_are_read(value: Any, kind: type[HeadraceError], words: str) -> None:
    sink, _ = read(data(value))
    assert type(sink.error) is kind or isinstance(sink.error, kind)
    assert words in sink.error.message
    assert len(sink.error.message) < MAX_WORDS + 100


def test_error_after_text_is_no_refusal() -> None:
    for code in (400, 429):
        sink, _ = read(data(chunk({"content": "a"}), {"error": {"message": "late", "code": code}}))
        assert isinstance(sink.error, EngineFailed)
        assert "late" in sink.error.message


def test_words_are_cut() -> None:
    assert len(server_error(None, "x" * 9000).message) < MAX_WORDS + 100


def test_null_error_is_none() -> None:
    sink, _ = read(data(chunk({"content": "a"}, error=None), {"error": None}))
    assert (sink.said(CONTENT), sink.error) == ("a", None)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_bodies_of_refusals_are_read(dialect: str) -> None:
    body = json.dumps(refusal(Play(dialect, status=400), "too long")).encode()
    words, _ = body_words(body)
    assert words == "too long"
    assert isinstance(server_error(400, words), EngineRejected)


def test_body_that_is_no_json_is_shown_as_it_is() -> None:
    assert body_words(b"<html>Bad Gateway</html> ") == ("<html>Bad Gateway</html>", None)
    assert body_words(b"\xff" * 9000) == ("\ufffd" * MAX_WORDS, None)
    assert body_words(b"") == ("", None)


# -- the order of tool calls ---------------------------------------------------------------------------------


def piece(
    place: int | None = None, name: str | None = None, arguments: str = "", call_id: str | None = None
) -> CallDelta:
    return CallDelta(place, call_id, name, arguments)


def ordered(*deltas: CallDelta | Fragment) -> list[Fragment]:
    order = ToolCallOrder()
    out: list[Fragment] = []
    for delta in deltas:
        out += order.others([delta]) if isinstance(delta, Fragment) else order.calls([delta])
    return out + order.flush()


def test_arguments_leave_as_they_come() -> None:
    order = ToolCallOrder()
    assert order.calls([piece(0, "f", call_id="i")]) == []
    assert order.calls([piece(0, arguments='{"a')]) == [
        Fragment(TOOL_NAME, "f", 0, "i"),
        Fragment(TOOL_ARGUMENTS, '{"a', 0),
    ]
    assert order.calls([piece(0, arguments='": 1}')]) == [Fragment(TOOL_ARGUMENTS, '": 1}', 0)]
    assert order.flush() == []


def test_calls_that_come_mixed_are_put_in_order() -> None:
    rng = random.Random(3)
    texts = ['{"a": "}{"}', "[1, [2]]", '{"b": {}}', '"s"']
    for _ in range(200):
        left = {
            place: [piece(place, f"f{place}", call_id=f"i{place}")]
            + [piece(place, arguments=part) for part in random_split(text, rng)]
            for place, text in enumerate(texts)
        }
        deltas = [left[0].pop(0)]
        while any(left.values()):
            place = rng.choice([place for place, rest in left.items() if rest])
            if place and any(len(left[before]) and left[before][0].name for before in range(place)):
                continue  # calls begin in the order of their numbers
            deltas.append(left[place].pop(0))
        expected = [(f"f{place}", f"i{place}", text) for place, text in enumerate(texts)]
        assert calls_of(ordered(*deltas)) == expected


def test_text_amid_a_call_waits_for_its_end() -> None:
    said = Fragment(CONTENT, "x")
    fragments = ordered(piece(0, "f", '{"a"'), said, piece(0, arguments=": 1}"), Fragment(REASONING, "y"))
    assert [fragment.channel for fragment in fragments] == [
        TOOL_NAME,
        TOOL_ARGUMENTS,
        TOOL_ARGUMENTS,
        CONTENT,
        REASONING,
    ]


def test_text_after_a_whole_call_does_not_wait() -> None:
    order = ToolCallOrder()
    order.calls([piece(0, "f", "{}")])
    said = Fragment(CONTENT, "x")
    assert order.others([said]) == [said]
    assert calls_of(order.calls([piece(1, "g", "{}")])[:0]) == []


WAYS: dict[str, tuple[list[CallDelta], list[tuple[str, str]]]] = {
    "name repeated": ([piece(0, "f", '{"a"'), piece(0, "f", ":1}")], [("f", '{"a":1}')]),
    "name repeated at the end": ([piece(0, "f", "{}"), piece(0, "f", " ")], [("f", "{} ")]),
    "name repeated at the start": ([piece(0, "f"), piece(0, "f", "{}")], [("f", "{}")]),
    "name in pieces": ([piece(0, "get_"), piece(0, "time", "{}")], [("get_time", "{}")]),
    "all of place 0, with ids": (
        [piece(0, "f", "{}", "a"), piece(0, "f", "{}", "b")],
        [("f", "{}"), ("f", "{}")],
    ),
    "all of place 0, with one id": (
        [
            piece(0, "f", "{", "x"),
            piece(0, None, "}", "x"),
            piece(0, "g", "{", "x"),
            piece(0, None, "}", "x"),
        ],
        [("f", "{}"), ("g", "{}")],
    ),
    "no place": (
        [piece(None, "f", "{}"), piece(None, "g", "{"), piece(None, None, "}")],
        [("f", "{}"), ("g", "{}")],
    ),
    "an id of its own each delta": ([piece(0, "f", "{", "a"), piece(0, None, "}", "b")], [("f", "{}")]),
    "no arguments, all of place 0": (
        [piece(0, "f", "", "a"), piece(0, "f", "", "b")],
        [("f", ""), ("f", "")],
    ),
    "odd places": ([piece(5, "f", "{}"), piece(9, "g", "{}")], [("f", "{}"), ("g", "{}")]),
    "no arguments": ([piece(0, "f"), piece(1, "g")], [("f", ""), ("g", "")]),
    "no JSON": ([piece(0, "f", "not json"), piece(1, "g", "{}")], [("f", "not json"), ("g", "{}")]),
    "goes on": ([piece(0, "f", "{}"), piece(0, "", '{"a": 1}')], [("f", '{}{"a": 1}')]),
}


@pytest.mark.parametrize("way", WAYS)
def test_servers_ways_to_tell_calls(way: str) -> None:
    deltas, calls = WAYS[way]
    assert [(name, arguments) for name, _, arguments in calls_of(ordered(*deltas))] == calls
    together = ToolCallOrder()
    assert calls_of(together.calls(deltas) + together.flush()) == calls_of(ordered(*deltas))


def test_call_without_a_name_and_one_that_goes_on_after_its_end_are_refused() -> None:
    with pytest.raises(ValueError, match="name"):
        ordered(piece(0, arguments="{}"))
    with pytest.raises(ValueError, match="after their end"):
        ordered(piece(0, "f", "{}"), piece(1, "g", "{"), piece(0, arguments='{"late": 1}'))
    assert ordered(piece(0, "f", "{}"), piece(1, "g", "{}"), piece(0, arguments="\n"))


def test_call_without_a_name_fails_at_the_end_of_the_stream() -> None:
    nameless = {"tool_calls": [{"index": 0, "id": "i", "function": {"arguments": ""}}]}
    sink, _ = read(data(chunk(nameless), chunk({}, "stop"), b"[DONE]"))
    assert isinstance(sink.error, EngineFailed)
    assert "name" in sink.error.message


def test_old_function_call_is_a_tool_call() -> None:
    deltas = [{"function_call": {"name": "f", "arguments": ""}}, {"function_call": {"arguments": "{}"}}]
    sink, _ = read(data(*map(chunk, deltas), chunk({}, "function_call"), b"[DONE]"))
    assert (sink.calls, sink.last and sink.last[0]) == ([("f", None, "{}")], "tool_calls")


def test_arguments_that_are_an_object_are_written_as_json() -> None:
    call = {"index": 0, "id": "i", "function": {"name": "f", "arguments": {"a": "é"}}}
    sink, _ = read(data(chunk({"tool_calls": [call]}), chunk({}, "tool_calls"), b"[DONE]"))
    assert sink.calls == [("f", "i", '{"a":"é"}')]


# -- the fake server -----------------------------------------------------------------------------------------


async def test_fake_server_streams_to_a_real_client() -> None:
    """The client library of OpenAI takes what the fake says, so that it is no invention of ours."""
    openai = pytest.importorskip("openai")
    play = Play("openai", calls=CALLS)
    async with playing(play) as server:
        client = openai.AsyncOpenAI(api_key="k", base_url=f"{server.url}/v1", max_retries=0)
        for dialect in itertools.chain(DIALECTS):
            play.dialect = dialect
            stream = await client.chat.completions.create(
                model="m", messages=[], stream=True, stream_options={"include_usage": True}
            )
            chunks = [each async for each in stream]
            text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
            assert (text, chunks[-1].usage.prompt_tokens) == ("Hello!", 7)
        await client.close()
    assert event({"a": "é"}) == 'data: {"a":"é"}\n\n'.encode()
