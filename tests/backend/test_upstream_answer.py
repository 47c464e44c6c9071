"""One choice at an upstream server: every way in which its exchange can end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from backend import upstream_answer
from backend.http_ports import HttpFault
from backend.upstream_completions import CompletionsWire
from backend.upstream_faults import ModelGone
from pipeline.errors import EngineFailed, EngineRejected, HeadraceError, WorkerLost
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


async def test_server_hears_of_a_fault_before_the_sink_does() -> None:
    played = Played(CompletionsWire())
    order: list[str] = []
    played.host.noted = lambda model, error, has_begun: order.append(f"host {has_begun}")  # type: ignore[method-assign]
    played.answer._fail = lambda error: order.append(
        f"sink {type(error).__name__} {played.load.num_requests}"
    )
    played.answer.failed(HttpFault("connection refused"))
    played.answer.failed(HttpFault("again"))
    assert order == ["host False", "sink WorkerLost 0"]


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


async def test_body_of_a_refusal_is_read_to_a_bound() -> None:
    played = Played(CompletionsWire())
    played.answer.begun(500, ())
    for _ in range(100):
        played.answer.data(b"x" * 65536)
    assert played.answer._whole is not None
    assert len(played.answer._whole) == upstream_answer.MAX_BODY_BYTES
    played.answer.ended()
    assert len(str(played.end)) < 700


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
