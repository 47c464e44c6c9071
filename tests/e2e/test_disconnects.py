"""A client that goes away, at any moment and in any way: the engine stops, and nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests import stack
from tests.e2e.asking import CHAT, COMPLETE, Outcome, ask, chat, converse
from tests.e2e.resting import (
    assert_no_fault,
    at_rest,
    kept_bytes,
    logged,
    num_jobs,
    request_lines,
    resident_bytes,
    wait_for,
    wait_until_held,
)
from tests.stack import Gateway, Worker
from tests.wire import Wire, connect

MAX_RUNNING = 8
# The filter has to wait for the end of this word, token after token, before it knows.
LONG_WORD = "supercalifragilisticexpialidocious" * 6
HELD_TEXT = LONG_WORD[:-1]
# 3,000 tokens: 3 s of prefill, for each other beginning, since the worker has a prefix cache.
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 300
ENDLESS = 20_000  # tokens; more than any test waits for
JSON_TYPE = "content-type: application/json"


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway and its one worker."""

    gateway: Gateway
    worker: Worker

    @property
    def port(self) -> int:
        return self.gateway.port

    def wait_for_jobs(self, count: int, waiting: bool = False) -> None:
        wait_for(self.gateway, lambda: num_jobs(self.worker, waiting) == count, f"at {count} jobs")


