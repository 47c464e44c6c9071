"""One reader of a resumable stream: what its journal has after a number, and on to the end.

    quick        each event leaves in the call that publishes it
    lagging      the client does not take what was sent: nothing more is, since the journal has it
    catching up  a slice in each turn of the event loop, so that a long replay holds up nobody else
    ended        the last event was sent; or what comes next is no longer kept, or this reader alone has
                 failed: then an event without a number says why
    sent away    what comes next may be had later, or through another process: no event, so that the client
                 comes back with its own id

Not here: who may read (`gateway/stream_routes.py`), and the response's head (`gateway/stream_events.py`).
"""

from __future__ import annotations

import asyncio
from typing import Final

from backend.fault_log import log_fault
from gateway.answer import COMPLETE, AnswerLimits
from gateway.error_body import how_it_ended
from gateway.frames import PING
from gateway.journal import Journal
from gateway.journal_writer import failed_event
from gateway.outlet import Outlet, nothing, why_too_slow
from pipeline.errors import ClientGone, Draining, HeadraceError
from pipeline.stream_errors import EventsExpired, StoreUnavailable

# No blank line: it would make the client forget its id.
LATER: Final = b"retry: 3000\n"
RETRY: Final = b"retry: 1000\n\n"  # milliseconds until EventSource comes back
SLICE_BYTES: Final = 64 << 10  # what waits for a client that is slow


class StreamReader:
    """`gateway.journal.Follower` that feeds one response. `after`: number of the last event its client has.

    `ended`: "" until it has; then complete, or the code of what ended it.
    """

    __slots__ = (
        "_after",
        "_journal",
        "_limits",
        "_next",
        "_outlet",
        "_seen",
        "_sent_s",
        "detail",
        "ended",
        "num_bytes",
        "peak_lag",
        "position",
    )

    def __init__(
        self, outlet: Outlet, journal: Journal, after: int, limits: AnswerLimits, now_s: float
    ) -> None:
        self._outlet = outlet
        self._journal = journal
        self._limits = limits
        self._after = after
        self._seen = after  # position at the last look
        self._sent_s = now_s  # when something is known to have been sent
        self._next: asyncio.Handle | None = None  # of the next slice
        self.position = after  # number of the last event that was sent
        self.num_bytes = 0  # of the events that were sent
        self.peak_lag = 0  # events that were there while the client did not read
        self.ended = ""
        self.detail = ""

    @property
    def num_events(self) -> int:
        """Events that were sent."""
        return self.position - self._after

    def start(self) -> None:
        """Send what is there, and from now on each event as it comes. The head has gone out before."""
        self._outlet.push(_opening(self.position))
        self._outlet.on_flushed = self.advance
        self._journal.followers.add(self)
        self.advance()

    def advance(self) -> None:
        """Send what is new, as far as the client takes it. Never raises to who publishes."""
        outlet, journal, position = self._outlet, self._journal, self.position
        if outlet.blocked_since_s is not None or outlet.closed:
            self.peak_lag = max(self.peak_lag, journal.last - position)
            return
        if position + 1 < journal.first:
            self.fail(EventsExpired(position, journal.first))
            return
        try:
            events, self.position = journal.wire(position, SLICE_BYTES)
        except Exception as error:  # a journal at fault must not stop the answers and readers beside it
            log_fault(error)
            self.fail(error)
            return
        self.num_bytes += len(events)
        if journal.has_end and journal.is_over and self.position >= journal.last:
            outlet.end(events)
            self._end(COMPLETE)
        elif events:
            outlet.push(events)
            if self.position < journal.last and self._next is None:
                self._next = asyncio.get_running_loop().call_soon(self._catch_up)

    def look(self, now_s: float) -> str | None:
        """Send a heartbeat if it is time for one. Why the client must be dropped, or None; ask after the end,
        too, while the last bytes wait."""
        blocked_since_s = self._outlet.blocked_since_s
        if self.position != self._seen:
            self._seen, self._sent_s = self.position, now_s
        elif blocked_since_s is None and now_s - self._sent_s >= self._limits.heartbeat_s:
            self._sent_s = now_s
            self._outlet.push(PING)
        return why_too_slow(blocked_since_s, now_s, self._limits.slow_reader_s)

    def fail(self, error: BaseException, is_final: bool = False) -> None:
        """End with an event that has no number: what has happened is not the stream's. Or without one."""
        if not self.ended:
            self._outlet.end(farewell(error, is_final))
            self._end(*how_it_ended(error))

    def leave(self, error: HeadraceError) -> None:
        """The server stops. What has been written to the end still comes."""
        if not self._journal.has_end:
            self.fail(error)

    def close(self, reason: str) -> None:
        """The client is gone, maybe with the last bytes on their way. The outlet is the caller's to drop."""
        if self.ended in ("", COMPLETE):
            self._end(ClientGone.code or "", reason)

    def _catch_up(self) -> None:
        self._next = None
        self.advance()

    def _end(self, ended: str, detail: str = "") -> None:
        self.ended, self.detail = ended, detail
        self._journal.followers.discard(self)
        self._outlet.on_flushed = nothing
        if self._next is not None:
            self._next.cancel()
            self._next = None


def _opening(after: int) -> bytes:
    """By the standard a blank line sets the client's id to the last one of this connection, which it forgets
    when there is none yet: a connection that broke before its first event would lose the place."""
    return RETRY if not after else b"retry: 1000\nid: %d\n\n" % after


def farewell(error: BaseException, is_final: bool = False) -> bytes:
    """What a reader is told that gets nothing more: why, or to come back, unless that is of no use.

    The store may be back then, or another process answer.
    """
    is_passing = isinstance(error, StoreUnavailable | Draining) and not is_final
    return LATER if is_passing else failed_frame(error)


def failed_frame(error: BaseException) -> bytes:
    """An event of no stream. EventSource comes back once more with its id, and is then told to stop."""
    return b"id: failed\n" + failed_event(error)
