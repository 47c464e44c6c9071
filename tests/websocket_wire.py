"""A WebSocket client that shows what is really on the wire: handshakes and frames are made by hand, also such
as no library would send. Every wait is bounded (`tests/wire.py`).
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from tests.wire import Head, Wire, connect

CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
KEY: Final = base64.b64encode(b"0123456789abcdef").decode()
ACCEPT: Final = base64.b64encode(
    hashlib.sha1(KEY.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
).decode()
HANDSHAKE: Final[Mapping[str, str]] = {
    "host": "localhost",
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": KEY,
}
_MASK: Final = b"\x37\xfa\x21\x3d"


def frame(
    opcode: int,
    payload: bytes = b"",
    fin: bool = True,
    rsv: int = 0,
    masked: bool = True,
    length_bytes: int | None = None,
    length: int | None = None,
) -> bytes:
    """A client's frame. `length_bytes` is 0, 2 or 8 behind the seven bits; `length` may be a lie."""
    size = len(payload) if length is None else length
    if length_bytes is None:
        length_bytes = 0 if size < 126 else 2 if size < 1 << 16 else 8
    head = bytes([fin << 7 | rsv << 4 | opcode])
    mask_bit = masked << 7
    if length_bytes == 0:
        head += bytes([mask_bit | size])
    else:
        code, form = {2: (126, "!H"), 8: (127, "!Q")}[length_bytes]
        head += bytes([mask_bit | code]) + struct.pack(form, size)
    if not masked:
        return head + payload
    key = (_MASK * (len(payload) // 4 + 1))[: len(payload)]
    hidden = (int.from_bytes(payload) ^ int.from_bytes(key)).to_bytes(len(payload))
    return head + _MASK + hidden


def close_frame(code: int, reason: bytes = b"") -> bytes:
    return frame(CLOSE, struct.pack("!H", code) + reason)


@dataclass(frozen=True, slots=True)
class Received:
    """A server's frame."""

    opcode: int
    payload: bytes
    fin: bool = True

    @property
    def code(self) -> int | None:
        """Of a close; None if it says none."""
        assert self.opcode == CLOSE, self
        return struct.unpack("!H", self.payload[:2])[0] if self.payload else None

    @property
    def reason(self) -> str:
        return self.payload[2:].decode()


class Socket:
    """One connection that was upgraded."""

    def __init__(self, wire: Wire, head: Head) -> None:
        self.wire = wire
        self.head = head

    async def send(self, *pieces: bytes) -> None:
        """All of it in one write."""
        await self.wire.send(b"".join(pieces))

    async def read(self) -> Received:
        """The next frame, which must be well formed."""
        first, second = await self.wire.read(2)
        assert not first & 0x70, "a reserved bit is set"
        assert not second & 0x80, "a server's frame is masked"
        length = second
        if second == 126:
            (length,) = struct.unpack("!H", await self.wire.read(2))
            assert length > 125, "too long a form of a length"
        elif second == 127:
            (length,) = struct.unpack("!Q", await self.wire.read(8))
            assert length > 0xFFFF, "too long a form of a length"
        return Received(first & 0x0F, await self.wire.read(length), bool(first & 0x80))

    async def text(self) -> str:
        """The next message, which must be text in one frame."""
        received = await self.read()
        assert (received.opcode, received.fin) == (TEXT, True), received
        return received.payload.decode()

    async def closed(self) -> int | None:
        """The code of a close, which must come next, and nothing behind it."""
        received = await self.read()
        assert received.opcode == CLOSE, received
        assert await self.wire.closed_by_peer()
        return received.code


def offer(path: str, changed: Mapping[str, str | None] | None = None) -> bytes:
    """The request that offers a WebSocket. Headers that are None are left out."""
    headers = {**HANDSHAKE, **(changed or {})}
    lines = [f"{name}: {value}\r\n" for name, value in headers.items() if value is not None]
    return f"GET {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode("latin-1")


async def handshake(
    wire: Wire, path: str, changed: Mapping[str, str | None] | None = None, behind: bytes = b""
) -> Head:
    """The answer to a handshake. `behind` comes in the same write."""
    await wire.send(offer(path, changed) + behind)
    return await wire.head()


@asynccontextmanager
async def websocket(
    port: int,
    path: str = "/v1/realtime",
    headers: Mapping[str, str | None] | None = None,
    behind: bytes = b"",
) -> AsyncIterator[Socket]:
    """An accepted WebSocket."""
    async with connect(port) as wire:
        head = await handshake(wire, path, headers, behind)
        assert head.status == 101, head
        assert head["sec-websocket-accept"] == ACCEPT
        yield Socket(wire, head)
