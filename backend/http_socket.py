"""What the kernel knows of a connection and its transport does not tell: what waits, and what has arrived.

An HTTP/1.1 response has no name of the request that it answers: it belongs to the one that was sent last. So
before a connection is used again, nothing may wait on it; and what comes although the server's machine has
received none of the request cannot be its response. Not here: what is done about it (`http_connection.py`).
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from typing import Any, Final

_TCP_INFO: Final = getattr(socket, "TCP_INFO", None)  # Linux
_BYTES_ACKED: Final = struct.Struct("=120xQ")  # in `struct tcp_info` since Linux 4.1
# The SYN counts as one. Where no more than that is ever counted, the bytes go another way: between two
# containers of a machine, the network's software may hand them from socket to socket.
_SYN: Final = 1


class Delivery:
    """Of one connection: whether what was written last has come to the other machine."""

    __slots__ = ("_num_acked", "_num_bytes", "_poll", "_socket", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._socket: Any = transport.get_extra_info("socket")
        self._num_acked: int | None = None
        self._num_bytes = 0
        self._poll = select.poll()
        if self._socket is not None:
            self._poll.register(self._socket.fileno(), select.POLLIN)

    def has_input(self) -> bool:
        """Whether bytes, an end or an error wait for the event loop."""
        return bool(self._poll.poll(0))

    def begins(self, num_bytes: int) -> None:
        """So many bytes are about to be written."""
        self._num_bytes = num_bytes

    def is_none(self) -> bool:
        """Whether not one of them has come to the other machine; False where that is not known.

        All that was acknowledged when this was asked for the last time, was of what came before: so it is to
        be asked once for each response.
        """
        before, now = self._num_acked, _num_acked(self._socket)
        self._num_acked = now
        if before is not None and now is not None:
            return now == before
        return self._transport.get_write_buffer_size() >= self._num_bytes


def _num_acked(sock: Any) -> int | None:
    """How many bytes the other machine has acknowledged since the connection began; None where unknown.

    Each segment of a server acknowledges what has arrived there. A server whose application has closed the
    connection acknowledges nothing more: its kernel answers with a reset.
    """
    if _TCP_INFO is None or sock is None or sock.family == socket.AF_UNIX:
        return None
    try:
        found = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED.size)
    except OSError:  # closed
        return None
    if len(found) < _BYTES_ACKED.size:
        return None
    (num,) = _BYTES_ACKED.unpack(found)
    return num if num > _SYN else None
