"""The way of a WebSocket's text messages past the server's `send`: framed, they go to the transport as they
are pushed.

What `send` costs each of many streams is told in `gateway/direct_body.py`. Not here: when a connection is
open (`gateway/websocket_protocol.py`), and what waits for a slow client (`gateway/outlet.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from gateway.direct_body import WriteBytes


def _head(num_bytes: int) -> bytes:
    """Of a whole message: FIN, text, not masked, and the length in its shortest form (RFC 6455, 5.2)."""
    if num_bytes < 126:
        return bytes((0x81, num_bytes))
    if num_bytes < 1 << 16:
        return b"\x81\x7e" + num_bytes.to_bytes(2, "big")
    return b"\x81\x7f" + num_bytes.to_bytes(8, "big")


_HEADS: Final = tuple(map(_head, range(512)))  # a delta of one token has some 250 bytes


def text_frame(text: bytes) -> bytes:
    """The frame of one text message, given in UTF-8."""
    num_bytes = len(text)
    return (_HEADS[num_bytes] if num_bytes < len(_HEADS) else _head(num_bytes)) + text


class DirectText:
    """Past the `send` of one WebSocket, between `allow` and `stop`."""

    __slots__ = ("_on_stop", "_write")

    def __init__(self) -> None:
        self._write: WriteBytes | None = None  # of the transport, while it may be used
        self._on_stop: Callable[[], None] | None = None

    def allow(self, transport: asyncio.WriteTransport) -> None:
        """The connection is open, and its client reads."""
        self._write = transport.write

    def stop(self) -> None:
        """From now on only `send` may write."""
        on_stop, self._on_stop, self._write = self._on_stop, None, None
        if on_stop is not None:
            on_stop()

    def begin(self, on_stop: Callable[[], None]) -> WriteBytes | None:
        """A `BeginDirect`: what it gives takes whole messages, in UTF-8."""
        write = self._write
        if write is None:
            return None
        self._on_stop = on_stop

        def write_text(text: bytes) -> None:
            write(text_frame(text))

        return write_text
