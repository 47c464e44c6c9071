"""The copies of other processes' streams, and what must be done for them besides reading.

    shown     while it is followed, and for the grace period after, a key tells the owner that it is read
    silent    nothing has come for 3 s: is the owner's lease still there, and the stream itself?
    orphan    it has no owner. It is ended in the store, once for all of its followers, who read that there
    lost      the store does not have it any more, or is away for too long: the copy is of no use

Not here: how events get into a copy (`gateway/store_follower.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from backend.fault_log import log_fault
from gateway.journal import Journal, whole_entry
from gateway.journal_writer import failed_event
from gateway.store_link import COMMAND_LIMIT_S, RETRY_PAUSE_S, Command, StoreLink
from gateway.store_script import AppendCommand, bulk, inbox_key, lease_key, meta_key, reader_key, stream_key
from pipeline.errors import HeadraceError
from pipeline.stream_errors import GatewayLost, StoreUnavailable, UnknownStream

SILENCE_S: Final = 3.0  # more than an owner takes to renew its lease after the store was away
TEND_S: Final = 1.0
MIN_TEND_S: Final = 0.05  # however short the grace period is
INBOX_KEPT_MS: Final = 60_000
MAX_INBOX: Final = 1024
BELL: Final = b"bell"
CANCEL: Final = b"cancel"
FORGET: Final = b"forget"
Lost = Callable[[str, HeadraceError], None]


class Copy:
    """One followed stream."""

    __slots__ = ("heard_s", "is_orphan", "journal", "key", "owner", "position", "stream_id")

    def __init__(self, stream_id: str, owner: str, journal: Journal, now_s: float) -> None:
        self.stream_id = stream_id
        self.key = stream_key(stream_id).encode()
        self.owner = owner
        self.journal = journal
        self.position = b"0-0"  # of the last entry that was read
        self.heard_s = now_s  # of the last entry, or of the store's return
        self.is_orphan = False  # the last look found no lease


def message(inbox: str, name: bytes, value: str) -> list[Command]:
    """Commands that put a message into a process's inbox."""
    return [
        ("XADD", inbox, "MAXLEN", MAX_INBOX, "*", name, value),
        ("PEXPIRE", inbox, INBOX_KEPT_MS),
    ]


class CopyCare:
    """Looks after copies. `asking`: a connection with the script, that others use, too.

    `lost(stream, error)` is told of a copy that gets nothing more.
    """

    def __init__(
        self,
        asking: StoreLink,
        owner: str,
        grace_s: float,
        keep_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.copies: dict[bytes, Copy] = {}  # by key
        self.lost: Lost = _ignore
        self._asking = asking
        self._inbox = inbox_key(owner)
        self._grace_s = grace_s
        self._keep_ms = max(1, round(keep_s * 1000))
        self._clock = clock
        self._wake = asyncio.Event()
        self._must_ring = False
        self._to_show: set[str] = set()  # streams whose reader's key must be set now
        self._shown_s = clock()  # when all were

    def show(self, stream_id: str) -> None:
        """The grace period of the stream begins anew."""
        self._to_show.add(stream_id)
        self._wake.set()

    def ring(self) -> None:
        """End the wait of this process's reading connection."""
        self._must_ring = True
        self._wake.set()

    def lose(self, copy: Copy, error: HeadraceError) -> None:
        """It gets nothing more from here, whatever the store has."""
        if self.copies.pop(copy.key, None) is copy:
            try:
                self.lost(copy.stream_id, error)
            except Exception as fault:  # a reader's, and the other copies wait
                log_fault(fault, "none")

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(TEND_S, max(self._grace_s / 4, MIN_TEND_S))):
                    await self._wake.wait()
            self._wake.clear()
            for work in (self._tell, self._look):  # a store without memory refuses the first alone
                try:
                    await work()
                except Exception as error:
                    if not isinstance(error, StoreUnavailable):
                        log_fault(error, "none")
                    await asyncio.sleep(RETRY_PAUSE_S)

    async def _tell(self) -> None:
        """Show what is read here, and ring."""
        now_s, shown, rings = self._clock(), self._to_show, self._must_ring
        is_all = now_s - self._shown_s >= self._grace_s / 4
        if is_all:
            shown = shown | {copy.stream_id for copy in self.copies.values()}
        grace_ms = max(1, round(self._grace_s * 1000))
        commands: list[Command] = [("SET", reader_key(each), "1", "PX", grace_ms) for each in shown]
        if rings:
            commands += message(self._inbox, BELL, "")
        self._to_show, self._must_ring = set(), False
        if commands:
            try:
                await self._asking.ask(commands, COMMAND_LIMIT_S)
            except StoreUnavailable:  # by then, readers of ours may have come and gone
                self._to_show |= shown
                self._must_ring = self._must_ring or rings
                raise
        if is_all:
            self._shown_s = now_s

    async def _look(self) -> None:
        """Whether the silent ones can still be expected to speak."""
        now_s = self._clock()
        silent = [copy for copy in self.copies.values() if now_s - copy.heard_s > SILENCE_S]
        if not silent:
            return
        commands = [("EXISTS", lease_key(copy.owner)) for copy in silent]
        commands += [("EXISTS", meta_key(copy.stream_id)) for copy in silent]
        replies = await self._asking.ask(commands, COMMAND_LIMIT_S)
        for copy, has_lease, has_meta in zip(
            silent, replies[: len(silent)], replies[len(silent) :], strict=True
        ):
            if self.copies.get(copy.key) is not copy or now_s - copy.heard_s <= SILENCE_S:
                continue
            if not has_meta:
                self.lose(copy, UnknownStream())
            elif has_lease:
                copy.is_orphan = False
            elif copy.is_orphan:  # twice in a row: it was no store that has just come back
                await self._end(copy)
            else:
                copy.is_orphan = True

    async def _end(self, copy: Copy) -> None:
        """If the store does not take it, it may have no memory: ours must not wait until it has."""
        try:
            await self._end_in_store(copy)
        except StoreUnavailable:
            self.lose(copy, GatewayLost())
            raise

    async def _end_in_store(self, copy: Copy) -> None:
        """In the owner's place, after what it has written last. Somebody else may be quicker."""
        command = AppendCommand(self._keep_ms)
        entry = whole_entry(failed_event(GatewayLost()))
        key = bulk(copy.key)
        command.many(key, copy.journal.written + 1, [entry], is_end=True, verify=True)
        await self._asking.send(command.packed(), COMMAND_LIMIT_S)


def _ignore(stream_id: str, error: HeadraceError) -> None:
    pass
