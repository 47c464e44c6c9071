"""One choice at an upstream server: every way in which its exchange can end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from backend import upstream_answer
from backend.http_ports import HttpFault
from backend.http_slices import GAP_S, SLICE_BYTES
from backend.sse_reader import SseReader
from backend.upstream_completions import CompletionsWire
from backend.upstream_faults import MAX_BODY_BYTES, ModelGone, UpstreamFault
from backend.upstream_tokens import TokenReader
from pipeline.errors import EngineFailed, EngineRejected, HeadraceError, QueueFull, WorkerLost
from pipeline.values import FirstToken, TokenLogprobs
from tests.backend.linked import until
from tests.backend.test_upstream_tokens import Played
from tests.backend.vllm_streams import completion_event, usage_event

DONE = b"data: [DONE]\n\n"
JSON = ((b"content-type", b"application/json"),)


def refused(status: int, body: bytes, learns: bool = False) -> Played:
    played = Played(CompletionsWire())
    played.host.learns = learns
    played.answer.begun(status, JSON)
    played.answer.data(body)
    played.answer.ended()
    return played


async def test_refusal_is_sent_again_once_if_its_wire_has_learned() -> None:
    played = refused(400, b'{"error":{"message":"no stream_options"}}', learns=True)
    assert (len(played.sent), played.sink.ended.done(), played.load.num_waiting) == (2, False, 1)
    assert not played.host.noted_errors
    played.play([completion_event([5], "stop"), DONE])
    assert (played.sink.ids, played.end, len(played.sent)) == ([5], "stop", 2)
    twice = refused(400, b'{"error":{"message":"no stream_options"}}', learns=True)
    twice.answer.begun(400, JSON)
    twice.answer.data(b'{"error":{"message":"still no"}}')
    twice.answer.ended()
    assert len(twice.sent) == 2
    assert isinstance(twice.end, EngineRejected)
    assert "still no" in str(twice.end)
    assert twice.load.num_requests == 0


async def test_refusal_says_when_to_come_back() -> None:
    played = Played(CompletionsWire())
    played.answer.begun(429, [*JSON, (b"retry-after", b"7")])
    played.answer.ended()
    assert isinstance(played.end, QueueFull)
    assert played.end.retry_after_s == 7.0


async def test_server_hears_of_a_fault_before_the_sink_does_and_when_it_has() -> None:
    played = Played(CompletionsWire())
    order: list[str] = []
    played.host.noted = lambda model, error, has_begun: order.append(f"host {has_begun}")  # type: ignore[method-assign]
    played.answer._fail = lambda error: order.append(
        f"sink {type(error).__name__} {played.load.num_requests}"
    )
    played.host.told = lambda: order.append("told")  # type: ignore[method-assign]
    played.answer.failed(HttpFault("connection refused"))
    played.answer.failed(HttpFault("again"))
    assert order == ["host False", "sink WorkerLost 0", "told"]


async def test_fault_says_whether_the_server_had_begun() -> None:
    played = Played(CompletionsWire())
    played.answer.begun(200, ())
    played.answer.data(completion_event([5]))
    played.answer.failed(HttpFault("reset", began=True))
    ((model, error, has_begun),) = played.host.noted_errors
    assert (model, str(error), has_begun) == ("m", "upstream vllm+http://gpu1:8000: reset", True)
    gone = refused(404, b'{"error":{"message":"The model `m` does not exist."}}')
    assert isinstance(gone.end, ModelGone)
    assert gone.host.noted_errors[0][2]


async def test_connection_is_kept_while_the_rest_of_the_response_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Played(CompletionsWire())
    played.answer.begun(200, ())
    played.answer.data(completion_event([5], "stop") + usage_event(None))
    assert played.end == "stop"
    played.answer.abort()
    played.answer.data(DONE)
    played.answer.ended()
    assert (played.is_aborted, played.host.noted_errors) == (False, [])
    monkeypatch.setattr(upstream_answer, "TAIL_S", 0.01)
    endless = Played(CompletionsWire())
    endless.answer.begun(200, ())
    endless.answer.data(completion_event([5], "stop") + DONE)
    assert not endless.is_aborted
    await until(lambda: endless.is_aborted)


async def test_connection_that_breaks_after_the_finish_is_no_fault() -> None:
    played = Played(CompletionsWire())
    played.answer.begun(200, ())
    played.answer.data(completion_event([5], "stop") + DONE)
    played.answer.failed(HttpFault("reset", began=True))
    assert (played.end, played.host.noted_errors) == ("stop", [])


async def test_answer_whose_finish_was_told_is_complete_though_its_server_dies() -> None:
    played = Played(CompletionsWire())
    played.answer.begun(200, ())
    played.answer.data(completion_event([5]) + completion_event([6], "stop"))
    assert not played.sink.ended.done()
    played.answer.failed(HttpFault("reset", began=True))
    assert (played.sink.ids, played.end, played.host.noted_errors) == ([5, 6], "stop", [])
    assert played.load.num_requests == 0


async def test_stream_that_stays_open_after_its_finish_holds_the_answer_up_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upstream_answer, "REST_S", 0.01)
    monkeypatch.setattr(upstream_answer, "TAIL_S", 0.01)
    played = Played(CompletionsWire())
    played.answer.begun(200, ())
    played.answer.data(completion_event([5], "stop"))
    assert not played.sink.ended.done(), "the usage may follow"
    await until(played.sink.ended.done)
    assert (played.sink.ids, played.end, played.load.num_requests) == ([5], "stop", 0)
    await until(lambda: played.is_aborted)
    assert not played.host.noted_errors
    whole, aborted = Played(CompletionsWire()), Played(CompletionsWire())
    for each in (whole, aborted):
        each.answer.begun(200, ())
        each.answer.data(completion_event([5], "stop"))
    whole.answer.data(DONE)
    aborted.answer.abort()
    await asyncio.sleep(0.05)
    assert (whole.sink.num_calls, aborted.sink.num_calls) == (1, 0), "told once, or not at all"
    assert not caplog.text


async def test_answer_that_is_json_is_read_whole() -> None:
    played = Played(CompletionsWire())
    played.answer.begun(200, JSON)
    body = completion_event([5, 6], "stop")[6:].strip()
    for index in range(len(body)):
        played.answer.data(body[index : index + 1])
    assert played.sink.ids == []
    played.answer.ended()
    assert (played.sink.ids, played.end) == ([5, 6], "stop")


async def test_answer_that_is_a_page_has_failed() -> None:
    played = Played(CompletionsWire())
    played.answer.begun(200, JSON)
    played.answer.data(b"<html>")
    played.answer.ended()
    assert isinstance(played.end, EngineFailed)


@pytest.mark.parametrize("num_each", [1000, MAX_BODY_BYTES, 5 * MAX_BODY_BYTES])
async def test_body_of_a_refusal_ends_the_call_at_its_bound(num_each: int) -> None:
    played = Played(CompletionsWire())
    played.answer.begun(500, ())
    num_bytes = 0
    while not played.is_over:
        assert num_bytes <= MAX_BODY_BYTES
        played.answer.data(b"x" * num_each)
        num_bytes += num_each
        assert played.answer._whole is not None
        assert len(played.answer._whole) <= MAX_BODY_BYTES
    assert played.is_aborted
    assert len(str(played.end)) < 700
    assert (played.load.num_requests, len(played.host.noted_errors)) == (0, 1)
    learns = Played(CompletionsWire())
    learns.host.learns = True
    learns.answer.begun(400, JSON)
    learns.answer.data(b"x" * (MAX_BODY_BYTES + 1))
    assert (learns.sent[0].is_aborted, len(learns.sent), learns.is_over) == (True, 2, False)
    learns.play([completion_event([5], "stop"), DONE])
    assert learns.sink.ids == [5]


async def test_bytes_of_a_refusal_are_not_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenReader, "max_bytes", 10_000)
    played = refused(400, b"x" * 9_900, learns=True)
    played.play([completion_event([5], "stop"), DONE])
    assert played.end == "stop"


async def test_answer_that_is_json_ends_the_call_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_answer, "MAX_EVENT_BYTES", 1000)
    played = Played(CompletionsWire())
    played.answer.begun(200, JSON)
    played.answer.data(b"x" * 1000)
    assert not played.is_over
    played.answer.data(b"x")
    assert (played.is_aborted, type(played.end)) == (True, UpstreamFault)
    assert str(played.end).endswith("sent an answer of 1001 bytes or more; the limit is 1000")
    assert played.load.num_requests == 0


@pytest.mark.parametrize("event", [b": comment\n\n", b"data: {}\n\n", completion_event([5])])
async def test_answer_without_end_has_a_bound(monkeypatch: pytest.MonkeyPatch, event: bytes) -> None:
    monkeypatch.setattr(TokenReader, "max_bytes", 10_000)
    for num_each in (1, 5):
        played = Played(CompletionsWire(), max_tokens=1 << 20)
        played.answer.begun(200, ())
        num_bytes = 0
        while not played.is_over:
            assert num_bytes <= 10_000
            played.answer.data(event * num_each)
            num_bytes += len(event) * num_each
        assert (played.is_aborted, type(played.end)) == (True, UpstreamFault)
        assert f"an answer of {num_bytes} bytes or more; the limit is 10000" in str(played.end)


async def test_tail_without_end_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenReader, "max_bytes", 10_000)
    played = Played(CompletionsWire())
    played.answer.begun(200, ())
    played.answer.data(completion_event([5], "stop") + DONE)
    played.answer.data(b": x\n\n" * 1500)
    assert not played.is_aborted
    played.answer.data(b": x\n\n" * 1500)
    assert (played.is_aborted, played.end) == (True, "stop")


@pytest.mark.parametrize("kind", [b"Application/JSON", b"application/JSON; charset=utf-8", b"text/json"])
async def test_media_types_have_no_case(kind: bytes) -> None:
    played = Played(CompletionsWire())
    played.answer.begun(200, ((b"content-type", kind),))
    played.answer.data(completion_event([5, 6], "stop")[6:].strip())
    played.answer.ended()
    assert (played.sink.ids, played.end) == ([5, 6], "stop")


# -- long reads ----------------------------------------------------------------------------------------------


def long_stream(num_events: int) -> bytes:
    events = [completion_event([number]) for number in range(num_events)]
    return b"".join(events) + completion_event([num_events], "stop") + DONE


async def test_long_read_is_taken_in_slices_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    feed, sizes = SseReader.feed, list[int]()

    def counted(self: SseReader, data: bytes) -> list[bytes]:
        sizes.append(len(data))
        return feed(self, data)

    monkeypatch.setattr(SseReader, "feed", counted)
    data = long_stream(2000)
    assert len(data) > 10 * SLICE_BYTES
    for cuts in ([], [100], [SLICE_BYTES, SLICE_BYTES + 1], [150_000]):
        for end in ("ended", "failed"):
            played = Played(CompletionsWire(), max_tokens=5000)
            played.answer.begun(200, ())
            for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
                played.answer.data(data[start:stop])
            assert 0 < len(played.sink.ids) <= (1 + len(cuts)) * SLICE_BYTES // 50
            assert played.sent[0].is_paused
            getattr(played.answer, end)(*([HttpFault("reset", True)] if end == "failed" else []))
            await until(lambda played=played: played.is_over)
            assert max(sizes) <= SLICE_BYTES
            assert (played.sink.ids, played.end) == (list(range(2001)), "stop")
            await until(lambda played=played: not played.sent[0].is_paused)
            assert played.answer._tail is None
            assert not played.host.noted_errors


async def test_what_comes_after_a_long_read_waits_for_it() -> None:
    played = Played(CompletionsWire(), max_tokens=5000)
    played.answer.begun(200, ())
    data = long_stream(2000)
    played.answer.data(data[: 5 * SLICE_BYTES])
    played.answer.data(data[5 * SLICE_BYTES : 5 * SLICE_BYTES + 10])  # a read that was under way
    await until(lambda: not played.sent[0].is_paused)
    assert not played.is_over
    played.answer.data(data[5 * SLICE_BYTES + 10 :])
    await until(lambda: played.is_over)
    assert (played.sink.ids, played.end) == (list(range(2001)), "stop")


async def test_end_that_breaks_off_is_told_after_the_last_slice() -> None:
    for end in ("ended", "failed"):
        played = Played(CompletionsWire(), max_tokens=5000)
        played.answer.begun(200, ())
        played.answer.data(b"".join(completion_event([number]) for number in range(1000)))
        getattr(played.answer, end)(*([HttpFault("reset", True)] if end == "failed" else []))
        assert not played.is_over
        await until(lambda played=played: played.is_over)
        assert isinstance(played.end, WorkerLost)
        assert played.sink.ids == list(range(1000))


async def test_abort_drops_what_waits() -> None:
    for by_sink in (False, True):
        played = Played(CompletionsWire(), max_tokens=5000)
        played.answer.begun(200, ())
        take, got = played.sink.tokens, played.sink.ids

        def aborts(*arguments: Any, take: Any = take, got: Any = got, played: Played = played) -> None:
            take(*arguments)
            if len(got) == 500:
                played.answer.abort()

        if by_sink:
            played.sink.tokens = aborts  # type: ignore[method-assign]
        played.answer.data(long_stream(2000))
        played.answer.ended()
        num_taken = len(played.sink.ids)
        if not by_sink:
            played.answer.abort()
        await until(lambda played=played: played.is_aborted)
        await asyncio.sleep(5 * GAP_S)  # nothing is to be seen, however long it takes
        assert len(played.sink.ids) == (500 if by_sink else num_taken)
        assert (played.is_aborted, played.is_over) == (True, False)
        assert played.answer._slices is not None
        assert not played.answer._slices._waiting  # what no one wants holds no memory
        assert played.load.num_requests == 0


async def test_long_reads_of_many_answers_take_turns() -> None:
    first, second = (Played(CompletionsWire(), max_tokens=5000) for _ in range(2))
    for played in (first, second):
        played.answer.begun(200, ())
        played.answer.data(long_stream(2000))
    while not first.is_over:
        assert abs(len(first.sink.ids) - len(second.sink.ids)) <= 2 * SLICE_BYTES // 50
        await asyncio.sleep(0.0001)


async def test_whoever_raises_the_sink_hears_of_the_end(caplog: pytest.LogCaptureFixture) -> None:
    error = RecursionError("a user's text")

    def raises(*_: object) -> None:
        raise error

    played = Played(CompletionsWire())
    played.host.noted = raises  # type: ignore[method-assign]
    played.answer.failed(HttpFault("reset"))
    assert isinstance(played.end, WorkerLost)
    played = Played(CompletionsWire())
    played.answer._give_up = raises
    played.answer.begun(200, ())
    played.answer.data(b'data: {"choices": 3}\n\n')
    assert played.is_over
    for status in (400, 500):
        played = Played(CompletionsWire())
        played.answer._reader.refused = raises  # type: ignore[method-assign]
        played.answer.begun(status, JSON)
        played.answer.data(b"{}")
        played.answer.ended()
        assert isinstance(played.end, UpstreamFault)
    assert "unexpected RecursionError" in caplog.text
    assert "a user's text" not in caplog.text


async def test_sink_that_raises_ends_its_own_stream(caplog: pytest.LogCaptureFixture) -> None:
    for error in (RuntimeError("a user's text"), ValueError("a user's text")):
        played = Played(CompletionsWire())

        def raises(*_: object, error: Exception = error) -> None:
            raise error

        played.sink.tokens = raises  # type: ignore[method-assign]
        played.answer.begun(200, ())
        played.answer.data(completion_event([5]) + completion_event([6]))
        assert played.is_aborted
        assert isinstance(played.end, HeadraceError)
        assert not isinstance(played.end, WorkerLost)
        assert played.load.num_requests == 0
    assert "a user's text" not in caplog.text
    assert "unexpected RuntimeError" in caplog.text


async def test_sink_that_aborts_from_inside_gets_nothing_more() -> None:
    played = Played(CompletionsWire())
    got: list[int] = []

    def take(
        ids: list[int],
        finish: str | None,
        stop: int | str | None,
        first: FirstToken | None,
        logprobs: Sequence[TokenLogprobs] | None,
        now_s: float,
    ) -> None:
        got.extend(ids)
        played.answer.abort()

    played.sink.tokens = take  # type: ignore[method-assign]
    played.answer.begun(200, ())
    played.answer.data(completion_event([5]) + completion_event([6], "stop") + DONE)
    assert got == [5]
    assert played.is_aborted
    assert not played.sink.ended.done()
