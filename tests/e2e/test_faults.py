"""What fails under load: workers killed, stopped or broken, a gateway process killed, limits passed.

Every stream ends in a way that its client can tell (`tests/e2e/asking.py` refuses any other end), and
afterwards all works again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import stack
from tests.e2e.asking import CHAT, COMPLETE, CUT, FAILED, REFUSED, Outcome, ask, chat
from tests.e2e.resting import (
    are_ready,
    assert_no_fault,
    at_rest,
    children,
    enter_all,
    num_jobs,
    ready,
    statuses,
    wait_for,
    wait_until_held,
)
from tests.stack import Gateway, Worker
from tests.wire import Frame, connect

NUM_STREAMS = 200
NUM_PROMPTS = 10  # the scripted answers depend on the prompt alone, on any worker
MAX_RUNNING = 20  # of a worker: most of its streams are queued
NUM_TOKENS = 20
STALL_S = 2  # a worker's heartbeat comes every second
ENDLESS = 20_000


class Crowd:
    """Many requests at the same time, every fourth without a stream, and how they end."""

    def __init__(self, port: int) -> None:
        self.num_begun = 0  # streams that have shown text or a role
        self._port = port
        self._tasks: list[asyncio.Task[Outcome]] = []

    async def begin(self, count: int, num_begun: int) -> None:
        """Ask; returns when so many streams have begun to answer."""
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(count)]
        while self.num_begun < num_begun:
            assert not all(task.done() for task in self._tasks), self._tasks[0]
            await asyncio.sleep(0.005)

    async def outcomes(self) -> list[Outcome]:
        return await asyncio.wait_for(asyncio.gather(*self._tasks), 60)

    async def _ask(self, number: int) -> Outcome:
        begun = False

        def note(frame: Frame) -> None:
            nonlocal begun
            self.num_begun += not begun
            begun = True

        return await ask(self._port, self.body(number), on_frame=note)

    def body(self, number: int) -> dict[str, Any]:
        return chat(f"Story {number % NUM_PROMPTS}", NUM_TOKENS, stream=number % 4 != 0)


async def answers(port: int) -> list[str]:
    """The right answer to each of a crowd's prompts."""
    bodies = [chat(f"Story {number}", NUM_TOKENS) for number in range(NUM_PROMPTS)]
    outcomes = await asyncio.gather(*(ask(port, body) for body in bodies))
    assert {outcome.kind for outcome in outcomes} == {COMPLETE}
    return [outcome.text for outcome in outcomes]


def check_texts(outcomes: Sequence[Outcome], expected: Sequence[str]) -> Counter[str]:
    """Whole answers are right, broken ones are right as far as they go. Returns how often each end came."""
    for number, outcome in enumerate(outcomes):
        text = expected[number % NUM_PROMPTS]
        assert outcome.text == text if outcome.kind == COMPLETE else text.startswith(outcome.text)
    return Counter(outcome.kind for outcome in outcomes)


async def is_answered(port: int) -> None:
    outcome = await ask(port, chat("All well?", 5))
    assert outcome.kind == COMPLETE
    assert outcome.text


async def until(gateway: Gateway, is_true: Callable[[], bool], what: str) -> None:
    """Wait without holding up the clients of this test."""
    await asyncio.to_thread(wait_for, gateway, is_true, what)


# -- workers killed and stopped ----------------------------------------------------------------------------


NAMES = ("one", "other")


