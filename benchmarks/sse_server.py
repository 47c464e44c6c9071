"""A cheap upstream for clients of HTTP: many SSE streams in steps, and small JSON answers. Raw sockets.

`python -m benchmarks.sse_server PORT STEP_MS` serves until it is stopped. `/stream` sends one event to every
stream in each step, each in a chunk of its own, and never ends; every other path answers at once.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final, cast

import uvloop

from benchmarks.bare_asgi import frame

_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_BODY: Final = b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.1,0.2,0.3]}]}'
_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY) + _BODY
)


class Connection(asyncio.Protocol):
    def __init__(self, streams: set[asyncio.Transport]) -> None:
        self._streams = streams
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports only behave like one

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, rest = self._data.partition(b"\r\n\r\n")
        _, _, length = head.lower().partition(b"content-length: ")
        if not end or len(rest) < int(length.partition(b"\r\n")[0] or 0):
            return
        self._data = b""
        if b" /stream " in head:
            self._transport.write(_HEAD)
            self._streams.add(self._transport)
        else:
            self._transport.write(_ANSWER)

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.discard(self._transport)


async def serve(port: int, step_s: float) -> None:
    streams: set[asyncio.Transport] = set()
    event = frame()
    chunk = b"%x\r\n%b\r\n" % (len(event), event)
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Connection(streams), "127.0.0.1", port, backlog=1024)
    next_s = loop.time()
    while True:
        next_s = max(next_s + step_s, loop.time())
        await asyncio.sleep(next_s - loop.time())
        for transport in list(streams):
            transport.write(chunk)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1e3))
