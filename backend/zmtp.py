"""The receiving side of a ZeroMQ connection (ZMTP 3.0, https://rfc.zeromq.org/spec/23/): bytes into messages.

Only what a PULL socket without security needs. No sockets; whose they are, and what a message means, is
`vllm_outputs`.
"""

from __future__ import annotations

from typing import Final

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM: Final = b"NULL" + bytes(16)
_GREETING_BYTES: Final = 64
_READY: Final = b"\x05READY\x0bSocket-Type\x00\x00\x00\x04PULL"
# What a PULL socket says first. Version 3.0: a newer peer then leaves out what it does not know.
HELLO: Final = _SIGNATURE + b"\x03\x00" + _MECHANISM + bytes(32) + b"\x04" + bytes([len(_READY)]) + _READY
_MORE, _LONG, _COMMAND = 1, 2, 4


class ZmtpError(ValueError):
    """The peer does not speak ZMTP 3 without security."""


class ZmtpReader:
    """Cuts what a peer sends into messages."""

    __slots__ = ("_frames", "_is_greeted", "_num_wanted", "_tail")

    def __init__(self) -> None:
        self._tail = bytearray()  # an incomplete frame
        self._num_wanted = 0  # bytes of it before it is worth a look
        self._frames: list[bytes] = []  # of an incomplete message
        self._is_greeted = False

    def feed(self, data: bytes) -> list[list[bytes]]:
        """The messages that are complete now, each a list of frames. Raises `ZmtpError`."""
        if self._tail:
            self._tail += data
            if len(self._tail) < self._num_wanted:
                return []
            data = bytes(self._tail)
            self._tail.clear()
        if self._is_greeted:
            return self._cut(data, 0)
        if len(data) < _GREETING_BYTES:
            self._keep(data, _GREETING_BYTES)
            return []
        if data[0] != 0xFF or data[9] != 0x7F or data[10] < 3 or data[12:32] != _MECHANISM:
            raise ZmtpError(f"a greeting that begins with {data[:32].hex()}")
        self._is_greeted = True
        return self._cut(data, _GREETING_BYTES)

    def _cut(self, data: bytes, start: int) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        end = len(data)
        while end - start >= 2:
            flags = data[start]
            if flags & _LONG:
                at = start + 9
                stop = at + int.from_bytes(data[start + 1 : at], "big") if at <= end else at
            else:
                at = start + 2
                stop = at + data[start + 1]
            if stop > end:
                break
            if not flags & _COMMAND:  # a READY, at the start, tells nothing of use
                self._frames.append(data[at:stop])
                if not flags & _MORE:
                    messages.append(self._frames)
                    self._frames = []
            start = stop
        else:
            stop = start + 2
        if start < end:
            self._keep(data[start:], stop - start)
        return messages

    def _keep(self, data: bytes, num_wanted: int) -> None:
        self._tail += data
        self._num_wanted = num_wanted
