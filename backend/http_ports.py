"""What the HTTP client and those that use it say to each other: requests, receivers, calls, and what fails.

Callbacks on the event loop, as in `pipeline/ports.py`: a task for each of a thousand streams costs more than
their tokens. Not here: sockets (`backend/http_client.py`), server-sent events (`backend/sse_reader.py`).
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Headers = Sequence[tuple[bytes, bytes]]  # names in lower case


@dataclass(frozen=True, slots=True)
class Origin:
    """Where requests go. `tls`: None for plain HTTP. `host_header` is what the server is told."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    uds: str | None = None  # a Unix socket instead of host and port

    @property
    def host_header(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 80 if self.tls is None else 443
        return (host if self.port == default else f"{host}:{self.port}").encode("ascii")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request with its whole body. `host`, `content-length` and `connection` are the client's own."""

    method: str
    target: str  # path and query
    headers: Headers = ()
    body: bytes = b""


class HttpFault(Exception):
    """The exchange broke.

    `began`: some byte of the response had come, so that the server has acted. `is_unreachable`: no connection
    came about, so that the server is gone, or the way to it; else it is this one exchange that broke.
    """

    def __init__(self, message: str, began: bool = False, is_unreachable: bool = False) -> None:
        super().__init__(message)
        self.began = began
        self.is_unreachable = is_unreachable


class Receiver(Protocol):
    """Takes one response, in order: `begun`, then `data` any number of times, then `ended`; or `failed`.

    Never called from inside `HttpClient.send`, nor after `HttpCall.abort`, `ended` or `failed`. What it
    raises is logged without its message and fails the call: then `failed` comes, once, also after an `ended`
    that has raised.
    """

    def begun(self, status: int, headers: Headers) -> None: ...

    def data(self, data: bytes) -> None:
        """Body bytes as one read of the socket gave them, without the transfer coding."""

    def ended(self) -> None:
        """The body is complete by its length or its last chunk."""

    def failed(self, fault: HttpFault) -> None: ...


class HttpCall(Protocol):
    """A request on its way."""

    def abort(self) -> None:
        """Close its connection; idempotent. The receiver is not called again."""

    def pause(self) -> None:
        """Read no more from the socket until `resume`: the receiver's own reader is slow."""

    def resume(self) -> None: ...
