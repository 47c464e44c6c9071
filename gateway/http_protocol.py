"""uvicorn's httptools protocol with the bounds that it lacks: on header bytes, on the time to send them,
and on what follows an early answer. Answers in our own error shape what never becomes a request, a malformed
offer of a WebSocket among them; a good one goes on in `gateway/websocket_protocol.py`.

Without a bound a 100 MB header kept the parser busy for 8 s. h11 has one, but costs several times the CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from websockets.datastructures import Headers
from websockets.http11 import Request

from gateway.direct_body import DirectFlow
from gateway.error_body import error_response
from gateway.exchange import ABORT_EXTENSION
from gateway.websocket_handshake import UPGRADE_HEADERS, UpgradeRequired
from gateway.websocket_protocol import WebSocketProtocol
from pipeline.errors import HeadersTooLarge, HeadraceError, InvalidRequest

# Closing a socket with unread input resets the connection, and the reset can overtake the answer. So the
# rest of the input is read and dropped for a while (RFC 9112, section 9.6).
LINGER_S: Final = 2.0
_FRAMING: Final = (b"content-length", b"transfer-encoding")


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration, and what `HttpProtocol` needs."""

    def __init__(self, app: Any, *, max_header_bytes: int, header_limit_s: float, **options: Any) -> None:
        super().__init__(app, http=HttpProtocol, **{"ws": WebSocketProtocol, **options})
        self.max_header_bytes = max_header_bytes
        self.header_limit_s = header_limit_s


class HeadersTooSlow(InvalidRequest):
    """The client did not finish its headers in time."""

    status_hint = 408
    code = "headers_too_slow"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The request headers took longer than {limit_s:g} s.", code=self.code)


