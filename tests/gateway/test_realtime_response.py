"""A response's life, with a flow whose every step waits for the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from gateway.flow import Flow
from gateway.realtime_response import Response
from gateway.realtime_writer import RealtimeWriter
from gateway.record import RequestRecord
from gateway.websocket_outlet import WebSocketOutlet
from pipeline.errors import ContentBlocked, HeadraceError, NoWorker
from pipeline.realtime_errors import ResponseCancelled
from pipeline.values import ChatRequest


class FakeOutlet:
    peak = 7
    closed = False


@dataclass
class FakeAnswer:
    """An answer of which the writer hears only how it ends."""

    flow: FakeFlow
    is_ended: bool = False

    def fail(self, error: HeadraceError) -> None:
        if not self.is_ended:
            self.is_ended = True
            self.flow.aborts += 1
            self.flow.writer.fail(error)

    def client_gone(self, reason: str) -> None:
        if not self.is_ended:
            self.is_ended = True
            self.flow.aborts += 1


@dataclass
class FakeWriter:
    """Tells the response of its end, as a real one does."""

    response: Response
    ends: list[str] = field(default_factory=list)

    def fail(self, error: HeadraceError) -> None:
        self.ends.append(getattr(error, "code", None) or type(error).__name__)
        self.response.over()

    def end(self) -> None:
        self.ends.append("complete")
        self.response.over()


class FakeFlow:
    """`gateway.flow.Flow`, which goes on when `prompt_ready` is set."""

    def __init__(self) -> None:
        self.prompt_ready = asyncio.Event()
        self.is_answering = asyncio.Event()
        self.in_progress: set[Any] = set()
        self.refusal: HeadraceError | None = None  # of the prompt
        self.start_error: Exception | None = None
        self.answer: FakeAnswer | None = None
        self.aborts = 0
        self.is_working = self.has_worked = False
        self.num_pauses = 0  # of a loop's turn each, before the work

    async def prepare_request(self, asker: Response, request: ChatRequest) -> tuple[str, str]:
        for _ in range(self.num_pauses):
            await asyncio.sleep(0)
        await asker.unless_gone(self._work())
        if self.refusal is not None:
            raise self.refusal
        return "prompt", "ready"

    async def _work(self) -> None:
        self.is_working = self.has_worked = True
        try:
            await self.prompt_ready.wait()
        finally:
            self.is_working = False

    def start(self, client: Response, writer: Any, prompt: str, ready: str) -> FakeAnswer:
        if self.start_error is not None:
            raise self.start_error
        self.writer = writer
        self.answer = FakeAnswer(self)
        self.is_answering.set()
        return self.answer

    async def finish(self, client: Response, answer: FakeAnswer, prompt: str) -> None:
        await client.finished()


@dataclass
class Running:
    response: Response
    flow: FakeFlow
    writer: FakeWriter
    task: asyncio.Task[None]
    overs: list[bool]

    async def until_answering(self) -> None:
        self.flow.prompt_ready.set()
        await asyncio.wait_for(self.flow.is_answering.wait(), 5)

    async def ended(self) -> None:
        await asyncio.wait_for(self.task, 5)
        assert self.response.is_over
        assert self.overs == [True]
        assert not self.flow.in_progress
        assert not self.flow.is_working
        assert self.response.record.buffered_peak == FakeOutlet.peak


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    flow = FakeFlow()
    response = Response(
        RequestRecord("resp_1", "/v1/realtime", 0.0), cast(WebSocketOutlet, FakeOutlet()), lambda: None
    )
    writer = FakeWriter(response)
    overs: list[bool] = []
    response.on_over = lambda: overs.append(True)
    response.writer = cast(RealtimeWriter, writer)
    task = asyncio.create_task(response.run(cast(Flow, flow), cast(ChatRequest, None)))
    await asyncio.sleep(0)
    yield Running(response, flow, writer, task, overs)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_response_that_completes(running: Running) -> None:
    await running.until_answering()
    assert running.flow.in_progress == {running.response}
    running.writer.end()
    await running.ended()
    assert running.writer.ends == ["complete"]
    assert running.response.record.status == 200


@pytest.mark.parametrize("num_steps", range(4))
async def test_a_cancel_before_the_prompt_is_ready(running: Running, num_steps: int) -> None:
    """Also in the moment between the prompt and the engine: it is never asked."""
    if num_steps:
        running.flow.prompt_ready.set()
        for _ in range(num_steps - 1):
            await asyncio.sleep(0)
    running.response.cancel(ResponseCancelled())
    assert running.writer.ends == ["cancelled"]  # at once
    await running.ended()
    assert running.writer.ends == ["cancelled"]
    assert running.flow.answer is None or running.flow.aborts == 1
    assert running.response.record.ended == "cancelled" or running.flow.answer is not None


async def test_a_cancel_before_its_first_step() -> None:
    flow = FakeFlow()
    record = RequestRecord("resp_1", "/v1/realtime", 0.0)
    response = Response(record, cast(WebSocketOutlet, FakeOutlet()), lambda: None)
    writer = FakeWriter(response)
    response.writer = cast(RealtimeWriter, writer)
    task = asyncio.create_task(response.run(cast(Flow, flow), cast(ChatRequest, None)))
    response.cancel(ResponseCancelled())
    assert writer.ends == ["cancelled"]
    await task
    assert writer.ends == ["cancelled"]
    assert not flow.has_worked


@pytest.mark.parametrize("ending", ["cancel", "lost", "refuse"])
async def test_an_end_while_its_prompt_pauses_begins_no_more_work(ending: str) -> None:
    flow = FakeFlow()
    flow.num_pauses = 2
    record = RequestRecord("resp_1", "/v1/realtime", 0.0)
    response = Response(record, cast(WebSocketOutlet, FakeOutlet()), lambda: None)
    response.writer = cast(RealtimeWriter, FakeWriter(response))
    task = asyncio.create_task(response.run(cast(Flow, flow), cast(ChatRequest, None)))
    await asyncio.sleep(0)
    getattr(response, ending)("closed" if ending == "lost" else ResponseCancelled())
    await asyncio.wait_for(task, 5)
    assert response.is_over
    assert not flow.has_worked


async def test_a_cancel_of_an_answer(running: Running) -> None:
    await running.until_answering()
    running.response.cancel(ResponseCancelled())
    assert running.writer.ends == ["cancelled"]
    await running.ended()
    assert running.flow.aborts == 1


async def test_a_second_cancel_does_nothing(running: Running) -> None:
    running.response.cancel(ResponseCancelled())
    running.response.cancel(ResponseCancelled())
    await running.ended()
    assert running.writer.ends == ["cancelled"]


async def test_a_lost_connection_before_the_prompt_is_ready(running: Running) -> None:
    running.response.lost("closed the connection")
    await running.ended()
    assert running.writer.ends == []  # nobody is there to hear of it
    assert (running.response.record.ended, running.response.record.status) == ("client_closed", 499)


async def test_a_lost_connection_of_an_answer(running: Running) -> None:
    await running.until_answering()
    running.response.lost("closed the connection")
    await running.ended()
    assert running.writer.ends == []
    assert running.flow.aborts == 1


async def test_a_prompt_that_is_refused(running: Running) -> None:
    running.flow.refusal = ContentBlocked("rule-1")
    running.flow.prompt_ready.set()
    await running.ended()
    assert running.writer.ends == ["content_filter"]
    assert (running.response.record.ended, running.response.record.status) == ("content_filter", 400)


async def test_an_engine_that_takes_nothing(running: Running) -> None:
    running.flow.start_error = NoWorker("no worker")
    running.flow.prompt_ready.set()
    await running.ended()
    assert running.writer.ends == ["no_worker"]
    assert running.response.record.status == 503


async def test_a_fault_of_ours_is_logged_and_told(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    running.flow.start_error = ZeroDivisionError("secret text")
    running.flow.prompt_ready.set()
    await running.ended()
    assert running.writer.ends == ["ZeroDivisionError"]
    assert running.response.record.ended == "internal_error"
    assert "resp_1" in caplog.text


async def test_a_server_that_stops_refuses_what_is_prepared(running: Running) -> None:
    running.response.refuse(NoWorker("stopping"))
    await running.ended()
    assert running.writer.ends == ["no_worker"]
