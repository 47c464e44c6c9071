"""The client of /v1/realtime for load: a raw socket whose frames are counted rather than parsed.

As cheap as `load.StreamClient`: of a delta it looks at the length of its frame and at its name. Events that
come once for a response are parsed. Not here: what is measured.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, cast

DELTA: Final = b'"response.output_text.delta"'
_NAME_BYTES: Final = 256  # within so many bytes of an event stands its name
_TEXT: Final = 0x81  # the head of a text frame that is a whole message
_CLOSE: Final = 0x88
_PING: Final = 0x89
_SWITCHED: Final = b"HTTP/1.1 101 "


@dataclass(slots=True)
class TurnResult:
    """What one response looked like from outside. Times are monotonic seconds."""

    started_s: float
    first_s: float | None = None  # first delta
    ended_s: float | None = None
    num_deltas: int = 0
    num_delta_bytes: int = 0  # of their frames' payloads
    kinds: list[str] = field(default_factory=list)  # of all other events, in order
    response: dict[str, Any] = field(default_factory=dict)  # of `response.done`


class WebSocketClient(asyncio.Protocol):
    """One conversation. `turn` sends a user's message and asks for a response.

    What it returns resolves when the response is done, and raises `RuntimeError` if the connection is lost:
    `error` says why.
    """

    def __init__(self, host: str, model: str) -> None:
        self.error = ""
        self.result = TurnResult(0.0)
        self.gaps_s: list[float] = []
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[TurnResult] = self._loop.create_future()
        self._request = handshake(host, model)
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._is_open = False
        self._last_s = 0.0

    # -- asyncio.Protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports only behave like one
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        if not self._is_open:
            head, blank, buffer = buffer.partition(b"\r\n\r\n")
            if not blank:
                self._buffer = head
                return
            if not head.startswith(_SWITCHED):
                self.fail(f"no WebSocket: {head[:200]!r}")
                return
            self._is_open = True
        self._buffer = self._take_frames(buffer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail("connection lost")

    # -- the talk ------------------------------------------------------------------------------------------

    def turn(self, text: str, **response: Any) -> asyncio.Future[TurnResult]:
        """One user's message and one response with these fields."""
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        self.ended = self._loop.create_future()
        self.result = TurnResult(monotonic())
        self.send({"type": "conversation.item.create", "item": item})
        self.send({"type": "response.create", "response": response})
        return self.ended

    def send(self, event: dict[str, Any]) -> None:
        assert self._transport is not None
        self._transport.write(text_frame(json.dumps(event).encode()))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def fail(self, reason: str) -> None:
        self.error = self.error or reason
        for waited in (self.opened, self.ended):
            if not waited.done():
                waited.set_exception(RuntimeError(self.error))
                waited.exception()  # whoever does not wait is not told at the end of the program
        self.close()

    # -- frames --------------------------------------------------------------------------------------------

    def _take_frames(self, data: bytes) -> bytes:
        """All whole frames, of a server that does not mask and does not compress; what is left."""
        at, end = 0, len(data)
        while end - at >= 2:
            num_bytes, start = data[at + 1], at + 2
            if num_bytes == 126:
                num_bytes, start = int.from_bytes(data[at + 2 : at + 4]), at + 4
            elif num_bytes == 127:
                num_bytes, start = int.from_bytes(data[at + 2 : at + 10]), at + 10
            if start > end or start + num_bytes > end:
                break
            self._take(data[at], data, start, start + num_bytes)
            at = start + num_bytes
        return data[at:]

    def _take(self, head: int, data: bytes, start: int, end: int) -> None:
        if head == _TEXT:
            if data.find(DELTA, start, min(end, start + _NAME_BYTES)) >= 0:
                self._take_delta(end - start)
            else:
                self._take_event(json.loads(data[start:end]))
        elif head == _PING:
            assert self._transport is not None
            self._transport.write(masked_frame(0x8A, data[start:end]))
        else:
            kind = "closed" if head == _CLOSE else f"a frame of head {head:#x}"
            self.fail(f"{kind}: {data[start:end][:200]!r}")

    def _take_delta(self, num_bytes: int) -> None:
        result, now_s = self.result, monotonic()
        if result.first_s is None:
            result.first_s = now_s
        else:
            self.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s
        result.num_deltas += 1
        result.num_delta_bytes += num_bytes

    def _take_event(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        self.result.kinds.append(kind)
        if kind == "session.created":
            self.opened.set_result(None)
        elif kind == "error":
            self.fail(f"{event['error']['code']}: {event['error']['message']}")
        elif kind == "response.done":
            self.result.response = event["response"]
            self.result.ended_s = monotonic()
            if not self.ended.done():
                self.ended.set_result(self.result)


def handshake(host: str, model: str) -> bytes:
    """The request for a WebSocket, which offers no compression."""
    key = base64.b64encode(os.urandom(16)).decode()
    lines = (
        f"GET /v1/realtime?model={model} HTTP/1.1",
        f"host: {host}",
        "connection: Upgrade",
        "upgrade: websocket",
        "sec-websocket-version: 13",
        f"sec-websocket-key: {key}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def text_frame(payload: bytes) -> bytes:
    """A message of a client."""
    return masked_frame(_TEXT, payload)


def masked_frame(head: int, payload: bytes) -> bytes:
    """As a client must send it. The mask is zero: it hides nothing here, and costs nothing."""
    num_bytes = len(payload)
    if num_bytes < 126:
        length = bytes((0x80 | num_bytes,))
    elif num_bytes < 1 << 16:
        length = b"\xfe" + num_bytes.to_bytes(2)
    else:
        length = b"\xff" + num_bytes.to_bytes(8)
    return bytes((head,)) + length + bytes(4) + payload


async def open_conversation(host: str, port: int, model: str) -> WebSocketClient:
    """Connected, with a session. Raises `RuntimeError`."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: WebSocketClient(f"{host}:{port}", model), host, port)
    await client.opened
    return client