class Pair:
    """A gateway and two workers of one model, which tests may end."""

    def __init__(self, folder: Path, model: Path, running: ExitStack) -> None:
        self._folder = folder
        self._model = model
        self._running = running
        self.workers = dict(zip(NAMES, self._start(NAMES), strict=True))
        self.gateway = running.enter_context(
            stack.start_gateway(folder, list(self.workers.values()), "--stall-limit-s", str(STALL_S))
        )

    def _start(self, names: Sequence[str]) -> list[Worker]:
        options = ("--step-ms", "10", "--max-running", str(MAX_RUNNING), "--prefill-ms-per-1k", "0")
        return enter_all(
            self._running,
            [stack.start_scripted(self._folder, self._model, *options, name=name) for name in names],
        )

    def revive(self) -> list[Worker]:
        """Start the dead ones again on their addresses; both are ready then."""
        dead = [name for name in NAMES if self.workers[name].process.returncode is not None]
        self.workers |= zip(dead, self._start(dead), strict=True)
        wait_for(self.gateway, lambda: self.states() == ["ready", "ready"], "with two ready workers")
        return list(self.workers.values())

    def states(self) -> list[str]:
        return [status["state"] for status in statuses(self.gateway)]

    def name_of(self, worker: Worker) -> str:
        """What the worker calls itself."""
        found = {status["address"]: status["name"] for status in statuses(self.gateway)}
        return str(found[worker.address])


