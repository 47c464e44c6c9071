"""What an answer needs of whom it is for: a connection (`exchange.py`), or a stream that outlives its
connections (`detached.py`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from gateway.record import RequestRecord
from pipeline.errors import HeadraceError


class Asker(Protocol):
    """Who asks, while the prompt is being prepared."""

    @property
    def record(self) -> RequestRecord: ...

    async def unless_gone(self, work: Awaitable[Any]) -> Any:
        """The result of some work. Raises `ClientGone` if the client leaves, or what it is refused with."""


class Outgoing(Protocol):
    """Where an answer's bytes go, as those see it who watch over them."""

    closed: bool  # the last of them went out, or nobody takes them any more
    num_buffered: int  # bytes that wait for a slow client
    peak: int
    blocked_since_s: float | None  # monotonic; the client has not read since

    def drop(self) -> None:
        """Nobody takes them any more."""


class Client(Protocol):
    """Whom an answer is for. Hashable by identity."""

    record: RequestRecord
    on_gone: Callable[[str], None]  # told why, when it is gone

    @property
    def outlet(self) -> Outgoing: ...

    @property
    def read_timeout_s(self) -> float | None:
        """How long it waits for a byte, if it says so."""

    async def finished(self) -> None:
        """Returns when the response is complete or the client has gone, whichever is first."""

    def refuse(self, error: HeadraceError) -> None:
        """Wait no longer for what comes before the answer."""

    def close(self) -> None:
        """Cut the connection now."""
