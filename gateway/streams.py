"""The resumable streams that this process knows: its own, and copies of those of others while they are read.

    live        its answer is being generated; ended as abandoned when nobody reads it for the grace period
    finished    kept for a while for those who come back, then forgotten; earlier if memory is needed
    copy        filled from the shared store; forgotten when nobody reads it

    live --its answer is over--> finished --kept long enough, or room is needed--> forgotten
    copy --nobody reads it, it is lost, or deleted--> forgotten

Not here: what is on the wire (`gateway/stream_events.py`), and the shared store (`gateway/stream_store.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, Literal

from backend.fault_log import log_fault
from gateway.answer import Answer
from gateway.journal import Journal, JournalLimits
from gateway.stream_meta import StreamMeta
from gateway.stream_ports import Store
from gateway.stream_reader import StreamReader
from pipeline.errors import HeadraceError
from pipeline.stream_errors import JournalFull, NoSharedStore, StreamAbandoned, StreamCancelled, UnknownStream

# What a live stream may come to need: 2,048 tokens, which is the default limit, at 64 bytes.
RESERVED_BYTES: Final = 128 << 10
COPY_KEPT_S: Final = 5.0  # without readers: one that lost its connection is back after a second
ELSEWHERE_S: Final = 1.0  # between two questions whether others read a stream


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds of resumable streams, in seconds and bytes."""

    journal: JournalLimits = field(default_factory=JournalLimits)
    max_bytes: int = 256 << 20  # of all journals in this process
    grace_s: float = 30.0
    keep_s: float = 120.0
    lifetime_s: float = 720.0  # from the start until it is surely forgotten


class Stream:
    """One stream as this process knows it. `answer`: only of a live one."""

    __slots__ = ("answer", "ended_s", "error", "journal", "meta", "readers", "state", "unread_since_s")

    def __init__(
        self, meta: StreamMeta, journal: Journal, state: Literal["live", "copy"], now_s: float
    ) -> None:
        self.meta = meta
        self.journal = journal
        self.state: Literal["live", "finished", "copy"] = state
        self.answer: Answer | None = None
        self.readers: set[StreamReader] = set()
        self.unread_since_s: float | None = now_s
        self.ended_s = 0.0  # of a finished one
        self.error: HeadraceError | None = None  # the store cannot keep it: what every reader is told

    @property
    def reserved_bytes(self) -> int:
        """What it takes, or may come to."""
        num_bytes = self.journal.num_bytes
        return num_bytes if self.state == "finished" else max(num_bytes, RESERVED_BYTES)