@pytest.fixture(scope="module")
def pair(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as running:
        yield Pair(tmp_path_factory.mktemp("pair"), embedded_model, running)


async def test_kill_of_a_worker_fails_what_had_begun_and_moves_the_rest(pair: Pair) -> None:
    workers = pair.revive()
    port = pair.gateway.port
    expected = await answers(port)
    crowd = Crowd(port)
    await crowd.begin(NUM_STREAMS, num_begun=MAX_RUNNING)
    busiest = max(workers, key=num_jobs)
    name = pair.name_of(busiest)
    busiest.process.kill()
    assert ready(pair.gateway)[0] == 200
    await asyncio.to_thread(pair.revive)  # while the other one does the rest
    outcomes = await crowd.outcomes()
    ends = check_texts(outcomes, expected)
    assert ends[COMPLETE] + ends[FAILED] == NUM_STREAMS, ends
    failed = [outcome for outcome in outcomes if outcome.kind == FAILED]
    assert 0 < len(failed) <= MAX_RUNNING
    for outcome in failed:
        assert outcome.num_deltas > 0, "nothing was delivered: it should have moved to the other worker"
        assert outcome.code == "worker_lost"
        assert name in str(outcome.error)
    assert pair.gateway.metric("headrace_resubmitted_total") > 0
    await is_answered(port)
    at_rest(pair.gateway, pair.revive())
    assert_no_fault(pair.gateway)


async def test_kill_of_every_worker_ends_all_and_their_return_heals_all(pair: Pair) -> None:
    workers = pair.revive()
    gateway, port = pair.gateway, pair.gateway.port
    before = at_rest(gateway, workers)
    expected = await answers(port)
    crowd = Crowd(port)
    await crowd.begin(NUM_STREAMS, num_begun=MAX_RUNNING)
    for worker in workers:
        worker.process.kill()
    outcomes = await crowd.outcomes()
    ends = check_texts(outcomes, expected)
    assert not ends[CUT]
    assert ends[FAILED] > 0
    assert ends[REFUSED] > 0
    assert {outcome.code for outcome in outcomes if outcome.kind == FAILED} == {"worker_lost"}
    refused = {(outcome.status, outcome.code) for outcome in outcomes if outcome.kind == REFUSED}
    assert refused <= {(502, "worker_lost"), (503, "no_worker")}
    assert ready(gateway)[0] == 503
    assert (await ask(port, chat())).code == "no_worker"

    pair.revive()
    assert ready(gateway)[0] == 200
    assert await answers(port) == expected
    wait_until_held(gateway, list(pair.workers.values()), before)
    assert_no_fault(gateway)


async def test_stopped_worker_is_named_and_passed_over_until_it_goes_on(pair: Pair) -> None:
    workers = pair.revive()
    gateway, port = pair.gateway, pair.gateway.port
    before, expected = at_rest(gateway, workers), await answers(port)
    crowd = Crowd(port)
    await crowd.begin(NUM_STREAMS, num_begun=MAX_RUNNING)
    busiest = max(workers, key=num_jobs)
    name = pair.name_of(busiest)
    busiest.process.signal(signal.SIGSTOP)
    outcomes = await crowd.outcomes()
    ends = check_texts(outcomes, expected)
    assert ends[COMPLETE] > 0
    stalled = [outcome for outcome in outcomes if outcome.kind != COMPLETE]
    assert stalled
    for outcome in stalled:
        assert outcome.code == "worker_stalled"
        assert outcome.status in (200, 504)
        assert name in str(outcome.error)

    await until(gateway, lambda: pair.states() != ["ready", "ready"], "without the stopped worker")
    assert await answers(port) == expected  # the other one serves them
    busiest.process.signal(signal.SIGCONT)
    pair.revive()
    assert await answers(port) == expected
    wait_until_held(gateway, list(pair.workers.values()), before)
    assert_no_fault(gateway)


# -- a gateway process killed ------------------------------------------------------------------------------


async def test_kill_of_one_of_two_gateway_processes_ends_only_its_own_streams(
    scripted_worker: Callable[..., Worker], gateway: Callable[..., Gateway]
) -> None:
    worker = scripted_worker("--step-ms", "50")
    both = gateway([worker], "--processes", "2")
    wait_for(both, lambda: are_ready(both), "ready in both processes")
    expected = await answers(both.port)
    crowd = Crowd(both.port)
    await crowd.begin(NUM_STREAMS, num_begun=NUM_STREAMS // 2)
    first, second = children(both.pid)
    os.kill(first, signal.SIGKILL)
    ends = check_texts(await crowd.outcomes(), expected)
    assert ends[CUT] > 0, ends
    assert ends[COMPLETE] > 0, ends
    assert ends[CUT] + ends[COMPLETE] == NUM_STREAMS, ends

    wait_for(both, lambda: len(children(both.pid)) == 2, "two processes again")
    assert first not in children(both.pid)
    assert second in children(both.pid)
    wait_for(both, lambda: worker.metric("headrace_link_connections") == 2, "linked twice again")
    wait_for(both, lambda: are_ready(both), "ready in both processes again")
    wait_for(both, lambda: num_jobs(worker) == 0, "free of the dead process's jobs")
    wait_for(both, lambda: both.metric("headrace_open_requests") == 0, "free of open requests")
    num_before = both.metric("headrace_requests_total")
    assert {
        outcome.kind for outcome in await asyncio.gather(*(ask(both.port, chat()) for _ in range(20)))
    } == {COMPLETE}
    wait_for(both, lambda: both.metric("headrace_requests_total") == num_before + 20, "counting all requests")
    assert_no_fault(both)


# -- broken workers, and limits ----------------------------------------------------------------------------

FAULTS: Mapping[str, tuple[str, str]] = {
    # model: (its worker's fault, the code of the error that ends its streams)
    "dying": ("--die-after-tokens", "worker_lost"),
    "garbling": ("--garbage-after-tokens", "worker_lost"),
    "stalling": ("--stall-after-tokens", "worker_stalled"),
}
STRICT = ("--stall-limit-s", str(STALL_S), "--queue-limit-s", "1", "--request-limit-s", "3")


@pytest.fixture(scope="module")
def strict(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with short limits, a good worker that runs two requests, and one with each fault."""
    folder = tmp_path_factory.mktemp("strict")

    def worker(name: str, *options: str) -> AbstractContextManager[Worker]:
        options = ("--step-ms", "10", "--served-model-name", name, *options)
        return stack.start_scripted(folder, embedded_model, *options, name=name)

    with ExitStack() as running:
        faulty = [worker(model, fault, "30") for model, (fault, _) in FAULTS.items()]
        workers = enter_all(running, [worker("scripted", "--max-running", "2"), *faulty])
        gateway = running.enter_context(stack.start_gateway(folder, workers, *STRICT))
        wait_for(gateway, lambda: {each["state"] for each in statuses(gateway)} == {"ready"}, "all ready")
        yield gateway
        for broken in workers[1:]:
            broken.process.kill()  # it owes nobody a clean end


@pytest.mark.parametrize("model", FAULTS)
async def test_broken_worker_ends_its_streams_with_an_error_and_no_others(
    strict: Gateway, model: str
) -> None:
    steady = asyncio.create_task(ask(strict.port, chat(max_tokens=100)))
    outcomes = await asyncio.gather(
        *(ask(strict.port, chat(f"{number}", ENDLESS, model=model)) for number in range(10))
    )
    assert {outcome.kind for outcome in outcomes} <= {FAILED, REFUSED}
    code = FAULTS[model][1]
    assert {outcome.code for outcome in outcomes if outcome.kind == FAILED} == {code}
    refused_codes = {outcome.code for outcome in outcomes if outcome.kind == REFUSED}
    assert refused_codes <= {code, "no_worker"}  # a request may come when it has gone
    assert any(outcome.num_deltas for outcome in outcomes)
    assert (await steady).kind == COMPLETE
    refused = await ask(strict.port, chat(model=model))
    assert refused.kind == REFUSED
    assert refused.code in ("no_worker", "worker_stalled")  # until it has been given up
    assert ready(strict)[0] == 200  # the good model is there
    assert_no_fault(strict)


async def test_request_limit_ends_an_endless_answer_with_a_named_error(strict: Gateway) -> None:
    """Nothing but its tokens is in the stream until then: a heartbeat among them would break a client."""
    frames: list[Frame] = []
    headers = {"x-stainless-read-timeout": "2"}  # wants a heartbeat every second of silence
    streamed, whole = await asyncio.gather(
        ask(strict.port, chat("a", ENDLESS), headers, frames.append),
        ask(strict.port, chat("b", ENDLESS, stream=False)),
    )
    assert (streamed.kind, streamed.code) == (FAILED, "deadline_exceeded")
    assert "3 s" in str(streamed.error)
    assert streamed.num_deltas > 100
    assert (whole.kind, whole.status, whole.code) == (REFUSED, 504, "deadline_exceeded")
    for before, frame, after in zip(frames, frames[1:], frames[2:], strict=False):
        assert not frame.is_comment or after.at_s - before.at_s > 0.5, "a heartbeat among flowing tokens"


async def test_queue_limit_ends_what_waits_too_long_after_heartbeats(strict: Gateway) -> None:
    frames: list[Frame] = []
    async with connect(strict.port) as one, connect(strict.port) as other:
        for number, wire in enumerate((one, other)):
            assert (await wire.post(CHAT, chat(f"block {number}", ENDLESS))).status == 200
        streamed, silent, whole = await asyncio.gather(
            ask(strict.port, chat("queued"), {"x-stainless-read-timeout": "0.5"}, frames.append),
            ask(strict.port, chat("queued")),
            ask(strict.port, chat("queued", stream=False), {"x-stainless-read-timeout": "0.5"}),
        )
    assert (streamed.kind, streamed.code) == (FAILED, "queue_timeout")
    assert [frame.raw for frame in frames[:-1]] == [b": ping\n\n"] * (len(frames) - 1)
    assert len(frames) > 2  # two heartbeats or more
    for outcome in (silent, whole):  # nothing was sent: a status that clients understand
        assert (outcome.kind, outcome.status, outcome.code) == (REFUSED, 504, "queue_timeout")
    await until(strict, lambda: strict.metric("headrace_open_requests") == 0, "free of open requests")


async def test_heartbeats_in_the_queue_end_with_the_first_token(strict: Gateway) -> None:
    frames: list[Frame] = []
    async with connect(strict.port) as one, connect(strict.port) as other:
        for number, wire in enumerate((one, other)):
            assert (await wire.post(CHAT, chat(f"block {number}", 60))).status == 200
        outcome = await ask(strict.port, chat("queued"), {"x-stainless-read-timeout": "0.4"}, frames.append)
    assert outcome.kind == COMPLETE
    assert outcome.num_deltas > 1
    comments = [frame.is_comment for frame in frames]
    assert comments[0], "a heartbeat while it was queued"
    assert comments == sorted(comments, reverse=True), "and none after its first token"
