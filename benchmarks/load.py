"""A cheap client for load: many SSE streams over raw sockets, counted rather than parsed.

It must leave the second core to the program that is measured: 3 us a frame, where a general HTTP client
costs 20 to 50.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, cast


@dataclass(slots=True)
class StreamResult:
    """What one stream looked like from outside. Times are monotonic seconds."""

    started_s: float = 0.0
    first_s: float | None = None  # first frame with content
    ended_s: float | None = None
    num_content: int = 0  # frames with text
    num_tokens: int | None = None  # completion tokens, from the usage chunk
    num_prompt_tokens: int = 0  # from there, too
    status: int = 0
    is_done: bool = False  # saw [DONE]
    error: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)


class StreamClient(asyncio.Protocol):
    """One request, one response.

    `done` resolves to the result when the body has ended or the connection broke.
    """

    def __init__(self, request: bytes, keep_gaps: bool = False) -> None:
        self._request = request
        self._keep_gaps = keep_gaps
        self._tail = b""
        self._last_s = 0.0
        self._transport: asyncio.Transport | None = None
        self.result = StreamResult()
        self.done: asyncio.Future[StreamResult] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports only behave like one
        self.result.started_s = monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        result, now_s = self.result, monotonic()
        if not result.status:
            result.status = int(data[9:12])
        num_content = (
            data.count(b'"content":"')
            - data.count(b'"content":""')
            + data.count(b'"text":"')
            - data.count(b'"text":""')
        )
        if num_content > 0:
            if result.first_s is None:
                result.first_s = now_s
            elif self._keep_gaps:
                result.gaps_s.append(now_s - self._last_s)
            self._last_s = now_s
            result.num_content += num_content
        tail = self._tail + data if len(data) < 1024 else data
        if b"[DONE]" in tail or result.status != 200:
            self._finish(tail, now_s)
        else:
            self._tail = data[-2048:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.result.error = self.result.error or "connection lost"
            self.done.set_result(self.result)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, tail: bytes, now_s: float) -> None:
        result = self.result
        result.ended_s = now_s
        result.is_done = b"[DONE]" in tail
        for line in tail.split(b"\n"):
            if line.startswith(b"data: {") and b'"usage":{' in line:
                chunk = json.loads(line[6:])
                result.num_tokens = chunk["usage"]["completion_tokens"]
                result.num_prompt_tokens = chunk["usage"].get("prompt_tokens", 0)
                result.timings = chunk.get("timings", {})
        if not self.done.done():
            self.done.set_result(result)
        self.close()


def chat_request(model: str, prompt: str, max_tokens: int, system: str = "") -> bytes:
    """A streaming chat request as bytes on the wire."""
    messages = [{"role": "user", "content": prompt}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return request({"model": model, "messages": messages, "max_tokens": max_tokens})


def request(fields: Mapping[str, Any]) -> bytes:
    """A chat body with these fields as bytes on the wire, streaming and with timings."""
    options = {"stream": True, "stream_options": {"include_usage": True, "include_timings": True}}
    body = json.dumps({**fields, **options}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def open_stream(host: str, port: int, request: bytes, keep_gaps: bool = False) -> StreamClient:
    _, client = await asyncio.get_running_loop().create_connection(
        lambda: StreamClient(request, keep_gaps), host, port
    )
    return client
