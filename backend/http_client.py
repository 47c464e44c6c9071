"""The HTTP/1.1 client of upstream servers: requests with their whole bodies, responses as they come.

Here: kept-alive connections per origin, and which of them a request takes. One request is in
`backend/http_call.py`, what is on the wire in `backend/http_connection.py`. Nowhere: redirects (they are
responses like others), cookies, proxies, compression. `backend/upstream_server.py` knows which server to ask.

A server may close an idle connection while a request is on its way to it. Such a request is sent again, once,
on a fresh connection, if the server has received none of it (`backend/http_socket.py`); a safe one also where
that is not known (RFC 9112, 9.3.1). One that a server has read before it broke off is never sent again here:
it may be the request that breaks servers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from backend.fault_log import log_fault
from backend.http_call import Call, HttpTimeout, name_of
from backend.http_connection import HttpConnection
from backend.http_ports import Headers, HttpCall, HttpFault, HttpRequest, Origin, Receiver


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """`connect_s` is for a connection and its TLS handshake.

    `keep_alive_s` is less than the 5 s of uvicorn, which serves vLLM and SGLang: who closes first meets no
    race. `max_idle` is per origin.
    """

    connect_s: float = 5.0
    max_head_bytes: int = 64 << 10
    keep_alive_s: float = 4.0
    max_idle: int = 256


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response with its whole body. Names of headers are in lower case."""

    status: int
    headers: Headers
    body: bytes


_DEFAULT = HttpLimits()


