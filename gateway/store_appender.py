"""This process's own streams on their way into the shared store: one command at a time, for all of them.

While one is under way events gather in their journals, and the next command takes what all of them have
gained. Each journal is published as far as the store has it. The events of one engine step are written in one
go, so that a step is one command: with 100 streams 2 us of this process's time an event.

    known     its events are public when the store has them
    loose     broken for good, its owner was told: public at once, and sent as long as the store may take them
    lost      loose, and the store will take no more: it was ended by another process, deleted, or evicted

Not here: the way back (`gateway/store_follower.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from backend.fault_log import log_fault
from gateway.journal import Journal
from gateway.metrics import Metrics
from gateway.store_link import COMMAND_LIMIT_S, RETRY_PAUSE_S, StoreLink
from gateway.store_script import AppendCommand, bulk, stream_key
from pipeline.errors import HeadraceError
from pipeline.stream_errors import StoreUnavailable

# Of one command: the store serves nobody else while it runs, 10 ms for so many events.
MAX_EVENTS: Final = 4096
MAX_BYTES: Final = 4 << 20
LOST: Final = "The store of the streams has lost this stream, or it was ended by another process."

Broken = Callable[[str, HeadraceError], None]


class _Stream:
    """What the store has of one stream."""

    __slots__ = ("first", "is_lost", "key", "num_opened", "num_templates", "stored")

    def __init__(self, stream_id: str) -> None:
        self.key = bulk(stream_key(stream_id).encode())
        self.stored = 0  # number of the newest event
        self.first = 1
        self.num_templates = 0
        self.num_opened = 0  # the connection on which it was last seen to be whole
        self.is_lost = False


class _Sent(NamedTuple):
    """What the store will have of a stream once it has taken the command."""

    stream_id: str
    stream: _Stream
    journal: Journal
    number: int
    first: int
    num_templates: int


class StoreAppender:
    """`broken(stream, error)` is called once for a stream whose events cannot be kept."""

    def __init__(
        self,
        link: StoreLink,
        keep_s: float,
        limit_s: float,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.broken: Broken = _ignore
        self._link = link
        self._keep_ms = max(1, round(keep_s * 1000))
        self._limit_s = limit_s
        self._metrics = metrics
        self._clock = clock
        self._wake = asyncio.Event()
        self._dirty: dict[str, Journal] = {}  # journals with events that the store lacks
        self._is_closing = False
        self._streams: dict[str, _Stream] = {}
        self._loose: set[str] = set()
        self._failing_since_s: float | None = None

    def written(self, stream_id: str, journal: Journal) -> None:
        """There is a new event in the journal of a stream of ours."""
        if not self._dirty:
            self._wake.set()
        self._dirty[stream_id] = journal
        if self._loose and stream_id in self._loose:
            journal.publish(journal.written)

    def forget(self, stream_id: str) -> None:
        """The stream is deleted, or all that there will be of it is where it can be."""
        self._dirty.pop(stream_id, None)
        self._streams.pop(stream_id, None)
        self._loose.discard(stream_id)

    def finish(self) -> None:
        """Nothing more will be written: `run` returns when the store has everything."""
        self._is_closing = True
        self._wake.set()

    async def run(self) -> None:
        """Runs until it is cancelled, or has finished."""
        while not self._is_closing:
            await self._wake.wait()
            self._wake.clear()
            while self._dirty:
                started_s = self._clock()
                try:
                    await self._append()
                    self._failing_since_s = None
                except Exception as error:  # whatever it is, the events wait in their journals
                    if not isinstance(error, StoreUnavailable):
                        log_fault(error, "none")
                    self._failed(started_s)
                    await asyncio.sleep(RETRY_PAUSE_S)

    async def _append(self) -> None:
        await self._link.open(COMMAND_LIMIT_S)
        dirty = self._dirty
        try:
            command, sent = self._pack()
        except BaseException:
            self._dirty = dirty | self._dirty
            raise
        if not sent:
            return
        started_s = self._clock()
        try:
            bad = await self._link.send(command.packed(), COMMAND_LIMIT_S)
        except BaseException:  # nothing is known: it is all sent again, unless it was forgotten
            for each in sent:
                if self._streams.get(each.stream_id) is each.stream:
                    self._dirty.setdefault(each.stream_id, each.journal)
            raise
        self._metrics.store_append.observe(self._clock() - started_s)
        self._stored(sent, set(bad))

    def _pack(self) -> tuple[AppendCommand, list[_Sent]]:
        """What all journals have gained, within bounds; the rest stays dirty."""
        command, num_opened, room = AppendCommand(self._keep_ms), self._link.num_opened, MAX_EVENTS
        dirty, self._dirty = self._dirty, {}
        streams, sent = self._streams, []
        for stream_id, journal in dirty.items():
            stream = streams.get(stream_id)
            if stream is None:
                stream = streams[stream_id] = _Stream(stream_id)
            stored, first, num_templates = stream.stored, journal.first, len(journal.templates)
            if stream.is_lost or first > stored + 1:
                self._lose(stream_id, stream, journal)
                continue
            if room <= 0 or command.num_bytes >= MAX_BYTES:
                self._dirty[stream_id] = journal
                continue
            entries = journal.entries(stored)
            if not entries:
                continue
            if (
                len(entries) == 1
                and first == stream.first
                and num_templates == stream.num_templates
                and num_opened == stream.num_opened
                and not journal.has_end
            ):
                command.one(stream.key, stored + 1, entries[0])
            else:
                entries = entries[: _num_within(entries, room, MAX_BYTES - command.num_bytes)]
                self._pack_many(command, stream, journal, entries)
                if stored + len(entries) < journal.written:
                    self._dirty[stream_id] = journal
            room -= len(entries)
            sent.append(_Sent(stream_id, stream, journal, stored + len(entries), first, num_templates))
        return command, sent

    def _pack_many(
        self, command: AppendCommand, stream: _Stream, journal: Journal, entries: list[bytes]
    ) -> None:
        known = stream.num_templates
        command.many(
            stream.key,
            stream.stored + 1,
            entries,
            is_end=journal.has_end and stream.stored + len(entries) == journal.written,
            verify=stream.num_opened != self._link.num_opened,
            first=journal.first if journal.first != stream.first else None,
            templates=list(enumerate(journal.templates[known:], known + 1)),
        )

    def _stored(self, sent: list[_Sent], bad: set[int]) -> None:
        """The store has what was sent, but for the streams at these places, from 1."""
        num_opened, num_events = self._link.num_opened, 0
        for place, (stream_id, stream, journal, number, first, num_templates) in enumerate(sent, 1):
            if place in bad:
                self._lose(stream_id, stream, journal)
                continue
            num_events += number - stream.stored
            stream.stored, stream.first, stream.num_templates = number, first, num_templates
            stream.num_opened = num_opened
            _publish(journal, number)
            if journal.has_end and number == journal.written:
                self.forget(stream_id)
        self._metrics.store_events.inc(num_events)

    def _lose(self, stream_id: str, stream: _Stream, journal: Journal) -> None:
        """The store takes no more of this stream."""
        if self._streams.get(stream_id) is not stream:
            return
        if not stream.is_lost:
            stream.is_lost = True
            self._break(stream_id, journal, StoreUnavailable(LOST))
        if journal.has_end:
            self.forget(stream_id)

    def _break(self, stream_id: str, journal: Journal, error: HeadraceError) -> None:
        """Tell the owner, once. What it has told its readers then need not wait for the store any more."""
        if stream_id in self._loose:
            return
        self._loose.add(stream_id)
        try:
            self.broken(stream_id, error)
        except Exception as fault:  # one stream's, and the others' events wait
            log_fault(fault, "none")
        _publish(journal, journal.written)

    def _failed(self, started_s: float) -> None:
        if self._failing_since_s is None:
            self._failing_since_s = started_s
        if self._clock() - self._failing_since_s >= self._limit_s:
            for stream_id, journal in list(self._dirty.items()):
                self._break(stream_id, journal, StoreUnavailable())


def _publish(journal: Journal, number: int) -> None:
    try:
        journal.publish(number)
    except Exception as fault:  # a reader's, and the other streams' wait
        log_fault(fault, "none")


def _num_within(entries: list[bytes], max_events: int, max_bytes: int) -> int:
    """How many of the first entries are within both limits, at least one."""
    num_bytes = 0
    for place, entry in enumerate(entries[:max_events]):
        num_bytes += len(entry)
        if num_bytes > max_bytes:
            return max(1, place)
    return min(len(entries), max_events)


def _ignore(stream_id: str, error: HeadraceError) -> None:
    pass
