"""A response that is cancelled, or whose connection is lost, at each of its phases: its events all come, the
engine stops, and nothing of it is left.

The engine is scripted. The real one is in `test_realtime_openai.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests import stack
from tests.e2e.asking import CHAT, chat
from tests.e2e.realtime import DELTA, DONE, Spoken, Talk, is_done, message, spoken, talking
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
from tests.wire import connect

MAX_RUNNING: Final = 8
# The filter has to wait for the end of this word, token after token, before it knows.
LONG_WORD: Final = "supercalifragilisticexpialidocious" * 6
HELD_TEXT: Final = LONG_WORD[:-1]
FOX: Final = "The quick brown fox jumps over the lazy dog. "
LONG_PROMPT: Final = FOX * 300  # 3,000 tokens: 3 s of prefill
LONGER_PROMPT: Final = FOX * 2500  # that takes a while to prepare
ENDLESS: Final[dict[str, Any]] = {"max_output_tokens": 20_000, "ignore_eos": True}
WAYS: Final = ("cancel", "close", "vanish")


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway and its one worker."""

    gateway: Gateway
    worker: Worker

    @property
    def port(self) -> int:
        return self.gateway.port

    async def until_jobs(self, count: int, waiting: bool = False) -> None:
        await self.until(lambda: num_jobs(self.worker, waiting) == count, f"at {count} jobs")

    async def until(self, is_true: Callable[[], bool], what: str) -> None:
        await asyncio.to_thread(wait_for, self.gateway, is_true, what)


