"""What one read of a socket has brought, handed on in slices, with a moment between them.

A read holds up to 256 KiB of events. Each may be several times as long on its way out, and within one turn of
the event loop no transport writes more than its socket takes at once: a client that reads as fast as it can
would look like one that does not read. Between slices the loop writes and serves the others, and the client
may run, if it is on the same busy machine. Not here: what the bytes mean (`backend/upstream_answer.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from backend.http_ports import HttpCall

SLICE_BYTES: Final = 16 << 10  # a hundred events of one token each
# No model makes so much text in this time; a server that had saved it up is read at 16 MB/s.
GAP_S: Final = 0.001


class Slices:
    """Between a call and the one that takes its body. The call is paused while something waits.

    Everything comes in order: what `add` gave, then the end. `take` and the end raise nothing; `take`
    may `drop` the rest.
    """

    __slots__ = ("_at", "_call", "_end", "_is_paused", "_take", "_turn", "_waiting")

    def __init__(self, call: HttpCall, take: Callable[[bytes], None]) -> None:
        self._call = call
        self._take = take
        self._waiting: deque[bytes] = deque()
        self._at = 0  # where the next slice of the first one begins
        self._end: Callable[[], None] | None = None
        self._turn: asyncio.TimerHandle | None = None
        self._is_paused = False

    def add(self, data: bytes) -> None:
        """Its first slice is taken at once, if nothing waits."""
        self._waiting.append(data)
        if self._turn is None:
            self._next()

    def end(self, tell: Callable[[], None]) -> None:
        """The response is over: call this after the last slice."""
        self._end = tell
        if self._turn is None:
            self._next()

    def drop(self) -> None:
        """What waits is not wanted, nor is the end."""
        self._waiting.clear()
        self._at, self._end = 0, None
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def _next(self) -> None:
        self._turn = None
        if self._waiting:
            piece = self._slice()
            if self._waiting:  # before it is taken: that may drop the rest
                self._pause()
                self._turn = asyncio.get_running_loop().call_later(GAP_S, self._next)
            self._take(piece)
        if self._turn is None:
            self._resume()
            end, self._end = self._end, None
            if end is not None:
                end()

    def _slice(self) -> bytes:
        data, at = self._waiting[0], self._at
        self._at = at + SLICE_BYTES
        if self._at >= len(data):
            self._waiting.popleft()
            self._at = 0
        return data[at : at + SLICE_BYTES]

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._call.pause()

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._call.resume()
