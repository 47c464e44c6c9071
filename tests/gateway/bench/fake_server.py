"""A server with OpenAI's API that does to each request what a test says, well or badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.tcp_server import listening

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


@dataclass
class Asked:
    """A request as it came, and where its answer goes."""

    path: str
    headers: dict[str, str]
    body: Any
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *pieces: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(b"".join(pieces))
        await self.writer.drain()

    async def stream(self, *payloads: bytes) -> None:
        """Body bytes of a stream whose head has been sent."""
        await self.send(*(chunk(payload) for payload in payloads))


Answer = Callable[[Asked], Awaitable[None]]


@dataclass
class Server:
    """A running one. `asked` are the requests in the order in which they came."""

    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    pages: dict[str, bytes] = field(default_factory=lambda: {"/v1/models": b'{"data": [{"id": "tiny"}]}'})
    num_connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def delta(finish: str | None = None, **fields: Any) -> bytes:
    """A chat chunk of one choice."""
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(prompt_tokens: int, output_tokens: int, **more: Any) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    return event({"choices": [], "usage": {**counts, **more}})


def whole(texts: Sequence[str], prompt_tokens: int = 7) -> list[bytes]:
    """The payloads of a good answer."""
    frames = [delta(role="assistant", content=""), *(delta(content=text) for text in texts)]
    return [*frames, delta("length"), usage(prompt_tokens, len(texts)), DONE]


async def answer_well(asked: Asked) -> None:
    """As many tokens as are asked for, and a prompt counted in words and 4 more."""
    words = sum(len(message["content"].split()) for message in asked.body["messages"])
    texts = [f"w{number} " for number in range(asked.body["max_tokens"])]
    await asked.send(HEAD, *(chunk(payload) for payload in whole(texts, words + 4)), LAST)


def plain(status: int, body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Server]:
    """A server on a free port of this machine; `answer` gets each POST, and GETs have its `pages`."""
    server = Server()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.num_connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while not writer.is_closing():
                await _serve(server, reader, writer, answer)
        writer.close()

    async with listening(connection) as listener:
        server.port = listener.port
        yield server


async def _serve(
    server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer
) -> None:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    method, path, _ = lines[0].split(" ")
    if method == "GET":
        page = server.pages.get(path)
        writer.write(plain(404, b'{"detail": "Not Found"}') if page is None else plain(200, page))
        return
    asked = Asked(path, headers, json.loads(body), reader, writer)
    server.asked.append(asked)
    await answer(asked)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    while not condition():  # noqa: ASYNC110 (a condition of another task's)
        await asyncio.sleep(0.001)
