"""Streams of other processes, read from the shared store into copies while somebody reads them here.

One connection waits for all of them and for this process's inbox, in one blocking XREAD. The inbox is the
doorbell, too: it is rung for a new stream to follow, to end the wait for the others. Between two reads is a
pause of 2 ms, in which gathers what other processes write at odd times.

Not here: the owner that is lost, and who is told that a stream is read (`gateway/store_copies.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from backend.fault_log import log_fault
from gateway.journal import Journal
from gateway.store_copies import CANCEL, FORGET, Copy, CopyCare
from gateway.store_link import COMMAND_LIMIT_S, RETRY_PAUSE_S, StoreLink
from gateway.store_script import BORN_ID, END_FIELD, bulk, inbox_key, meta_key, stream_key, templates_of
from pipeline.stream_errors import StoreUnavailable, UnknownStream

BATCH_PAUSE_S: Final = 0.002
BLOCK_S: Final = 1.0
MAX_EVENTS: Final = 16_384  # in one reply
MAX_STREAM_EVENTS: Final = 512  # of one stream

Entry = tuple[bytes, Sequence[bytes]]  # its id; field and value


class StoreFollower:
    """`reading` is a connection for it alone, `asking` one that others use, too.

    `cancel_asked(stream)`: another process wants one of ours to end. `forget_asked(stream)`: it has deleted
    one of ours that had ended. All copies are lost when the store is away for `limit_s`.
    """

    def __init__(
        self,
        reading: StoreLink,
        asking: StoreLink,
        care: CopyCare,
        owner: str,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cancel_asked: Callable[[str], None] = _ignore
        self.forget_asked: Callable[[str], None] = _ignore
        self._reading = reading
        self._asking = asking
        self._care = care
        self._copies = care.copies
        self._inbox = inbox_key(owner).encode()
        self._inbox_position = b"0-0"
        self._limit_s = limit_s
        self._clock = clock
        self._is_waiting = False  # in a read, which knows nothing of newer copies
        self._packed: tuple[list[bytes], bytes] = ([], b"")  # keys, and a read's beginning that names them
        self._down_since_s: float | None = None

    def follow(self, stream_id: str, owner: str, journal: Journal) -> None:
        """Fill the journal, from the beginning of the stream."""
        copy = Copy(stream_id, owner, journal, self._clock())
        self._copies[copy.key] = copy
        self._care.show(stream_id)
        if self._is_waiting:
            self._care.ring()

    def unfollow(self, stream_id: str) -> None:
        """It is not read here any more."""
        if self._copies.pop(stream_key(stream_id).encode(), None) is not None:
            self._care.show(stream_id)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            started_s = self._clock()
            try:
                is_full = await self._read()
            except Exception as error:
                if not isinstance(error, StoreUnavailable):
                    log_fault(error, "none")
                self._failed(started_s)
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                if not is_full:
                    await asyncio.sleep(BATCH_PAUSE_S)

    async def _read(self) -> bool:
        """One read; whether there is surely more."""
        if self._down_since_s is not None:
            await self._reading.open(COMMAND_LIMIT_S)
            self._begin_anew()
        asked, max_events = self._copies.copy(), self._max_events()
        packed = self._packed_read(max_events)
        self._is_waiting = True
        try:
            reply = await self._reading.send(packed, BLOCK_S + COMMAND_LIMIT_S)
        finally:
            self._is_waiting = False
        self._down_since_s = None
        is_full = False
        for key, entries in reply or ():
            copy = asked.get(key)
            if copy is not None:
                left = self._take(copy, entries)
                while left:
                    await self._fetch_templates(copy)
                    left = self._take(copy, left)
                is_full = is_full or len(entries) == max_events
            elif key == self._inbox:
                self._take_inbox(entries)
        return is_full

    def _max_events(self) -> int:
        """Of one stream, so that one reply is bounded."""
        return min(MAX_STREAM_EVENTS, max(16, MAX_EVENTS // (len(self._copies) + 1)))

    def _packed_read(self, max_events: int) -> bytes:
        """The command. Its beginning is the same until the copies are others."""
        copies, (packed_keys, beginning) = self._copies, self._packed
        keys = list(copies)
        if keys != packed_keys or not beginning:
            options = (b"COUNT", b"%d" % max_events, b"BLOCK", b"%d" % (BLOCK_S * 1000), b"STREAMS")
            words = [b"XREAD", *options, *keys, self._inbox]
            beginning = b"*%d\r\n%b" % (len(words) + len(keys) + 1, b"".join(map(bulk, words)))
            self._packed = keys, beginning
        positions = [copy.position for copy in copies.values()]
        parts = [b"$%d\r\n%b\r\n" % (len(position), position) for position in positions]
        return b"".join([beginning, *parts, bulk(self._inbox_position)])

    def _take(self, copy: Copy, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Put entries into a copy, up to one whose template it lacks; those that are left.

        What can be no whole stream of ours ends the copy.
        """
        if self._copies.get(copy.key) is not copy:  # not followed any more, or anew
            return ()
        copy.heard_s, copy.is_orphan = self._clock(), False
        journal = copy.journal
        try:
            num_put = _put(copy, entries)
        except Exception as error:
            log_fault(error, "none")
            journal.publish(journal.written)
            self._care.lose(copy, UnknownStream())
            return ()
        journal.publish(journal.written)
        if journal.has_end:
            del self._copies[copy.key]
            return ()
        return entries[num_put:] if num_put < len(entries) else ()

    async def _fetch_templates(self, copy: Copy) -> None:
        """The store has those of all entries that it has. Without, the copy ends."""
        (fields,) = await self._asking.ask([("HGETALL", meta_key(copy.stream_id))], COMMAND_LIMIT_S)
        if self._copies.get(copy.key) is not copy:
            return
        if not fields:  # it has just been deleted
            self._care.lose(copy, UnknownStream())
            return
        templates = copy.journal.templates
        known = len(templates)
        try:
            found = templates_of(fields)
            while (parts := found.get(len(templates) + 1)) is not None:
                templates.append(parts)
            if len(templates) == known:
                raise LookupError("a template is missing")
        except Exception as error:
            log_fault(error, "none")
            self._care.lose(copy, UnknownStream())

    def _take_inbox(self, entries: Sequence[Entry]) -> None:
        for entry_id, fields in entries:
            self._inbox_position = entry_id
            name, value = fields[:2]
            try:
                if name == CANCEL:
                    self.cancel_asked(value.decode())
                elif name == FORGET:
                    self.forget_asked(value.decode())
            except Exception as error:
                log_fault(error, "none")

    def _failed(self, started_s: float) -> None:
        self._inbox_position = b"0-0"  # that of another server may be of no use; it is read again
        if self._down_since_s is None:
            self._down_since_s = started_s
        if self._clock() - self._down_since_s >= self._limit_s:
            for copy in list(self._copies.values()):
                self._care.lose(copy, StoreUnavailable())

    def _begin_anew(self) -> None:
        """While the store was away, nobody's silence counts, nor a lease that could not be renewed."""
        for copy in self._copies.values():
            copy.heard_s, copy.is_orphan = self._clock(), False


def _put(copy: Copy, entries: Sequence[Entry]) -> int:
    """Put entries into the copy, up to one whose template it lacks; how many.

    Raises anything for what is no stream.
    """
    journal, start = copy.journal, 0
    if entries[0][0] == BORN_ID:
        copy.position, start = BORN_ID, 1
        if len(entries) == 1:
            return 1
    number, num_templates = int(entries[start][0][:-2]), len(journal.templates)
    last = number if len(entries) == 1 else int(entries[-1][0][:-2])
    if last - number != len(entries) - start - 1 or (journal.written and number != journal.written + 1):
        raise LookupError("events are missing")
    num_put = 0
    for entry_id, (field, entry) in entries[start:] if start else entries:
        if entry[0] > num_templates:
            break
        journal.restore(number + num_put, entry, field == END_FIELD)
        copy.position = entry_id
        num_put += 1
    return start + num_put


def _ignore(stream_id: str) -> None:
    pass