class HttpClient:
    """One for a process and its event loop."""

    def __init__(self, limits: HttpLimits = _DEFAULT) -> None:
        self._limits = limits
        # Of each origin, the one that was free first comes first.
        self._idle: dict[Origin, list[HttpConnection]] = {}
        self._connections: set[HttpConnection] = set()
        self._opening: dict[Call, asyncio.Task[None]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] | None = None

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def num_idle(self) -> int:
        return sum(map(len, self._idle.values()))

    def send(
        self, origin: Origin, request: HttpRequest, receiver: Receiver, head_s: float | None = None
    ) -> HttpCall:
        """Start a request and return at once; whatever fails comes to the receiver, later.

        `head_s`: from the time when it has a connection to its response's head; then `HttpTimeout`.
        Raises `ValueError` for a request that cannot be written as HTTP, say with a line break in a header.
        """
        call = Call(origin, request, receiver, head_s, self._open_for)
        if (connection := self._take(origin)) is not None:
            call.start(connection)
        else:
            self._open_for(call)
        return call

    async def fetch(
        self, origin: Origin, request: HttpRequest, limit_s: float, max_bytes: int
    ) -> HttpResponse:
        """The whole response, of any status. Raises `HttpFault`, `HttpTimeout` after `limit_s`."""
        whole = _Whole(origin, max_bytes)
        call = self.send(origin, request, whole)
        timer = asyncio.get_running_loop().call_later(limit_s, whole.late, limit_s)
        try:
            return await whole.response
        finally:
            timer.cancel()
            call.abort()

    async def close(self) -> None:
        """Close all connections; calls under way fail. Returns when the last one is closed."""
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_future()
            if self._sweeping is not None:
                self._sweeping.cancel()
            for call in list(self._opening):
                call.fail(HttpFault("the HTTP client is closed"))
            for connection in list(self._connections):
                connection.cut("was let go: the HTTP client is closed")
            self._idle.clear()
            self._check_closed()
        await asyncio.shield(self._closed)

    # -- connections (`http_connection.Owner`) ---------------------------------------------------------------

    def freed(self, connection: HttpConnection) -> None:
        idle = self._idle.setdefault(connection.origin, [])
        if len(idle) >= self._limits.max_idle or self._closed is not None:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.freed_s = loop.time()
        idle.append(connection)
        if self._sweeping is None:
            self._sweeping = loop.call_later(self._limits.keep_alive_s, self._sweep)

    def lost(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        idle = self._idle.get(connection.origin, [])
        if connection in idle:
            idle.remove(connection)
        self._check_closed()

    def _check_closed(self) -> None:
        if self._closed is not None and not self._closed.done() and not (self._connections or self._opening):
            self._closed.set_result(None)

    def _take(self, origin: Origin) -> HttpConnection | None:
        """The connection that was free last: its server is the least likely to have given up on it."""
        idle = self._idle.get(origin)
        if not idle:
            return None
        oldest_s = asyncio.get_running_loop().time() - self._limits.keep_alive_s
        while idle:
            connection = idle.pop()
            is_young = connection.freed_s > oldest_s
            if is_young and connection.is_usable and not connection.delivery.has_input():
                return connection
            connection.close()
        return None

    def _sweep(self) -> None:
        """Close what was idle for too long."""
        loop = asyncio.get_running_loop()
        oldest_s, self._sweeping = loop.time() - self._limits.keep_alive_s, None
        for origin, idle in list(self._idle.items()):
            old = [connection for connection in idle if connection.freed_s <= oldest_s]
            del idle[: len(old)]
            for connection in old:
                connection.close()
            if not idle:
                del self._idle[origin]
        if self._idle:
            first_s = min(idle[0].freed_s for idle in self._idle.values())
            self._sweeping = loop.call_at(first_s + self._limits.keep_alive_s, self._sweep)

    def _open_for(self, call: Call) -> None:
        loop = asyncio.get_running_loop()
        if self._closed is not None:
            loop.call_soon(call.fail, HttpFault("the HTTP client is closed"))
            return
        task = self._opening[call] = call.opening = loop.create_task(self._open(call))
        task.add_done_callback(lambda task: self._was_opened(call, task))

    def _was_opened(self, call: Call, task: asyncio.Task[None]) -> None:
        self._opening.pop(call, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # ours: the call must not wait for ever
            log_fault(error)
            call.fail(HttpFault(f"no connection to {name_of(call.origin)}: {type(error).__name__} here"))
        self._check_closed()

    async def _open(self, call: Call) -> None:
        try:
            async with asyncio.timeout(self._limits.connect_s):
                connection = await self._connect(call.origin)
        except TimeoutError:
            limit = f"within connect_s, {self._limits.connect_s:g} s"
            told = f"{name_of(call.origin)} did not accept a connection {limit}"
            fault: HttpFault = HttpTimeout(told, is_unreachable=True)
        except (OSError, ValueError) as error:  # a ValueError for what is no host name
            fault = HttpFault(f"no connection to {name_of(call.origin)}: {error}", is_unreachable=True)
        else:
            # Not in `connection_made`: uvloop calls that, but no `connection_lost`, for what is cancelled.
            if connection.is_usable:
                self._connections.add(connection)
            call.start(connection)
            return
        call.opening = None
        call.fail(fault)

    async def _connect(self, origin: Origin) -> HttpConnection:
        loop = asyncio.get_running_loop()
        name = origin.host if origin.tls is not None else None

        def connection() -> HttpConnection:
            return HttpConnection(self, origin, self._limits.max_head_bytes)

        if origin.uds is not None:
            _, made = await loop.create_unix_connection(
                connection, origin.uds, ssl=origin.tls, server_hostname=name
            )
        else:
            _, made = await loop.create_connection(
                connection, origin.host, origin.port, ssl=origin.tls, server_hostname=name
            )
        return made


class _Whole:
    """Receives a response for `fetch`."""

    def __init__(self, origin: Origin, max_bytes: int) -> None:
        self.response: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        self._origin = origin
        self._max_bytes = max_bytes
        self._status = 0
        self._headers: Headers = ()
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def begun(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers

    def data(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes <= self._max_bytes:
            self._parts.append(data)
        else:
            self.failed(
                HttpFault(
                    f"{name_of(self._origin)} sent a body of {self._max_bytes + 1} bytes or more; "
                    f"the limit is {self._max_bytes}",
                    True,
                )
            )

    def ended(self) -> None:
        if not self.response.done():
            self.response.set_result(HttpResponse(self._status, self._headers, b"".join(self._parts)))

    def late(self, limit_s: float) -> None:
        name = name_of(self._origin)
        self.failed(HttpTimeout(f"{name} has not answered in full within {limit_s:g} s", bool(self._status)))

    def failed(self, fault: HttpFault) -> None:
        if not self.response.done():
            self.response.set_exception(fault)
