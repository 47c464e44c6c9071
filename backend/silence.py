"""Notices that a peer has gone silent. One timer per connection, not one per message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

MAX_GRACE_S: Final = 1.0


class Silence:
    """Calls `too_long(limit_s)` once when nothing was heard for the limit.

    Our own process may have been the one that stood still (suspended, or a blocked loop): what has arrived
    meanwhile is read first, since the last look comes a moment after the limit.
    """

    def __init__(self, too_long: Callable[[float], None]) -> None:
        self._too_long = too_long
        self._loop = asyncio.get_running_loop()
        self._limit_s = 0.0
        self._heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, limit_s: float) -> None:
        """Begin to watch, or go on with another limit."""
        self.stop()
        self._limit_s = limit_s
        self.broken()
        self._look()

    def broken(self) -> None:
        """Something was heard."""
        self._heard_s = self._loop.time()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        left_s = self._heard_s + self._limit_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            grace_s = min(MAX_GRACE_S, self._limit_s / 4)
            self._timer = self._loop.call_later(grace_s, self._look_again, self._heard_s)

    def _look_again(self, heard_s: float) -> None:
        if self._heard_s != heard_s:
            self._look()
        else:
            self._too_long(self._limit_s)