class HttpProtocol(HttpToolsProtocol):
    """One HTTP connection.

    Input counts as `unsettled` until the parser has made headers, body or the end of a message of it. More
    of it than the limit is a request line, headers or trailers (or chunk extensions) that are too long or
    never end.
    """

    def __init__(self, config: HttpConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._max_header_bytes = config.max_header_bytes
        self._header_limit_s = config.header_limit_s
        self._chunk_bytes = 0
        self._unsettled_bytes = 0
        self._settled = False
        self._skips_head = False
        self._in_head = False
        self._in_message = False  # head or body
        self._cycles: list[RequestResponseCycle] = []  # the one that runs, and those pipelined behind it
        self._closing = False  # no more input is parsed
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: DirectFlow = DirectFlow(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells the newest cycle alone: the running one would not know of it."""
        self._stop_timer()
        self.flow.stop()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._chunk_bytes = len(data)
        self._settled = False
        self._unset_keepalive_if_required()
        if self._feed(data):
            self._check_progress(len(data))

    def _feed(self, data: bytes) -> bool:
        """Whether the connection is still ours afterwards, and speaks HTTP."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError:
                self._refuse_malformed()
                return False
            except httptools.HttpParserUpgrade as upgrade:
                if self._closing:
                    return False
                if self._should_upgrade():
                    self._upgrade(data[upgrade.args[0] :])
                    return False
                if not self._ignore_upgrade():
                    return False
                data = data[upgrade.args[0] :]
            else:
                return True

    def _should_upgrade(self) -> bool:
        """Only a GET of HTTP/1.1 without a body can become a WebSocket (RFC 6455, section 4.1), and only when
        no answer is under way; other offers are ignored.

        uvicorn hands over whatever offers it, and the WebSocket side then waits for ever for a body's end.
        """
        if self.parser.get_method() != b"GET" or self.parser.get_http_version() != "1.1":
            return False
        has_body = any(name in _FRAMING for name, _ in self.headers)
        is_busy = self.cycle is not None and not self.cycle.response_complete
        return not has_body and not is_busy and super()._should_upgrade()

    def _upgrade(self, rest: bytes) -> None:
        """Hand the connection over, with what has come behind the head; or say why not.

        uvicorn has the head parsed anew by the other side, which says nothing when a bound is passed.
        """
        if not self.url.isascii():
            self._refuse_malformed()
            return
        headers = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in self.headers])
        request = Request(self.url.decode(), headers)
        protocol = WebSocketProtocol(self.config, self.server_state, self.app_state)
        problem = protocol.refusal(request)
        if problem is not None:
            self._refuse(problem, UPGRADE_HEADERS if isinstance(problem, UpgradeRequired) else ())
            return
        self._stop_timer()
        self.flow.resume_reading()
        self.connections.discard(self)
        self.parser = None  # it and this object hold each other
        if self.flow.write_paused:  # by an answer before: the transport says it once, and has said it here
            protocol.pause_writing()
        protocol.begin(self.transport, request, rest)

    def _check_progress(self, num_bytes: int) -> None:
        self._unsettled_bytes = 0 if self._settled else self._unsettled_bytes + num_bytes
        if self._unsettled_bytes > self._max_header_bytes:
            self._refuse(HeadersTooLarge(self._unsettled_bytes, self._max_header_bytes))
        elif self._is_idle() and self.timeout_keep_alive_task is None:
            self._start_timer()  # line ends between requests: they begin nothing

    def _ignore_upgrade(self) -> bool:
        """Go on with HTTP/1.1 although the request offers another protocol (RFC 9110, section 7.8).

        The parser takes what follows such a head for the other protocol, and the app would see an empty
        body. Java's HttpClient offers HTTP/2 with its POSTs. A new parser that has seen the same framing
        reads on. False if that framing is malformed.
        """
        framing = [b"%s: %s\r\n" % header for header in self.headers if header[0] in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self._skips_head = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
        except httptools.HttpParserError:
            self._refuse_malformed()
            return False
        finally:
            self._skips_head = False
        return True

    def on_message_begin(self) -> None:
        if self._skips_head:
            return
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        if not self._skips_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._skips_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._skips_head:
            return
        self._stop_timer()
        self._in_head = False
        self._settled = True
        if self._closing or self._has_large_head():
            return
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            if before is None or before.response_complete:
                self._cycles.clear()
            self._cycles.append(self.cycle)
            if self.scope["http_version"] == "1.0":
                self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()
            self.cycle.transport = _CycleTransport(self.transport, self._close)  # type: ignore[assignment]
            extensions = {ABORT_EXTENSION: self.transport.abort, **self.flow.offer(self.cycle)}
            self.scope["extensions"] = extensions  # type: ignore[typeddict-item]

    def on_body(self, body: bytes) -> None:
        self._settled = True
        if not self._closing:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._settled = True
        if self.parser.should_upgrade() and not self._should_upgrade():
            return  # only the head is complete
        self._in_message = False
        if not self._closing:
            super().on_message_complete()
            if self._is_idle():
                self._stop_timer()

    def on_response_complete(self) -> None:
        self.flow.stop()
        super().on_response_complete()
        if self._in_message and not self._closing:
            self._start_timer()  # answered before the body was there: the rest must not take for ever

    def _is_idle(self) -> bool:
        return not self._in_message and (self.cycle is None or self.cycle.response_complete)

    def _has_large_head(self) -> bool:
        """Refuses a head that is over the limit. Its lines are added up only where the input was long
        enough for it."""
        if self._unsettled_bytes + self._chunk_bytes <= self._max_header_bytes:
            return False
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes <= self._max_header_bytes:
            return False
        self._refuse(HeadersTooLarge(num_bytes, self._max_header_bytes))
        return True

    def _start_timer(self) -> None:
        if self._timer is None and not self._closing:
            self._timer = self.loop.call_later(self._header_limit_s, self._on_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late(self) -> None:
        self._timer = None
        if self._in_head:
            self._refuse(HeadersTooSlow(self._header_limit_s))
        else:
            self.transport.close()

    def _refuse_malformed(self) -> None:
        self._refuse(InvalidRequest("This is not a valid HTTP/1.1 request."))

    def _refuse(self, error: HeadraceError, more_headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Answer what is not a request, and close. In the middle of another answer nothing can be said."""
        self._closing = True
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        status, headers, body = error_response(error)
        headers = [header for header in headers if header[0] != b"connection"]
        headers += [(b"content-length", b"%d" % len(body)), (b"connection", b"close"), *more_headers]
        lines = [b"%s: %s\r\n" % header for header in (*self.server_state.default_headers, *headers)]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))
        self._linger()

    def _close(self) -> None:
        """The end of a connection as a response asks for it: at once, unless the client still sends."""
        if self._in_message and not self._closing and not self.transport.is_closing():
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        self._closing = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)


class _AnyLength(int):
    """The length of a body that ends with its connection. uvicorn would send chunks to a client of HTTP/1.0,
    which cannot read them (RFC 9112, section 6.1); it counts down from here, and never arrives."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> _AnyLength:
        return self


class _CycleTransport:
    """What a response cycle sees of the transport: the same but for `close`."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close
