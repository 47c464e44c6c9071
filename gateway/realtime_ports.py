"""What a WebSocket and the conversation on it need of each other. `gateway/realtime_socket.py` has the one
side, `gateway/realtime.py` the other; neither imports the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.outlet import nothing
from gateway.websocket_outlet import WebSocketOutlet
from pipeline.errors import HeadraceError

PATH: Final = "/v1/realtime"


@dataclass(frozen=True, slots=True)
class OpenedSocket:
    """A client that may have a conversation. It is accepted only after the talk with it was made.

    `abort()` ends the connection at once; `outlet.close()`, after what was sent. `rested()` is to be called
    when the last active response is over: a server that shuts down waits for nothing else.
    """

    outlet: WebSocketOutlet
    query: Mapping[str, str]
    key_id: str | None
    client: str | None  # its address, if it is logged
    abort: Callable[[], None]
    rested: Callable[[], None] = nothing


class Talk(Protocol):
    """One conversation, as its socket sees it. Every method returns at once."""

    @property
    def is_idle(self) -> bool:
        """No response is active."""

    @property
    def last_active_s(self) -> float:
        """Monotonic; when something was last said or answered."""

    def opened(self) -> None:
        """The client is accepted: it may be sent to."""

    def received(self, text: str) -> None:
        """One text message has come."""

    def refused(self, error: HeadraceError) -> None:
        """Tell the client of an error that is not one of its events'."""

    def lost(self, reason: str) -> None:
        """The connection is over, whoever ended it: stop everything. Called once, the last call of all."""


TalkFactory = Callable[[OpenedSocket], Talk]
"""Raises `HeadraceError` for a conversation that cannot be had, as with an unknown model."""
