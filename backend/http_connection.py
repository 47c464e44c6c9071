"""One connection of the HTTP client: a request out, its response in, then the next pair.

It knows what is on the wire, and when it can be used again. Which connection a request takes, opening one,
time limits and sending again: `backend/http_client.py`. Parsing is httptools' (llhttp), in strict mode.

Bytes that nobody asked for end the connection: after a response, while it is free, and those that come for
the next request before the server's machine has received any of that. What remains: a server that sends them
after that moment, or so shortly before it that the acknowledgement is read together with them.

A read of a token stream takes one Python call here and one of the receiver. What the parser finds in it is
collected by bound C functions and told after the parser has returned: a receiver may send, pause or abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from backend.address import tune
from backend.fault_log import log_fault
from backend.http_exchange import Exchange, Owner
from backend.http_framing import framing_of, is_followed
from backend.http_ports import Origin
from backend.http_socket import Delivery

# Of a long request, for the transport at once: it may copy what it cannot send.
PIECE_BYTES: Final = 256 << 10
_STATUSES: Final = range(100, 600)  # RFC 9110, 15


class HttpConnection(asyncio.Protocol):
    """The protocol object. `num_ended` counts whole responses; `freed_s`, the loop's time, is the owner's."""

    __slots__ = (
        *("_can_reuse", "_exchange", "_fault", "_feed", "_has_begun", "_has_head", "_has_whole"),
        *("_headers", "_is_choked", "_is_chunked", "_max_head_bytes", "_needs_eof", "_num_head"),
        *("_num_parts", "_num_silent", "_owner", "_parser", "_parts", "_status", "_take", "_transport"),
        *("_turned", "_unsent", "delivery"),
        *("freed_s", "has_byte", "is_closed", "num_ended", "on_body", "origin"),
    )

    def __init__(self, owner: Owner, origin: Origin, max_head_bytes: int) -> None:
        self.origin = origin
        self.num_ended = 0
        self.freed_s = 0.0
        self.is_closed = True  # until it is open
        self._owner = owner
        self._max_head_bytes = max_head_bytes
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # set before any other callback
        self._exchange: Exchange | None = None
        self._is_choked = False
        self._parts: list[bytes] = []  # body of the read that is being parsed
        self.on_body = self._parts.append
        self._parser = HttpResponseParser(self)
        self._feed: Callable[[bytes], None] = self._parser.feed_data
        self._expect()

    def _expect(self) -> None:
        """All that is known of one response, before its first byte."""
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._num_head = 0  # bytes of names and values, the trailers' too
        self._num_silent = 0  # bytes of reads since something was told
        self._num_parts = 0  # of `_parts`, those of the response that is whole
        self._turned = False  # the last read held more than body
        self.has_byte = self._has_head = self._has_whole = self._has_begun = False
        self._is_chunked = False
        self._needs_eof = False  # the body ends with the connection
        self._can_reuse = False
        self._fault = ""
        self._unsent = memoryview(b"")

    # -- the client's side -----------------------------------------------------------------------------------

    def ask(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        """Send a request. The connection is free and not closed."""
        self._expect()
        self._exchange = exchange
        self._take = exchange.receiver.data
        first = head + body if 0 < len(body) <= PIECE_BYTES else head
        self.delivery.begins(len(first))
        self._transport.write(first)
        if len(body) > PIECE_BYTES:
            self._unsent = memoryview(body)
            self._send_more()

    def pause(self) -> None:
        self._transport.pause_reading()

    def resume(self) -> None:
        self._transport.resume_reading()

    def abort(self) -> None:
        """Close it now. Whoever is on it hears nothing more."""
        self._let_go()
        self.is_closed = True
        self._transport.abort()

    def cut(self, message: str) -> None:
        """The same, and tell whoever is on it that this is what the server did."""
        exchange = self._exchange
        self.abort()
        if exchange is not None:
            exchange.failed(message, True)

    def close(self) -> None:
        """Close a free connection."""
        self.is_closed = True
        self._transport.close()

    @property
    def is_usable(self) -> bool:
        return not self.is_closed and not self._transport.is_closing()

    # -- asyncio's side --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports only behave like one
        self.delivery = Delivery(self._transport)
        tune(transport)
        self.is_closed = False

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            self.close()  # nothing was asked for: a server that gives up on the connection, or a broken one
            return
        try:
            self._feed(data)
        except HttpParserError as error:
            self._fail(f"sent what is no HTTP response: {error}")
        except HttpParserUpgrade:
            self._fail("switched to another protocol, which was not asked for")
        try:
            if self._turned:
                self._turn(data)
            elif parts := self._parts:
                body = parts[0] if len(parts) == 1 else b"".join(parts)
                parts.clear()
                self._num_silent = 0
                self._take(body)
            else:
                self._listen(data)
        except Exception as error:  # the receiver's
            log_fault(error)
            self.cut(f"was let go: its response led to an error here, {type(error).__name__}")

    def eof_received(self) -> None:
        """Nothing more comes; a server that does not read either must not hold the connection."""
        self._broke("")
        self.is_closed = True
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._broke(f": {exc}" if exc is not None else "")
        self._owner.lost(self)
        # Parser and connection hold each other.
        del self._parser, self._feed, self.on_body

    def pause_writing(self) -> None:
        self._is_choked = True

    def resume_writing(self) -> None:
        self._is_choked = False
        self._send_more()

    def _send_more(self) -> None:
        while self._unsent and not self._is_choked:
            piece, self._unsent = self._unsent[:PIECE_BYTES], self._unsent[PIECE_BYTES:]
            self._transport.write(piece)

    # -- what the parser finds -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._has_whole:  # a second response to one request
            self._can_reuse = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_head += len(name) + len(value) + 4
        if self._num_head > self._max_head_bytes:
            self._too_long(self._num_head)
        elif not self._has_head:  # else a trailer
            self._headers.append((name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status not in _STATUSES:
            self._fail(f"answered with the status {status:03}, which HTTP does not have")
            return
        if status < 200:  # an interim response: the one that counts is still to come
            self._headers.clear()
            return
        if self._has_head or self._fault:
            return
        framing = framing_of(self._headers)
        if framing.odd_coding is not None:
            self._fail(f"used the transfer coding {framing.odd_coding[:40]!r}; only chunked is understood")
            return
        self._has_head = self._turned = True
        self._status = status
        if status in (204, 304):
            self._can_reuse = self._parser.should_keep_alive()
        elif self._exchange is None or self._exchange.is_bodiless:
            self._has_whole = True  # with no part; the parser waits for a body: it is of no more use
        else:
            self._is_chunked, self._needs_eof = framing.is_chunked, framing.needs_eof
            self._can_reuse = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        if self._has_head and not (self._has_whole or self._fault):
            self._has_whole = self._turned = True
            self._num_parts = len(self._parts)

    def _too_long(self, num_bytes: int) -> None:
        self._fail(
            f"sent a response's head of {num_bytes} bytes or more; max_head_bytes is {self._max_head_bytes}"
        )

    def _fail(self, fault: str) -> None:
        self._turned = True
        self._fault = self._fault or fault

    # -- what is told ----------------------------------------------------------------------------------------

    def _listen(self, data: bytes) -> None:
        """A read without any body: a part of a head, of a chunk's size or extensions, of a trailer."""
        if self._was_early():
            return
        self.has_byte = True
        self._num_silent += len(data)
        if self._num_silent > self._max_head_bytes:
            self._too_long(self._num_silent)
            self._turn(data)

    def _is_unread(self) -> bool:
        """Not so of a fresh connection: whatever comes there, comes for its request."""
        return self.delivery.is_none() and self.num_ended > 0

    def _was_early(self) -> bool:
        """Whether the first bytes came before the request was there: then they are no response to it."""
        exchange = self._exchange
        assert exchange is not None
        if self.has_byte or not self._is_unread():
            return False
        self.abort()
        exchange.failed("answered before it was asked", False, True)
        return True

    def _turn(self, data: bytes) -> None:
        """Tell what the last read held: the head, the body's end, or what is wrong, and the body between."""
        exchange = self._exchange
        if self._was_early():
            return
        assert exchange is not None
        self._turned, self.has_byte, self._num_silent = False, True, 0
        body = self._body_of(data)
        if self._has_head and not self._has_begun:
            self._has_begun = True
            exchange.begun(self._status, self._headers)
        if body and self._has_begun and self._exchange is exchange:
            self._take(body)
        if self._exchange is not exchange:  # aborted
            return
        if self._has_whole:  # whatever came after it
            self._finish(exchange)
        elif self._fault:
            self.abort()
            exchange.failed(self._fault, True)

    def _body_of(self, data: bytes) -> bytes:
        """What the last read held of it. With anything behind its end the connection is of no more use."""
        parts = self._parts
        if self._has_whole:
            parts = parts[: self._num_parts]
            if is_followed(data, parts, self._is_chunked):
                self._can_reuse = False
        body = b"".join(parts)
        self._parts.clear()
        return body

    def _finish(self, exchange: Exchange) -> None:
        is_sent = not self._unsent and self._transport.get_write_buffer_size() == 0
        self._let_go()
        self.num_ended += 1
        if not is_sent:  # it has answered early, and wants no more of the body
            self.abort()
        elif self._can_reuse and not self._fault and self.is_usable:
            self.resume()
            self._owner.freed(self)
        else:
            self.close()
        exchange.ended()

    def _broke(self, reason: str) -> None:
        """The connection has ended: by the server's wish, if there is no `reason`."""
        exchange = self._exchange
        if exchange is None:
            return
        self._let_go()
        if self._needs_eof and self._has_begun and not reason:
            exchange.ended()
        else:
            when = "in the middle of" if self.has_byte else "before"
            is_unread = not self.has_byte and self._is_unread()
            exchange.failed(f"closed the connection {when} its response{reason}", self.has_byte, is_unread)

    def _let_go(self) -> None:
        self._exchange = None
        self._unsent = memoryview(b"")
