"""SIGTERM: no new requests, running ones finish or are cut at the limit with an error frame, exit code 0."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import stack
from tests.e2e.asking import CHAT, COMPLETE, FAILED, REFUSED, Outcome, ask, chat, converse, streamed
from tests.e2e.resting import are_ready, assert_no_fault, children, exists, num_jobs, ready, request_lines
from tests.processes import Process, answers
from tests.stack import Gateway, Worker
from tests.wire import Frame, connect

ENDLESS = 20_000


@pytest.fixture(scope="module")
def worker(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Steps of 20 ms. A worker outlives the gateways of this module."""
    with stack.start_scripted(
        tmp_path_factory.mktemp("worker"), embedded_model, "--step-ms", "20", "--prefill-ms-per-1k", "0"
    ) as worker:
        yield worker


class Streams:
    """Some streams and an answer in one piece, running."""

    def __init__(self, port: int, count: int, num_tokens: int) -> None:
        self._num_begun = 0
        self._count = count
        bodies = [chat(f"Stream {number}", num_tokens) for number in range(count)]
        bodies.append(chat("Whole", num_tokens, stream=False))
        self._tasks = [asyncio.create_task(self._ask(port, body)) for body in bodies]

    async def begin_with(self, worker: Worker, num_others: int) -> None:
        """Every stream has begun, and the engine has all of them, and so many others."""
        while self._num_begun < self._count:
            assert not any(task.done() for task in self._tasks), self._tasks
            await asyncio.sleep(0.005)
        await until(worker, lambda: num_jobs(worker) == self._count + 1 + num_others)

    async def outcomes(self) -> list[Outcome]:
        return await asyncio.wait_for(asyncio.gather(*self._tasks), 60)

    async def _ask(self, port: int, body: dict[str, Any]) -> Outcome:
        begun = False

        def note(frame: Frame) -> None:
            nonlocal begun
            self._num_begun += not begun
            begun = True

        return await ask(port, body, on_frame=note)


async def until(of: Worker | Gateway, is_true: Callable[[], bool]) -> None:
    await asyncio.to_thread(of.process.wait_until, is_true, 40, "as expected")


async def terminate(gateway: Gateway, num_processes: int = 1) -> None:
    """SIGTERM; returns when every process drains."""
    gateway.process.signal(signal.SIGTERM)
    await until(gateway, lambda: gateway.log.read_text().count("draining:") == num_processes)


async def exit_code(process: Process) -> int:
    """Of a process that is about to end."""
    async with asyncio.timeout(60):
        while (code := process.returncode) is None:  # noqa: ASYNC110 - a process has no event to wait for
            await asyncio.sleep(0.01)
    return code


@pytest.mark.parametrize("processes", [1, 2])
async def test_drain_lets_running_answers_finish_and_takes_no_new_ones(
    worker: Worker, gateway: Callable[..., Gateway], processes: int
) -> None:
    served = gateway([worker], "--processes", str(processes))
    await until(served, lambda: are_ready(served))
    pids = [served.pid, *children(served.pid)]
    assert len(pids) == (1 if processes == 1 else 3)
    async with connect(served.port) as kept, connect(served.port) as running:
        assert (await converse(kept, chat(max_tokens=2))).kind == COMPLETE
        streams = Streams(served.port, 12, num_tokens=120)
        assert (await running.post(CHAT, chat("On a kept connection", 120))).status == 200
        await streams.begin_with(worker, 1)
        await terminate(served, processes)

        status, body = ready(served)
        assert (status, body["ready"], body["draining"]) == (503, False, True)
        assert answers(served.port, "/health") == 200
        for stream in (True, False):
            new = await ask(served.port, chat(stream=stream))
            assert (new.kind, new.status, new.code) == (REFUSED, 503, "draining")
        again = await converse(kept, chat())  # uvicorn keeps the connection: it is told too
        assert (again.kind, again.status, again.code) == (REFUSED, 503, "draining")

        outcomes = await streams.outcomes()
        assert {outcome.kind for outcome in outcomes} == {COMPLETE}
        assert streamed(await running.frames()).kind == COMPLETE
    assert await exit_code(served.process) == 0
    assert not [pid for pid in pids if exists(pid)]
    assert_no_fault(served)
    assert num_jobs(worker) == 0


async def test_drain_limit_cuts_with_an_error_and_exits_0(
    worker: Worker, gateway: Callable[..., Gateway]
) -> None:
    served = gateway([worker], "--processes", "2", "--drain-limit-s", "0.3")
    await until(served, lambda: are_ready(served))
    streams = Streams(served.port, 12, ENDLESS)
    await streams.begin_with(worker, 0)
    served.process.signal(signal.SIGTERM)
    *cut, whole = await streams.outcomes()
    assert {(outcome.kind, outcome.code) for outcome in cut} == {(FAILED, "draining")}
    assert (whole.kind, whole.status, whole.code) == (REFUSED, 503, "draining")
    assert await exit_code(served.process) == 0
    assert {line["ended"] for line in request_lines(served)} == {"draining"}
    assert_no_fault(served)
    await until(worker, lambda: num_jobs(worker) == 0)


async def test_drained_worker_finishes_what_it_has_and_the_gateway_takes_nothing_new(
    scripted_worker: Callable[..., Worker], gateway: Callable[..., Gateway]
) -> None:
    worker = scripted_worker("--step-ms", "20", "--prefill-ms-per-1k", "0")
    served = gateway([worker])
    streams = Streams(served.port, 5, num_tokens=120)
    await streams.begin_with(worker, 0)
    worker.process.signal(signal.SIGTERM)
    await until(served, lambda: ready(served)[0] == 503)
    new = await ask(served.port, chat())
    assert (new.kind, new.status, new.code) == (REFUSED, 503, "no_worker")
    assert {outcome.kind for outcome in await streams.outcomes()} == {COMPLETE}
    assert await exit_code(worker.process) == 0
    assert_no_fault(served)