class Streams:
    """One per process. `gateway.stream_ports.StoreEvents` of its store.

    `is_shared`: other processes take its clients' next requests, but the store is its own: there can be none.
    """

    def __init__(self, limits: StreamLimits, store: Store, is_shared: bool = False) -> None:
        self.limits = limits
        self.store = store
        self._is_shared = is_shared
        self._streams: dict[str, Stream] = {}
        self._asking: asyncio.Task[None] | None = None  # who else reads
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.store.start(self)

    async def close(self) -> None:
        """Forget everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside, until `close`."""
        task = asyncio.create_task(work, name="streams")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    @property
    def num_live(self) -> int:
        return sum(1 for stream in self._streams.values() if stream.answer is not None)

    @property
    def num_readers(self) -> int:
        return sum(len(stream.readers) for stream in self._streams.values())

    @property
    def num_bytes(self) -> int:
        return sum(stream.journal.num_bytes for stream in self._streams.values())

    def check_room(self) -> None:
        """Before anything is done for a new stream. Raises `JournalFull`, `NoSharedStore`."""
        if self._is_shared:
            raise NoSharedStore
        running = [stream for stream in self._streams.values() if stream.state != "finished"]
        self._check_room(sum(stream.reserved_bytes for stream in running))

    async def create(self, meta: StreamMeta, key: str | None) -> Stream:
        """A new stream without events, for which the oldest finished ones make way.

        Raises `JournalFull`, `StoreUnavailable`.
        """
        num_bytes = sum(stream.reserved_bytes for stream in self._streams.values())
        self._check_room(self._shrink_to(self._room, num_bytes))
        journal = Journal(self.limits.journal, self.store.journal_of(meta.id))
        stream = self._streams[meta.id] = Stream(meta, journal, "live", monotonic())
        try:
            await self.store.create(meta, key)
        except BaseException:
            self._forget(stream)
            raise
        return stream

    async def known(self, stream_id: str) -> StreamMeta | None:
        """What is known of a stream of any process. Raises `StoreUnavailable`."""
        stream = self._streams.get(stream_id)
        return stream.meta if stream is not None else await self.store.meta(stream_id)

    def open(self, meta: StreamMeta) -> Stream:
        """The stream, or a copy of it that is being filled."""
        stream = self._streams.get(meta.id)
        if stream is None:
            stream = Stream(meta, Journal(self.limits.journal), "copy", monotonic())
            self._streams[meta.id] = stream
            self.store.follow(meta, stream.journal)
        elif stream.state == "copy" and not stream.readers:
            stream.unread_since_s = monotonic()  # or it might be forgotten before its reader is there
        return stream

    async def cancel(self, meta: StreamMeta) -> None:
        """A client wants it no more: it ends; one that has ended is forgotten. Raises `StoreUnavailable`."""
        stream = self._streams.get(meta.id)
        if stream is None or stream.state == "copy":
            if await self.store.cancel(meta):
                self.copy_lost(meta.id, UnknownStream())
        elif stream.answer is not None:
            stream.answer.fail(StreamCancelled())
        else:
            self._forget(stream)
            await self.store.delete(meta.id)

    def attach(self, stream: Stream, reader: StreamReader) -> None:
        stream.readers.add(reader)
        stream.unread_since_s = None

    def detach(self, stream: Stream, reader: StreamReader) -> None:
        stream.readers.discard(reader)
        if not stream.readers:
            stream.unread_since_s = monotonic()

    def ended(self, stream: Stream, now_s: float) -> None:
        """Its answer is over."""
        stream.answer = None
        stream.state, stream.ended_s = "finished", now_s

    async def discard(self, stream: Stream) -> None:
        """It was not started after all."""
        self._forget(stream)
        await self.store.delete(stream.meta.id)

    def cancel_asked(self, stream_id: str) -> None:
        """`StoreEvents.cancel_asked`."""
        self._fail(self._streams.get(stream_id), StreamCancelled())

    def forget_asked(self, stream_id: str) -> None:
        """`StoreEvents.forget_asked`."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.state == "finished":
            self._drop(stream)

    def broken(self, stream_id: str, error: HeadraceError) -> None:
        """`StoreEvents.broken`: its readers learn it from us, since the store cannot tell them."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.error = error
            self._fail(stream, error)
            for reader in tuple(stream.readers):
                reader.fail(error, is_final=True)

    def copy_lost(self, stream_id: str, error: HeadraceError) -> None:
        """`StoreEvents.copy_lost`: who reads it here goes elsewhere, or is told why not."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.state == "copy":
            self._forget(stream)
            stream.error = error  # for who has found it and is not a reader yet
            stream.journal.fail(error)

    def look(self, now_s: float) -> None:
        """Enforce grace, keeping and memory; called several times a second."""
        if not self._streams:
            return
        limits, unread = self.limits, []
        for stream in list(self._streams.values()):
            since_s = stream.unread_since_s
            if stream.state == "copy":
                if since_s is not None and now_s - since_s > COPY_KEPT_S:
                    self._forget(stream)
            elif stream.state == "finished":
                if now_s - stream.ended_s > limits.keep_s and not stream.readers:
                    self._drop(stream)
            elif since_s is not None and now_s - since_s > limits.grace_s:
                unread.append(stream)
        if unread and self._asking is None:
            self._asking = self.spawn(self._end_abandoned(unread))
            self._asking.add_done_callback(self._asked)
        if self._shrink_to(limits.max_bytes, self.num_bytes) > limits.max_bytes:
            self._end_largest()

    async def _end_abandoned(self, streams: list[Stream]) -> None:
        """End those that nobody reads, here or elsewhere."""
        since_s = [stream.unread_since_s for stream in streams]
        elsewhere = await self.store.read_elsewhere([stream.meta.id for stream in streams])
        for stream, unread_since_s in zip(streams, since_s, strict=True):
            if stream.unread_since_s != unread_since_s:  # somebody has come meanwhile
                continue
            if stream.meta.id in elsewhere:
                stream.unread_since_s = monotonic() - self.limits.grace_s + ELSEWHERE_S
            else:
                self._fail(stream, StreamAbandoned(self.limits.grace_s))

    def _end_largest(self) -> None:
        """No finished stream is left to make way. A copy ends here alone: elsewhere its stream goes on."""
        largest = max(self._streams.values(), key=lambda stream: stream.journal.num_bytes)
        error = JournalFull(self.num_bytes, self.limits.max_bytes)
        self._fail(largest, error)
        self.copy_lost(largest.meta.id, error)

    @property
    def _room(self) -> int:
        """What others may take when a new one comes. One may run in any case."""
        return max(0, self.limits.max_bytes - RESERVED_BYTES)

    def _check_room(self, num_bytes: int) -> None:
        if num_bytes > self._room:
            raise JournalFull(num_bytes, self.limits.max_bytes)

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None

    def _fail(self, stream: Stream | None, error: HeadraceError) -> None:
        if stream is not None and stream.answer is not None:
            stream.answer.fail(error)

    def _shrink_to(self, limit: int, num_bytes: int) -> int:
        """Forget finished streams, the oldest first, until no more than `limit` bytes are used; what is."""
        if num_bytes > limit:
            finished = [each for each in self._streams.values() if each.state == "finished"]
            for stream in sorted(finished, key=lambda each: each.ended_s):
                if num_bytes <= limit:
                    break
                num_bytes -= stream.journal.num_bytes
                self._drop(stream)
        return num_bytes

    def _drop(self, stream: Stream) -> None:
        """Forget it here and in the store."""
        self._forget(stream)
        self.spawn(self.store.delete(stream.meta.id))

    def _forget(self, stream: Stream) -> None:
        if self._streams.pop(stream.meta.id, None) is not None and stream.state == "copy":
            self.store.unfollow(stream.meta.id)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, HeadraceError):
            log_fault(error, "none")