@pytest.fixture(scope="module")
def served(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Steps of 5 ms, 1 ms of prefill per token, and one word that is masked."""
    folder = tmp_path_factory.mktemp("disconnects")
    rules, script = folder / "words.txt", folder / "script.json"
    rules.write_text(LONG_WORD + "\n")
    script.write_text(json.dumps({"hold it": HELD_TEXT}))
    options = ("--max-running", str(MAX_RUNNING), "--prefill-ms-per-1k", "1000", "--script", str(script))
    with (
        stack.start_scripted(folder, embedded_model, "--step-ms", "5", *options) as worker,
        stack.start_gateway(folder, [worker], "--rules", str(rules)) as gateway,
    ):
        yield Served(gateway, worker)


async def send_chat(wire: Wire, body: object, request_id: str = "-") -> None:
    """A whole chat request; nothing of the answer is read."""
    content = json.dumps(body).encode()
    lines = ("host: localhost", f"x-request-id: {request_id}", f"content-length: {len(content)}", "", "")
    await wire.send("\r\n".join((f"POST {CHAT} HTTP/1.1", JSON_TYPE, *lines)).encode() + content)


async def leave(wire: Wire, rng: random.Random | None = None) -> None:
    """Close politely, or vanish."""
    if rng is not None and rng.random() < 0.5:
        wire.reset()
    else:
        await wire.close()


# -- one phase after the other -------------------------------------------------------------------------------


@asynccontextmanager
async def full_engine(served: Served) -> AsyncIterator[None]:
    """The engine runs as many endless streams as it can: whoever comes now is queued."""
    async with AsyncExitStack() as clients:
        for number in range(MAX_RUNNING):
            wire = await clients.enter_async_context(connect(served.port))
            assert (await wire.post(CHAT, chat(f"Block {number}", ENDLESS))).status == 200
        served.wait_for_jobs(MAX_RUNNING)
        yield


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("vanish", [True, False])
async def test_disconnect_while_queued_leaves_the_queue(served: Served, stream: bool, vanish: bool) -> None:
    async with full_engine(served):
        async with connect(served.port) as wire:
            await send_chat(wire, chat(stream=stream))
            served.wait_for_jobs(1, waiting=True)
            if vanish:
                wire.reset()
        served.wait_for_jobs(0, waiting=True)
        assert num_jobs(served.worker) == MAX_RUNNING
    served.wait_for_jobs(0)


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_in_prefill_aborts_it(served: Served, stream: bool) -> None:
    async with connect(served.port) as wire:
        body = chat(f"{stream} {LONG_PROMPT}", ENDLESS, stream=stream)
        await send_chat(wire, body, f"prefill-{stream}")
        served.wait_for_jobs(1, waiting=True)
    served.wait_for_jobs(0)
    assert logged(served.gateway, f"prefill-{stream}")["output_tokens"] == 0


async def test_prefill_of_an_aborted_request_delays_nobody(served: Served) -> None:
    """Four times 3 s of prefill are thrown away; what comes next must not wait for them."""
    async with AsyncExitStack() as clients:
        for number in range(4):
            wire = await clients.enter_async_context(connect(served.port))
            await send_chat(wire, chat(f"{number} {LONG_PROMPT}", ENDLESS))
        served.wait_for_jobs(4, waiting=True)
    served.wait_for_jobs(0)
    async with connect(served.port) as wire:
        await wire.post(CHAT, chat(stream_options={"include_timings": True}))
        frames = await wire.frames()
    assert frames[-2].data["timings"]["prefill_ms"] < 3000  # the engine's clock: its own 3 s are not in it


@pytest.mark.parametrize("vanish", [True, False])
async def test_disconnect_in_decode_aborts_it(served: Served, vanish: bool) -> None:
    async with connect(served.port) as wire:
        assert (await wire.post(CHAT, chat(max_tokens=ENDLESS))).status == 200
        for _ in range(3):
            assert await wire.frame()
        if vanish:
            wire.reset()
    served.wait_for_jobs(0)


async def test_disconnect_of_a_request_without_a_stream_aborts_it(served: Served) -> None:
    async with connect(served.port) as wire:
        await send_chat(wire, chat(max_tokens=ENDLESS, stream=False))
        served.wait_for_jobs(1)
        served.wait_for_jobs(0, waiting=True)  # it decodes
    served.wait_for_jobs(0)


async def test_disconnect_while_a_filter_holds_text_drops_it_and_says_so(served: Served) -> None:
    async with connect(served.port) as wire:
        head = await wire.post(CHAT, chat("Please hold it.", ENDLESS), {"x-request-id": "held"})
        assert head.status == 200
        frame = await wire.frame()
        assert frame is not None
        assert frame.data["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        wait_for(served.gateway, lambda: served.gateway.metric("headrace_open_requests") == 1, "open")
    served.wait_for_jobs(0)
    line = logged(served.gateway, "held")
    assert line["undecided_characters"] > 0
    assert line["ended"] == "client_closed"


async def test_disconnect_before_the_body_is_complete_reaches_no_engine(served: Served) -> None:
    async with connect(served.port) as wire:
        head = (
            f"POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\n"
            f"host: a\r\nx-request-id: half\r\ncontent-length: 100\r\n\r\n{{"
        )
        await wire.send(head.encode())
    line = logged(served.gateway, "half")
    assert (line["status"], line["ended"], line["worker"]) == (499, "client_closed", "")


# -- all of them at once, at random ------------------------------------------------------------------------


async def half_a_body(wire: Wire, rng: random.Random) -> None:
    content = json.dumps(chat()).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\n"
        f"host: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    ).encode()
    await wire.send((head + content)[: rng.randrange(1, len(head) + len(content))])


async def at_once(wire: Wire, rng: random.Random) -> None:
    """Still queued, most likely, or in prefill."""
    await send_chat(wire, chat(f"at once {rng.random()}", ENDLESS, stream=rng.random() < 0.5))


async def in_prefill(wire: Wire, rng: random.Random) -> None:
    words = " ".join(f"{rng.random()}" for _ in range(20))
    await send_chat(wire, chat(words, ENDLESS, stream=rng.random() < 0.5))
    await asyncio.sleep(rng.random() * 0.1)


async def in_decode(wire: Wire, rng: random.Random) -> None:
    await wire.post(CHAT, chat(f"decode {rng.random()}", ENDLESS, n=rng.choice([1, 1, 3])))
    for _ in range(rng.randrange(10)):
        await wire.frame()


async def while_held(wire: Wire, rng: random.Random) -> None:
    await wire.post(CHAT, chat(f"hold it {rng.random()}", ENDLESS))
    await wire.frame()
    await asyncio.sleep(rng.random() * 0.1)


async def right_at_the_end(wire: Wire, rng: random.Random) -> None:
    """Before, with, or after the last frame."""
    num_tokens = rng.randrange(1, 6)
    await wire.post(CHAT, chat(f"end {rng.random()}", num_tokens))
    for _ in range(num_tokens + rng.randrange(4)):
        await wire.frame()


async def after_whole_answers(wire: Wire, rng: random.Random) -> None:
    """The connection has served others well before."""
    for _ in range(rng.randrange(1, 4)):
        assert (
            await converse(wire, chat(f"kept {rng.random()}", 3, stream=rng.random() < 0.5))
        ).kind == COMPLETE
    await rng.choice([at_once, in_decode, half_a_body])(wire, rng)


PHASES: Final[Sequence[Callable[[Wire, random.Random], Awaitable[None]]]] = [
    half_a_body,
    at_once,
    in_prefill,
    in_decode,
    while_held,
    right_at_the_end,
    after_whole_answers,
]


async def visit(served: Served, rng: random.Random, at_most: asyncio.Semaphore) -> None:
    """One client that leaves at some moment."""
    async with at_most, connect(served.port) as wire:
        await rng.choice(PHASES)(wire, rng)
        await leave(wire, rng)


async def storm(served: Served, count: int, seed: int) -> None:
    at_most = asyncio.Semaphore(4 * MAX_RUNNING)  # most of them are queued
    await asyncio.gather(*(visit(served, random.Random(seed + each), at_most) for each in range(count)))


async def ask_once(served: Served) -> Outcome:
    return await ask(served.port, chat("Still well?", 30))


async def test_random_disconnects_leave_nothing_behind(served: Served) -> None:
    expected = await ask_once(served)
    assert expected.kind == COMPLETE
    before = at_rest(served.gateway, [served.worker])
    await storm(served, 100, seed=1)
    wait_until_held(served.gateway, [served.worker], before)
    assert await ask_once(served) == expected
    assert_no_fault(served.gateway)
    assert {line["ended"] for line in request_lines(served.gateway)} == {"complete", "client_closed"}


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_thousand_random_disconnects_leave_nothing_behind_and_memory_flat(served: Served) -> None:
    expected = await ask_once(served)
    before = at_rest(served.gateway, [served.worker])
    await storm(served, 500, seed=10_000)  # after these every cache and pool has its size
    wait_until_held(served.gateway, [served.worker], before)
    pids = (served.gateway.pid, served.worker.process.pid)
    memory, kept = [resident_bytes(pid) for pid in pids], kept_bytes(served.gateway)
    await storm(served, 1000, seed=20_000)
    wait_until_held(served.gateway, [served.worker], before)
    grown = [resident_bytes(pid) - was for pid, was in zip(pids, memory, strict=True)]
    grown[0] -= kept_bytes(served.gateway) - kept
    assert max(grown) < 8 << 20, grown  # 8 KiB each would be a leak of one request's objects
    assert await ask_once(served) == expected
    assert_no_fault(served.gateway)