@pytest.fixture(scope="module")
def served(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Steps of 5 ms, 1 ms of prefill per token, and one word that is masked."""
    folder = tmp_path_factory.mktemp("realtime_cancel")
    rules, script = folder / "words.txt", folder / "script.json"
    rules.write_text(LONG_WORD + "\n")
    script.write_text(json.dumps({"hold it": HELD_TEXT}))
    options = ("--max-running", str(MAX_RUNNING), "--prefill-ms-per-1k", "1000", "--script", str(script))
    with (
        stack.start_scripted(folder, embedded_model, "--step-ms", "5", *options) as worker,
        stack.start_gateway(folder, [worker], "--rules", str(rules)) as gateway,
    ):
        yield Served(gateway, worker)
        assert_no_fault(gateway)


# -- one phase after the other -------------------------------------------------------------------------------


async def end(served: Served, talk: Talk, response_id: str, way: str) -> dict[str, Any]:
    """Cancel or leave in one of these ways; the log's line. After a cancel the talk goes on."""
    if way == "cancel":
        await talk.send("response.cancel")
        assert_cancelled(await talk.until_done(response_id))
    elif way == "close":
        await talk.connection.close()
    else:
        talk.vanish()
    line = await asyncio.to_thread(logged, served.gateway, response_id)
    assert line["ended"] == ("cancelled" if way == "cancel" else "client_closed")
    assert line["route"] == "/v1/realtime"
    return line


def assert_cancelled(said: Spoken) -> None:
    assert said.status == "cancelled"
    assert said.response["status_details"]["type"] == "cancelled"
    assert all(item["status"] == "incomplete" for item in said.items)


@asynccontextmanager
async def full_engine(served: Served) -> AsyncIterator[None]:
    """The engine runs as many endless streams as it can: whoever comes now is queued."""
    async with AsyncExitStack() as clients:
        for number in range(MAX_RUNNING):
            wire = await clients.enter_async_context(connect(served.port))
            assert (await wire.post(CHAT, chat(f"Block {number}", 20_000))).status == 200
        await served.until_jobs(MAX_RUNNING)
        yield
    await served.until_jobs(0)


async def test_while_it_waits_for_the_engine(served: Served) -> None:
    before = await asyncio.to_thread(at_rest, served.gateway, [served.worker])
    async with full_engine(served):
        for way in WAYS:
            async with talking(served.port) as talk:
                await talk.say("Hello?")
                response_id = await talk.begin(**ENDLESS)
                await served.until_jobs(1, waiting=True)
                line = await end(served, talk, response_id, way)
                assert line["output_tokens"] == 0
                await served.until_jobs(0, waiting=True)
                assert num_jobs(served.worker) == MAX_RUNNING
    await asyncio.to_thread(wait_until_held, served.gateway, [served.worker], before)


@pytest.mark.parametrize("way", WAYS)
async def test_before_it_begins(served: Served, way: str) -> None:
    """Its prompt is long, and not made yet: no engine hears of it, or not for long."""
    async with talking(served.port) as talk:
        await talk.say(f"{way} {LONGER_PROMPT}")
        response_id = await talk.begin(**ENDLESS)
        line = await end(served, talk, response_id, way)
        assert line["output_tokens"] == 0
    await served.until_jobs(0)


@pytest.mark.parametrize("way", WAYS)
async def test_in_prefill(served: Served, way: str) -> None:
    async with talking(served.port) as talk:
        await talk.say(f"{way} {LONG_PROMPT}")
        response_id = await talk.begin(**ENDLESS)
        await served.until_jobs(1, waiting=True)
        line = await end(served, talk, response_id, way)
        assert (line["output_tokens"], line["prompt_tokens"] > 3000) == (0, True)
    await served.until_jobs(0)


@pytest.mark.parametrize("way", WAYS)
async def test_in_decode(served: Served, way: str) -> None:
    async with talking(served.port) as talk:
        await talk.say("Hello?")
        response_id = await talk.begin(**ENDLESS)
        for _ in range(4):
            await talk.until(DELTA)
        line = await end(served, talk, response_id, way)
        assert 3 < line["output_tokens"] < 2000
    await served.until_jobs(0)


@pytest.mark.parametrize("way", WAYS)
async def test_while_a_rule_holds_its_text(served: Served, way: str) -> None:
    async with talking(served.port) as talk:
        await talk.say("Please hold it.")
        response_id = await talk.begin(max_output_tokens=20_000, speech="sentence")
        await served.until_jobs(1)
        await served.until_jobs(0, waiting=True)
        line = await end(served, talk, response_id, way)
        assert line["undecided_characters"] > 0
        assert not any(event["type"] == DELTA for event in talk.events)
    await served.until_jobs(0)


async def test_two_messages_that_come_at_once_are_done_in_their_order(served: Served) -> None:
    """A cancel right behind its response, and the next turn right behind the cancel."""
    async with talking(served.port) as talk:
        for number in range(20):
            await talk.send("conversation.item.create", item=message(f"Turn {number}"))
            await talk.send("response.create", response=ENDLESS)
            await talk.send("response.cancel")
        await talk.send("response.create", response={"max_output_tokens": 3})
        seen: list[str] = []
        while len(seen) < 21:
            seen.append((await talk.until("response.done"))["response"]["id"])
        responses = [spoken(talk.events, response_id) for response_id in seen]
        assert [said.status for said in responses] == ["cancelled"] * 20 + ["incomplete"]
    await served.until_jobs(0)


async def test_an_item_can_be_deleted_while_it_is_said(served: Served) -> None:
    """What comes of it then is sent, and is in no prompt; its id is free."""
    async with talking(served.port) as talk:
        await talk.say("Hello?", id="hello")
        response_id = await talk.begin(max_output_tokens=60)
        item_id = (await talk.until(DELTA))["item_id"]
        await talk.send("conversation.item.delete", item_id=item_id)
        await talk.send("conversation.item.create", item=message("Hm.", "assistant", id=item_id))
        done = (await talk.until(DONE))["response"]
        assert (done["id"], done["usage"]["output_tokens"]) == (response_id, 60)
        shown = await talk.retrieve(item_id)
        assert shown["content"] == [{"type": "output_text", "text": "Hm."}]


# -- all of them at once, at random ------------------------------------------------------------------------


async def at_once(talk: Talk, rng: random.Random) -> None:
    """Most likely it is queued, or its prompt is not made."""


async def later(talk: Talk, rng: random.Random) -> None:
    """In prefill, perhaps."""
    await asyncio.sleep(rng.random() * 0.15)


async def in_decode(talk: Talk, rng: random.Random) -> None:
    for _ in range(rng.randrange(1, 10)):
        await talk.until(DELTA)


PHASES: Final[Sequence[Callable[[Talk, random.Random], Awaitable[None]]]] = [at_once, later, in_decode]


async def turn(talk: Talk, rng: random.Random) -> None:
    """A response that is cancelled at some moment, or that ends by itself just then."""
    words = rng.choice(["short", "hold it", " ".join(str(rng.random()) for _ in range(20))])
    await talk.say(f"{words} {rng.random()}")
    fields = rng.choice([ENDLESS, ENDLESS, {"max_output_tokens": rng.randrange(1, 6)}])
    own = rng.choice([{}, {"conversation": "none"}, {"speech": "clause"}])
    response_id = await talk.begin(**fields, **own)
    is_short = fields is not ENDLESS or words == "hold it"
    await rng.choice(PHASES[:2] if is_short else PHASES)(talk, rng)
    await talk.send("response.cancel", response_id=response_id)
    while not any(is_done(event, response_id) for event in talk.events):
        await talk.next()
    said = spoken(talk.events, response_id)
    if said.status == "cancelled":
        assert_cancelled(said)
        return
    assert is_short, said
    if not any(event["type"] == "error" for event in talk.events[-1:]):
        assert (await talk.error())["code"] == "response_cancel_not_active"  # it was too late


async def visit(served: Served, rng: random.Random, at_most: asyncio.Semaphore) -> None:
    """One client with some turns; it leaves politely, or in the middle of the last one."""
    async with at_most, talking(served.port) as talk:
        for _ in range(rng.randrange(1, 4)):
            await turn(talk, rng)
        way = rng.choice(WAYS)
        if way == "cancel":
            return
        await talk.say(rng.choice(["And now?", "Now hold it."]))
        await talk.begin(**ENDLESS)
        await rng.choice(PHASES[:2])(talk, rng)
        if way == "vanish":
            talk.vanish()


async def storm(served: Served, count: int, seed: int) -> None:
    at_most = asyncio.Semaphore(3 * MAX_RUNNING)  # most of them are queued
    await asyncio.gather(*(visit(served, random.Random(seed + each), at_most) for each in range(count)))


async def test_random_cancels_leave_nothing_behind(served: Served) -> None:
    await storm(served, 4, seed=0)  # whatever is made once is made
    before = await asyncio.to_thread(at_rest, served.gateway, [served.worker])
    await storm(served, 25, seed=1)
    await asyncio.to_thread(wait_until_held, served.gateway, [served.worker], before)
    ends = {line["ended"] for line in request_lines(served.gateway) if line["id"].startswith("resp_")}
    assert ends == {"complete", "cancelled", "client_closed"}


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_thousand_random_cancels_leave_nothing_behind_and_memory_flat(served: Served) -> None:
    await storm(served, 400, seed=10_000)  # after these every cache and pool has its size
    before = await asyncio.to_thread(at_rest, served.gateway, [served.worker])
    memory = resident_bytes(served.gateway.pid) - kept_bytes(served.gateway)
    await storm(served, 700, seed=20_000)
    await asyncio.to_thread(wait_until_held, served.gateway, [served.worker], before)
    grown = resident_bytes(served.gateway.pid) - kept_bytes(served.gateway) - memory
    assert grown < 12 << 20, grown  # 17 KiB each: less than one conversation's objects
