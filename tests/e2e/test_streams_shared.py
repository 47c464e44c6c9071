"""Streams that resume through another process or another gateway: one store, and what happens without it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import stack
from tests.e2e.asking import chat
from tests.e2e.breaking_proxy import random_breaks
from tests.e2e.event_source import EventSource
from tests.e2e.resting import are_ready, assert_no_fault, children, enter_all, num_jobs, wait_for
from tests.e2e.resuming import (
    SONG,
    Created,
    assert_came_back_once,
    assert_refused,
    create,
    delete,
    events,
    post,
    read,
    read_through_breaks,
    text_of,
    told,
    until_told,
)
from tests.stack import Gateway, Worker
from tests.valkey import Valkey

ENDLESS = 20_000
GRACE_S = 0.6  # others tell of their readers four times in it
STORE_LIMIT_S = 2.0
LIMIT_S = 60.0  # nothing may hang; everything here takes a few seconds
SING = chat("Sing the song.", 120)


@dataclass(frozen=True, slots=True)
class Site:
    """Gateways before one worker. A connection to any of `ports` may meet another process."""

    gateways: Sequence[Gateway]
    worker: Worker
    ports: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ports", [gateway.port for gateway in self.gateways])

    async def until_idle(self) -> None:
        await until(self.gateways[-1], lambda: num_jobs(self.worker) == 0, "idle")


async def until(gateway: Gateway, is_true: Any, what: str) -> None:
    await asyncio.to_thread(wait_for, gateway, is_true, what)


@pytest.fixture(scope="module")
def worker(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("streams_shared")
    script = folder / "script.json"
    script.write_text(json.dumps({"Sing the song": SONG}))
    with stack.start_scripted(folder, embedded_model, "--step-ms", "3", "--script", str(script)) as started:
        yield started


@pytest.fixture(scope="module")
def processes(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two processes of one gateway, with a store of their own."""
    folder = tmp_path_factory.mktemp("processes")
    options = ("--processes", "2", "--redis", "embedded", "--stream-grace-s", str(GRACE_S))
    with stack.start_gateway(folder, [worker], *options) as gateway:
        wait_for(gateway, lambda: are_ready(gateway), "ready in both processes")
        yield Site([gateway, gateway], worker)
        assert_no_fault(gateway)


@dataclass(frozen=True, slots=True)
class Shared(Site):
    valkey: Valkey


def start_site(running: ExitStack, folder: Path, worker: Worker) -> Shared:
    """Two gateways, as on two machines, and their store."""
    valkey = Valkey(folder, password="guess")
    valkey.start()
    running.callback(valkey.kill)
    limits = ("--stream-grace-s", str(GRACE_S), "--store-limit-s", str(STORE_LIMIT_S))
    gateways = enter_all(
        running,
        [
            stack.start_gateway(folder, [worker], "--redis", valkey.url, *limits, name=f"gateway{number}")
            for number in range(2)
        ],
    )
    return Shared(gateways, worker, valkey)


