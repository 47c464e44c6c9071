"""Stores of streams over a real Valkey, and what their tests share."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from gateway.journal import Journal, JournalLimits
from gateway.metrics import Metrics
from gateway.stream_meta import StreamMeta
from gateway.stream_store import StreamStore
from pipeline.errors import HeadraceError
from tests.valkey import Valkey

WAIT_S = 20.0  # tests are about what comes, not how soon
OPTIONS = {"keep_s": 100.0, "grace_s": 30.0, "lifetime_s": 700.0, "limit_s": WAIT_S}


class Owner:
    """`StoreEvents` that remembers, and ends what is broken as `gateway.streams.Streams` does."""

    def __init__(self) -> None:
        self.journals: dict[str, Journal] = {}
        self.broken_ones: list[tuple[str, HeadraceError]] = []
        self.lost: list[tuple[str, HeadraceError]] = []
        self.cancelled: list[str] = []
        self.forgotten: list[str] = []

    def broken(self, stream_id: str, error: HeadraceError) -> None:
        self.broken_ones.append((stream_id, error))
        journal = self.journals.get(stream_id)
        if journal is not None and not journal.has_end:
            journal.end(b"event: failed\ndata: {}\n\n")

    def copy_lost(self, stream_id: str, error: HeadraceError) -> None:
        self.lost.append((stream_id, error))

    def forget_asked(self, stream_id: str) -> None:
        self.forgotten.append(stream_id)

    def cancel_asked(self, stream_id: str) -> None:
        self.cancelled.append(stream_id)


class Process:
    """What one gateway process has of the store."""

    def __init__(self, url: str, **options: Any) -> None:
        self.metrics = Metrics()
        self.store = StreamStore(url, metrics=self.metrics, **{**OPTIONS, **options})
        self.owner = Owner()

    async def stream(self, number: int, limits: JournalLimits | None = None) -> Journal:
        """A new stream of this process, of which the store knows."""
        meta = self.meta(number)
        await self.store.create(meta, None)
        return self.journal(number, limits)

    def journal(self, number: int, limits: JournalLimits | None = None) -> Journal:
        stream_id = id_of(number)
        journal = Journal(limits or JournalLimits(), self.store.journal_of(stream_id))
        self.owner.journals[stream_id] = journal
        return journal

    def meta(self, number: int, **changes: Any) -> StreamMeta:
        now_s = time.time()
        values = {
            "id": id_of(number),
            "token": f"token {number}",
            "owner": self.store.owner,
            "key_id": "key",
            "created_s": now_s,
            "expires_s": now_s + 700.25,
            "body_digest": "digest",
        }
        return StreamMeta(**{**values, **changes})

    async def copy(self, number: int) -> Journal:
        """A copy of another process's stream, being filled."""
        meta = await self.store.meta(id_of(number))
        assert meta is not None
        copy = Journal(JournalLimits())
        self.store.follow(meta, copy)
        return copy

    async def die(self) -> None:
        """Stop at once, with nothing said; the lease has run out."""
        for task in self.store._tasks:
            task.cancel()
        await asyncio.gather(*self.store._tasks, return_exceptions=True)
        for link in (self.store._asking, self.store._appending, self.store._reading):
            await link.close()


@asynccontextmanager
async def processes(url: str, num: int, **options: Any) -> AsyncIterator[list[Process]]:
    made = [Process(url, **options) for _ in range(num)]
    for process in made:
        await process.store.start(process.owner)
    try:
        yield made
    finally:
        for process in made:
            await process.store.close()


@contextmanager
def valkey(folder: Path) -> Iterator[Valkey]:
    server = Valkey(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def id_of(number: int) -> str:
    return f"{number:032x}"


def stream_key(number: int) -> str:
    return f"headrace:stream:{id_of(number)}"


async def until(is_so: Callable[[], Any]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110 - of many things, few have events
            await asyncio.sleep(0.002)


async def stored(*journals: Journal) -> None:
    """Wait until all that was written is public."""
    await until(lambda: all(journal.last == journal.written for journal in journals))


def write_some(rng: random.Random, journal: Journal) -> None:
    """One event of any kind, of any bytes."""
    kind = rng.random()
    text = rng.randbytes(rng.choice((0, 1, 7, 30, 300)))
    if kind < 0.05:
        journal.template([rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(2, 4))])
    if kind < 0.75 and journal.templates:
        journal.text(rng.randrange(len(journal.templates)) + 1, text)
    else:
        journal.frame(text + rng.choice((b"", b"\r\n", b"$3\r\n*1\r\n\0")))


def same(copy: Journal, journal: Journal) -> bool:
    """Whether the copy is the journal, byte by byte."""
    first = journal.first
    return (
        (copy.first, copy.last, copy.has_end) == (first, journal.last, journal.has_end)
        and copy.entries(first - 1) == journal.entries(first - 1)
        and copy.wire(first - 1, 1 << 30) == journal.wire(first - 1, 1 << 30)
    )
