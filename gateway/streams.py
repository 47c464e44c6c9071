"""The resumable streams that this process knows: its own, and copies of those of others while they are read.

    live        its answer is being generated; ended as abandoned when nobody reads it for the grace period
    finished    kept for a while for those who come back, then forgotten; earlier if memory is needed
    copy        filled from the shared store; forgotten when nobody reads it

Not here: what is on the wire (`gateway/stream_routes.py`), and the shared store (`gateway/stream_store.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from backend.fault_log import log_fault
from gateway.answer import Answer
from gateway.journal import Journal, JournalLimits
from gateway.stream_meta import StreamMeta
from gateway.stream_ports import Store
from gateway.stream_reader import StreamReader, failed_frame
from pipeline.errors import HeadraceError
from pipeline.stream_errors import JournalFull, NoSharedStore, StreamAbandoned, StreamCancelled

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
    """One stream as this process knows it. `answer` is None for a copy."""

    __slots__ = ("answer", "ended_s", "error", "is_copy", "journal", "meta", "readers", "unread_since_s")

    def __init__(self, meta: StreamMeta, journal: Journal, is_copy: bool, now_s: float) -> None:
        self.meta = meta
        self.journal = journal
        self.is_copy = is_copy
        self.answer: Answer | None = None
        self.readers: set[StreamReader] = set()
        self.unread_since_s: float | None = now_s
        self.ended_s: float | None = None
        self.error: HeadraceError | None = None  # the store cannot keep it: what every reader is told

    @property
    def num_bytes(self) -> int:
        """What it takes, or may come to."""
        return (
            self.journal.num_bytes
            if self.ended_s is not None
            else max(self.journal.num_bytes, RESERVED_BYTES)
        )


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

    def make_room(self) -> None:
        """Before a new stream. The oldest finished ones make way. Raises `JournalFull`, `NoSharedStore`."""
        if self._is_shared:
            raise NoSharedStore
        limit = max(0, self.limits.max_bytes - RESERVED_BYTES)
        num_bytes = self._shrink_to(limit)
        if num_bytes > limit:
            raise JournalFull(num_bytes, self.limits.max_bytes)

    async def create(self, meta: StreamMeta, key: str | None) -> Stream:
        """A new stream without events. Raises `StoreUnavailable`."""
        await self.store.create(meta, key)
        journal = Journal(self.limits.journal, self.store.journal_of(meta.id))
        stream = self._streams[meta.id] = Stream(meta, journal, False, monotonic())
        return stream

    async def find(self, stream_id: str) -> Stream | None:
        """The stream, or a copy of it that is being filled. Raises `StoreUnavailable`."""
        stream = self._streams.get(stream_id)
        if stream is None:
            meta = await self.store.meta(stream_id)
            stream = self._streams.get(stream_id)  # somebody else may have looked for it, too
            if stream is None and meta is not None:
                stream = Stream(meta, Journal(self.limits.journal), True, monotonic())
                self._streams[stream_id] = stream
                self.store.follow(meta, stream.journal)
        if stream is not None and stream.is_copy and not stream.readers:
            stream.unread_since_s = monotonic()  # or it might be forgotten before its reader is there
        return stream

    async def cancel(self, stream: Stream) -> None:
        """A client wants it no more: it ends; one that has ended is forgotten. Raises `StoreUnavailable`."""
        if stream.answer is not None:
            stream.answer.fail(StreamCancelled())
        elif stream.is_copy and not stream.journal.is_over:
            if await self.store.cancel(stream.meta):  # we had not read so far
                self._forget(stream)
        else:
            self._forget(stream)
            await self.store.delete(stream.meta.id)

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
        stream.ended_s = now_s

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
        if stream is not None and stream.ended_s is not None:
            self._drop(stream)

    def broken(self, stream_id: str, error: HeadraceError) -> None:
        """`StoreEvents.broken`: its readers learn it from us, since the store cannot tell them."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.error = error
            self._fail(stream, error)
            for reader in tuple(stream.readers):
                reader.fail(error)

    def look(self, now_s: float) -> None:
        """Enforce grace, keeping and memory; called several times a second."""
        limits, unread = self.limits, []
        for stream in list(self._streams.values()):
            since_s = stream.unread_since_s
            if stream.is_copy:
                if since_s is not None and now_s - since_s > COPY_KEPT_S:
                    self._forget(stream)
            elif stream.ended_s is not None:
                if now_s - stream.ended_s > limits.keep_s and not stream.readers:
                    self._drop(stream)
            elif since_s is not None and now_s - since_s > limits.grace_s:
                unread.append(stream)
        if unread and self._asking is None:
            self._asking = self.spawn(self._end_abandoned(unread))
            self._asking.add_done_callback(self._asked)
        if self._shrink_to(limits.max_bytes, num_bytes=self.num_bytes) > limits.max_bytes:
            self._end_largest()

    async def _end_abandoned(self, streams: list[Stream]) -> None:
        """End those that nobody reads, here or elsewhere."""
        elsewhere = await self.store.read_elsewhere([stream.meta.id for stream in streams])
        for stream in streams:
            if stream.readers:
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
        if largest.is_copy:
            self._forget(largest)
            if not largest.journal.has_end:
                largest.journal.end(failed_frame(error))

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None

    def _fail(self, stream: Stream | None, error: HeadraceError) -> None:
        if stream is not None and stream.answer is not None:
            stream.answer.fail(error)

    def _shrink_to(self, limit: int, num_bytes: int | None = None) -> int:
        """Forget finished streams, the oldest first, until no more than `limit` bytes are used; what is."""
        if num_bytes is None:
            num_bytes = sum(stream.num_bytes for stream in self._streams.values())
        if num_bytes > limit:
            finished = [
                each for each in self._streams.values() if each.ended_s is not None and not each.is_copy
            ]
            for stream in sorted(finished, key=lambda each: each.ended_s or 0.0):
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
        if self._streams.pop(stream.meta.id, None) is not None and stream.is_copy:
            self.store.unfollow(stream.meta.id)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, HeadraceError):
            log_fault(error, "none")
