"""What one connection says to the request that is on it, and to who has opened it.

The connection is `backend/http_connection.py`; the request is `backend/http_call.py`, and the owner of all
connections `backend/http_client.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from backend.http_ports import Headers, Receiver

if TYPE_CHECKING:
    from backend.http_connection import HttpConnection


class Exchange(Protocol):
    """A request on a connection. One of `ended` and `failed` is called at last, unless it lets go before."""

    receiver: Receiver
    is_bodiless: bool  # no body follows the response's head, whatever that says: HEAD

    def begun(self, status: int, headers: Headers) -> None: ...

    def ended(self) -> None: ...

    def failed(self, message: str, began: bool, is_unread: bool = False) -> None:
        """`message` is what the server did. `began`: some byte of the response had come.

        `is_unread`: the connection had served before, and none of the request came to the server.
        """


class Owner(Protocol):
    """Who opened the connection."""

    def freed(self, connection: HttpConnection) -> None:
        """It can take the next request."""

    def lost(self, connection: HttpConnection) -> None: ...
