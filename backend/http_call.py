"""One request of the HTTP client from `send` to its end: its bytes, its time limit, sent again if it must be.

Not here: connections (`backend/http_connection.py`) and which of them it gets (`backend/http_client.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from backend.fault_log import log_fault
from backend.http_connection import HttpConnection
from backend.http_ports import Headers, HttpFault, HttpRequest, Origin, Receiver

# What a request says of its own framing and of its connection; a caller's are left out.
_OWN: Final = frozenset({b"host", b"content-length", b"connection", b"keep-alive", b"transfer-encoding"})
# Without a body they say no length.
_LENGTHLESS: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE", "TRACE"})
# To ask twice is to ask once (RFC 9110, 9.2.1).
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


class HttpTimeout(HttpFault):
    """The server was too slow to accept a connection, or to answer."""


class Call:
    """A request on its way; an `HttpCall` for who sent it, an `Exchange` for the connection.

    `on_stale` asks for a fresh connection. `head_s` bounds the time from the connection to the
    response's head. Raises `ValueError` for what cannot be written as HTTP.
    """

    __slots__ = (
        *("_body", "_connection", "_head", "_head_s", "_is_paused", "_is_safe", "_on_stale", "_timer"),
        *("is_bodiless", "is_over", "opening", "origin", "receiver"),
    )

    def __init__(
        self,
        origin: Origin,
        request: HttpRequest,
        receiver: Receiver,
        head_s: float | None,
        on_stale: Callable[[Call], None],
    ) -> None:
        self.origin = origin
        self.receiver = receiver
        self.is_bodiless = request.method == "HEAD"
        self._is_safe = request.method in _SAFE
        self.is_over = False
        self.opening: asyncio.Task[None] | None = None  # its connection
        self._head = head_of(origin, request)
        self._body = request.body
        self._head_s = head_s
        self._on_stale = on_stale
        self._connection: HttpConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False

    # -- who sent it -----------------------------------------------------------------------------------------

    def abort(self) -> None:
        if self.is_over:
            return
        connection = self._connection
        self._end()
        if self.opening is not None:
            self.opening.cancel()
        if connection is not None:
            connection.abort()

    def pause(self) -> None:
        self._is_paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._is_paused = False
        if self._connection is not None:
            self._connection.resume()

    # -- the client ------------------------------------------------------------------------------------------

    def start(self, connection: HttpConnection) -> None:
        """Go out on this connection."""
        self.opening = None
        self._connection = connection
        if not connection.is_usable:  # accepted and closed at once
            self.failed("closed the connection before its response", False)
            return
        connection.ask(self, self._head, self._body)
        if self._is_paused:
            connection.pause()
        if self._head_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._head_s, self._late, self._head_s)

    def fail(self, fault: HttpFault) -> None:
        """The end, whatever it has come to."""
        if not self.is_over:
            self.abort()
            self._tell(fault)

    # -- the connection --------------------------------------------------------------------------------------

    def begun(self, status: int, headers: Headers) -> None:
        self._stop_timer()
        self._head = self._body = b""  # long prompts, and streams live for minutes
        self.receiver.begun(status, headers)

    def ended(self) -> None:
        self._end()
        try:
            self.receiver.ended()
        except Exception as error:
            log_fault(error)
            name, kind = name_of(self.origin), type(error).__name__
            self._tell(HttpFault(f"{name} was let go: its response led to an error here, {kind}", True))

    def failed(self, message: str, began: bool, is_unread: bool = False) -> None:
        """Once only it is sent again: a fresh connection has served nothing, so it is not given up on."""
        connection = self._connection
        has_served = connection is not None and connection.num_ended > 0
        if not began and has_served and (is_unread or self._is_safe):
            self._connection = None
            self._stop_timer()
            self._on_stale(self)
            return
        self._end()
        self._tell(HttpFault(f"{name_of(self.origin)} {message}", began))

    def _tell(self, fault: HttpFault) -> None:
        try:
            self.receiver.failed(fault)
        except Exception as error:
            log_fault(error)

    def _late(self, head_s: float) -> None:
        began = self._connection is not None and self._connection.has_byte
        self.fail(HttpTimeout(f"{name_of(self.origin)} has not answered within {head_s:g} s", began))

    def _end(self) -> None:
        self.is_over = True
        self._connection = None
        self._head = self._body = b""
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def name_of(origin: Origin) -> str:
    """The server, for messages."""
    return origin.uds or origin.host_header.decode("ascii")


def head_of(origin: Origin, request: HttpRequest) -> bytes:
    """The request's head. Raises `ValueError` for a line break or a space where none may be."""
    lines = [f"{request.method} {request.target} HTTP/1.1".encode("ascii"), b"host: " + origin.host_header]
    if request.body or request.method not in _LENGTHLESS:
        lines.append(b"content-length: %d" % len(request.body))
    lines += [name + b": " + value for name, value in request.headers if name not in _OWN]
    head = b"\r\n".join(lines)
    if (
        lines[0].count(b" ") != 2
        or head.count(b"\n") != len(lines) - 1
        or head.count(b"\r") != len(lines) - 1
    ):
        raise ValueError(
            f"the {request.method[:20]!r} request has a line break in its head, or a space in its target"
        )
    return head + b"\r\n\r\n"
