"""The order in which a step's tokens reach their sinks: first tokens at once, the others a moment later.

An event loop writes when it has called everyone who has something to read. So with 60 streams a first token
would leave behind the tokens of all others, 1 to 2 ms later. Here the others wait for the loop's next turn,
in which nothing is read before them: 0.1 ms. Workers put first tokens first in a frame
(`backend/link_server.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from backend.link import Delta, LinkError

MIN_LATER_DELTAS: Final = 8  # fewer are not worth another turn of the loop


class FirstTokens:
    """Between a link and its dispatch. `step` may raise `LinkError`; `broken` is told of a later one."""

    __slots__ = ("_broken", "_later", "_step")

    def __init__(
        self, step: Callable[[list[Delta], float], None], broken: Callable[[LinkError], None]
    ) -> None:
        self._step = step
        self._broken = broken
        self._later: tuple[list[Delta], float] | None = None

    def step(self, deltas: list[Delta], now_s: float) -> None:
        """A step that has come, after `catch_up`. Raises what the dispatch raises."""
        num_first = 0
        while num_first < len(deltas) and (extra := deltas[num_first].extra) is not None and extra.is_first:
            num_first += 1
        if not num_first or len(deltas) - num_first < MIN_LATER_DELTAS:
            self._step(deltas, now_s)
            return
        self._later = deltas[num_first:], now_s
        asyncio.get_running_loop().call_soon(self._caught_up)
        self._step(deltas[:num_first], now_s)

    def catch_up(self) -> None:
        """Hand on what waits, before anything else is. Raises what the dispatch raises."""
        if self._later is not None:
            (deltas, now_s), self._later = self._later, None
            self._step(deltas, now_s)

    def _caught_up(self) -> None:
        try:
            self.catch_up()
        except LinkError as error:
            self._broken(error)