@pytest.fixture(scope="module")
def gateways(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with ExitStack() as running:
        site = start_site(running, tmp_path_factory.mktemp("gateways"), worker)
        yield site
        for gateway in site.gateways:
            assert_no_fault(gateway)
            assert "guess" not in gateway.log.read_text()


@pytest.fixture
def breakable(worker: Worker, tmp_path: Path) -> Iterator[Shared]:
    """A site of which a test may break anything but the worker."""
    with ExitStack() as running:
        yield start_site(running, tmp_path, worker)


@pytest.fixture(params=["processes", "gateways"])
def site(request: pytest.FixtureRequest) -> Site:
    chosen: Site = request.getfixturevalue(request.param)
    return chosen


# -- what a reader gets --------------------------------------------------------------------------------------


async def test_text_is_exact_over_twenty_breaks(site: Site) -> None:
    """Every connection goes to another gateway, or to any process."""
    await read_through_breaks(site.ports, SING, random_breaks(20, seed=21))


@pytest.mark.long
async def test_text_is_exact_over_two_hundred_breaks(site: Site) -> None:
    await read_through_breaks(site.ports, chat("Sing the song.", 2000), random_breaks(200, seed=22))


async def test_readers_everywhere_get_the_same(site: Site) -> None:
    """Live and late: enough of them that each process has some."""
    expected = await text_of(site.ports[0], SING)
    stream = await create(site.ports[0], SING)
    live = await asyncio.gather(*(read(port, stream.events) for port in (*site.ports, *site.ports) * 2))
    late = await asyncio.gather(*(read(port, stream.events) for port in site.ports))
    for source in (*live, *late):
        assert events(source.messages) == events(live[0].messages)
        assert_came_back_once(source)
    assert told(live[0].messages).text == expected


async def test_many_streams_at_once_do_not_mix(site: Site) -> None:
    bodies = [chat(f"Story {number}", 40) for number in range(8)]
    expected = await asyncio.gather(*(text_of(site.ports[0], body) for body in bodies))
    streams = await asyncio.gather(*(create(site.ports[n % 2], body) for n, body in enumerate(bodies)))
    sources = await asyncio.gather(
        *(read(site.ports[(n + 1) % 2], stream.events) for n, stream in enumerate(streams))
    )
    assert [told(source.messages).text for source in sources] == expected


async def test_reader_that_cannot_be_served_is_told_and_does_not_come_back(site: Site) -> None:
    stream = await create(site.ports[0], chat("Short", 4))
    for port in site.ports:
        for path, code in {
            stream.events.replace(stream.id, "0" * 32): "stream_not_found",
            stream.events.replace(stream.token, "guess"): "invalid_stream_token",
            stream.events + "&last_event_id=soon": "invalid_event_id",
        }.items():
            assert_refused(await read(port, path), code)
    done = await read(site.ports[1], stream.events)
    assert told(done.messages).is_done
    for port in site.ports:
        assert_refused(await read(port, stream.events + "&last_event_id=1000"), "invalid_event_id")


# -- its end -------------------------------------------------------------------------------------------------


def failure(source: EventSource) -> str:
    """The code of a stream that did not come to its end."""
    result = told(source.messages)
    assert result.error is not None
    return str(result.error["code"])


async def follow(
    ports: Sequence[int], stream: Created
) -> list[tuple[EventSource, asyncio.Task[EventSource]]]:
    """Readers at all of these ports, which have seen a little."""
    sources = [EventSource(port, stream.events) for port in ports]
    tasks = [asyncio.create_task(source.run()) for source in sources]
    for source in sources:
        await until_told(source, 5)
    return list(zip(sources, tasks, strict=True))


async def all_fail(readers: Sequence[tuple[EventSource, asyncio.Task[EventSource]]], code: str) -> None:
    await asyncio.wait_for(asyncio.gather(*(task for _, task in readers)), LIMIT_S)
    assert {failure(source) for source, _ in readers} == {code}
    for source, _ in readers:
        assert_came_back_once(source)


async def test_delete_through_another_process_ends_it_for_all(site: Site) -> None:
    for turn in range(2):  # of two processes it may be the same one
        stream = await create(site.ports[0], chat(f"Delete {turn}", ENDLESS))
        readers = await follow((*site.ports, *site.ports), stream)
        assert (await delete(site.ports[1], stream))[0] == 204
        await all_fail(readers, "cancelled")
        await site.until_idle()


async def test_reader_elsewhere_keeps_it_alive(site: Site) -> None:
    stream = await create(site.ports[0], chat("Grace", ENDLESS))
    source, reading = (await follow(site.ports[1:], stream))[0]
    await read_for(source, 1.5 * GRACE_S)
    assert num_jobs(site.worker) == 1
    await delete(site.ports[1], stream)
    await all_fail([(source, reading)], "cancelled")
    await site.until_idle()


async def read_for(source: EventSource, duration_s: float) -> None:
    """Events come all the time."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + duration_s
    while loop.time() < ends_s:
        await until_told(source, len(source.messages) + 1)


@pytest.mark.long  # the process that served the last reader waits a while for it, too
async def test_last_reader_elsewhere_leaves_and_it_ends(site: Site) -> None:
    stream = await create(site.ports[0], chat("Grace", ENDLESS))
    source, reading = (await follow(site.ports[1:], stream))[0]
    source.close()
    await reading
    await site.until_idle()
    for port in site.ports:
        assert failure(await read(port, stream.events)) == "abandoned"


async def test_nobody_reads_anywhere(site: Site) -> None:
    stream = await create(site.ports[0], chat("Nobody", ENDLESS))
    await site.until_idle()
    assert failure(await read(site.ports[1], stream.events)) == "abandoned"


async def test_idempotency_key_is_raced_through_both(site: Site) -> None:
    await site.until_idle()
    body, headers = chat("A race. " * 4000, ENDLESS), {"idempotency-key": "raced"}
    answers = await asyncio.gather(*(post(port, body, headers) for port in (*site.ports,) * 5))
    ids = {document["id"] for head, document in answers if head.status == 201}
    assert {head.status for head, _ in answers} <= {201, 409}
    streams = [await create(port, body, headers) for port in site.ports]
    assert {stream.id for stream in streams} == ids
    assert len(ids) == 1
    assert streams[0] == streams[1]
    assert num_jobs(site.worker) == 1
    head, document = await post(site.ports[1], chat("Another", 3), headers)
    assert (head.status, document["error"]["code"]) == (422, "idempotency_key_reused")
    await delete(site.ports[1], streams[0])
    await site.until_idle()


# -- what breaks ---------------------------------------------------------------------------------------------


@pytest.mark.long  # its lease runs for 10 s
async def test_gateway_that_is_killed_ends_its_streams_elsewhere_by_name(
    gateways: Shared, gateway: Callable[..., Gateway]
) -> None:
    """A reader of the dead one comes back through another and is told, too."""
    dead = gateway([gateways.worker], "--redis", gateways.valkey.url)
    alive = gateways.gateways[0]
    finished = await create(dead.port, chat("Finished", 5))
    assert told((await read(dead.port, finished.events)).messages).is_done
    stream = await create(dead.port, chat("Lost", ENDLESS))
    readers = await follow([*gateways.ports, dead.port], stream)
    dead.process.kill()
    readers[-1][0].port = alive.port
    await all_fail(readers, "gateway_lost")
    assert failure(await read(alive.port, stream.events)) == "gateway_lost"
    assert told((await read(alive.port, finished.events)).messages).is_done, "what had ended is still there"
    await gateways.until_idle()


@pytest.mark.long
async def test_process_that_is_killed_ends_its_streams_in_the_other_by_name(
    worker: Worker, tmp_path: Path
) -> None:
    options = ("--processes", "2", "--redis", "embedded")
    with stack.start_gateway(tmp_path, [worker], *options) as gateway:
        await until(gateway, lambda: are_ready(gateway), "ready in both processes")
        streams = [await create(gateway.port, chat(f"Lost {n}", ENDLESS)) for n in range(6)]
        readers = [(await follow([gateway.port], stream))[0] for stream in streams]
        os.kill(gateway_processes(gateway)[0], signal.SIGKILL)
        await until(gateway, lambda: num_jobs(worker) < len(streams), "without the killed one's jobs")
        await until(gateway, lambda: are_ready(gateway), "ready again")
        for stream in streams:
            await delete(gateway.port, stream)  # those that live
        await asyncio.wait_for(asyncio.gather(*(task for _, task in readers)), LIMIT_S)
        codes = {failure(source) for source, _ in readers}
        assert "gateway_lost" in codes
        assert codes <= {"gateway_lost", "cancelled"}
        await until(gateway, lambda: num_jobs(worker) == 0, "idle")


def gateway_processes(gateway: Gateway) -> list[int]:
    """Those that take connections: the store has become a program of its own."""
    return [
        pid for pid in children(gateway.pid) if b"valkey" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


async def test_store_that_is_killed_fails_streams_by_name_and_new_ones_work_when_it_is_back(
    breakable: Shared,
) -> None:
    first, second = breakable.gateways
    stream = await create(first.port, chat("Cut off", ENDLESS))
    readers = await follow([first.port, second.port], stream)
    breakable.valkey.kill()
    (at_owner, ended), (elsewhere, comes_back) = readers
    await asyncio.wait_for(ended, LIMIT_S)
    assert final_failure(at_owner) == "store_unavailable"
    await breakable.until_idle()
    head, document = await asyncio.wait_for(post(first.port, chat()), LIMIT_S)
    assert (head.status, document["error"]["code"]) == (503, "store_unavailable")
    assert head.get("retry-after")
    assert await text_of(first.port, chat("Plain answers need no store", 5))
    assert not comes_back.done()  # what it reads might be fine at its owner
    breakable.valkey.start()
    await asyncio.wait_for(comes_back, LIMIT_S)
    assert final_failure(elsewhere) == "stream_not_found"
    await until(first, lambda: asyncio.run(is_served(first.port, second.port)), "serving streams again")
    for gateway in breakable.gateways:
        assert_no_fault(gateway)


def final_failure(source: EventSource) -> str:
    """The code of what has ended it for good."""
    last = source.messages[-1]
    assert last.type == "failed"
    assert source.has_failed
    return str(json.loads(last.data)["error"]["code"])


async def is_served(*ports: int) -> bool:
    """Whether a stream that one port starts can be read through the last."""
    head, document = await post(ports[0], chat("Again", 3))
    if head.status != 201:
        return False
    source = await read(ports[-1], document["url"])
    return told(source.messages).is_done if source.messages[0].last_event_id == "1" else False


@pytest.mark.long
async def test_store_that_hangs_fails_streams_by_name(breakable: Shared) -> None:
    first, second = breakable.gateways
    stream = await create(first.port, chat("Hung up", ENDLESS))
    readers = await follow([first.port, second.port], stream)
    breakable.valkey.signal(signal.SIGSTOP)
    try:
        (at_owner, ended), (elsewhere, comes_back) = readers
        await asyncio.wait_for(ended, LIMIT_S)
        assert final_failure(at_owner) == "store_unavailable"
        await breakable.until_idle()
        head, _ = await asyncio.wait_for(post(second.port, chat()), LIMIT_S)
        assert head.status == 503
    finally:
        breakable.valkey.signal(signal.SIGCONT)
    await asyncio.wait_for(comes_back, LIMIT_S)  # its owner has told the store in the end
    assert final_failure(elsewhere) in ("store_unavailable", "stream_not_found")


async def test_store_that_is_away_for_a_moment_loses_nothing(gateways: Shared) -> None:
    """Shorter than the limit: the tokens wait, and come."""
    first, second = gateways.gateways
    expected = await text_of(first.port, SING)
    stream = await create(first.port, SING)
    readers = await follow([first.port, second.port], stream)
    gateways.valkey.signal(signal.SIGSTOP)
    await asyncio.sleep(STORE_LIMIT_S / 4)
    gateways.valkey.signal(signal.SIGCONT)
    await asyncio.wait_for(asyncio.gather(*(task for _, task in readers)), LIMIT_S)
    assert {told(source.messages).text for source, _ in readers} == {expected}
    assert all(told(source.messages).is_done for source, _ in readers)


@pytest.mark.long  # the refusal itself is tested with the routes
async def test_several_processes_without_a_store_refuse_streams_by_name(
    worker: Worker, tmp_path: Path
) -> None:
    with stack.start_gateway(tmp_path, [worker], "--processes", "2") as gateway:
        head, document = await post(gateway.port, chat())
    assert (head.status, document["error"]["code"]) == (501, "no_shared_store")
