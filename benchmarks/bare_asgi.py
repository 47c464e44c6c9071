"""The yardstick: the least that an ASGI app under uvicorn can do for a stream.

Sends ready-made frames, nothing else.

Every stream is one task that sleeps until its next step and awaits `send`. `python -m benchmarks.bare_asgi
PORT NUM_FRAMES STEP_MS` serves until it is stopped; the frame is as long as the gateway's.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from time import monotonic
from typing import Any

import uvicorn

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class BareApp:
    """Streams the same frame `num_frames` times, one each `step_s`."""

    def __init__(self, frame: bytes, num_frames: int, step_s: float) -> None:
        self._frame = frame
        self._num_frames = num_frames
        self._step_s = step_s

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        next_s = monotonic()
        for _ in range(self._num_frames):
            next_s += self._step_s
            await asyncio.sleep(next_s - monotonic())
            await send({"type": "http.response.body", "body": self._frame, "more_body": True})
        last = b'data: {"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % self._num_frames
        await send({"type": "http.response.body", "body": last, "more_body": False})


def frame() -> bytes:
    """As long as a chat chunk of the gateway with an average token."""
    return (
        b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
        b'"created":1700000000,"model":"scripted","choices":[{"index":0,"delta":{"content":" token"},'
        b'"logprobs":null,"finish_reason":null}]}\n\n'
    )


def main() -> None:
    port, num_frames, step_ms = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    app = BareApp(frame(), num_frames, step_ms / 1e3)
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        http="httptools",
        loop="uvloop",
    )


if __name__ == "__main__":
    main()
