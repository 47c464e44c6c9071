"""The client of resumable streams for load: starts one, and follows it as EventSource does, without parsing.

As cheap as `load.StreamClient`, whose counting it is. Not here: what is measured.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.load import StreamClient

PATH: Final = "/v1/streams"
_ID: Final = re.compile(rb"(?:^|\n)id: (\d+)\n")


@dataclass(frozen=True, slots=True)
class Started:
    """A stream that generates. `url`: path and query of its events, with the token."""

    id: str
    url: str
    token: str


class EventClient(StreamClient):
    """One reader of one stream. `num_bytes`: of the response so far, with its head."""

    def __init__(self, url: str, after: int = 0, keep_gaps: bool = False) -> None:
        super().__init__(self.asking(url, after), keep_gaps)
        self.num_bytes = 0
        self.last_id = after  # of the last event, once the stream has ended

    @staticmethod
    def asking(url: str, after: int = 0) -> bytes:
        """The request for the events after a number, as bytes on the wire."""
        shown = f"last-event-id: {after}\r\n" if after else ""
        head = f"GET {url} HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n{shown}\r\n"
        return head.encode()

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        super().data_received(data)
        if b"event: failed" in self._tail:
            self.result.error = self.result.error or "the stream failed"
            self.close()

    def _finish(self, tail: bytes, now_s: float) -> None:
        numbers = _ID.findall(tail.replace(b"\r\n", b"\n"))
        if numbers:
            self.last_id = int(numbers[-1])
        super()._finish(tail, now_s)


async def follow(host: str, port: int, started: Started, keep_gaps: bool = False) -> EventClient:
    """A reader from the beginning, which has asked."""
    _, client = await asyncio.get_running_loop().create_connection(
        lambda: EventClient(started.url, keep_gaps=keep_gaps), host, port
    )
    return client


async def start_stream(host: str, port: int, fields: Mapping[str, Any]) -> Started:
    """POST a chat with these fields. Raises `RuntimeError` for anything but 201."""
    body = json.dumps({**fields, "stream_options": {"include_usage": True, "include_timings": True}}).encode()
    status, answer = await _exchange(host, port, "POST", PATH, body)
    if status != 201:
        raise RuntimeError(f"POST {PATH} was answered with {status}: {answer[:300]!r}")
    found = json.loads(answer)
    return Started(found["id"], found["url"], found["token"])


async def delete_stream(host: str, port: int, started: Started) -> None:
    """Raises `RuntimeError` if the gateway does not know it."""
    status, answer = await _exchange(host, port, "DELETE", f"{PATH}/{started.id}?token={started.token}")
    if status != 204:
        raise RuntimeError(f"DELETE was answered with {status}: {answer[:300]!r}")


async def _exchange(host: str, port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(host, port)
    lines = ("host: localhost", "connection: close", "content-type: application/json")
    head = "\r\n".join((f"{method} {path} HTTP/1.1", *lines, f"content-length: {len(body)}", "", ""))
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer[9:12]), answer.partition(b"\r\n\r\n")[2]
