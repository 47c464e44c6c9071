"""Streams for the profile of the token path: the gateway's own objects, cut off after one of them.

A STEP frame goes in at `LinkClient.data_received` as a worker sends it, one token for each stream. What is
cut off is replaced by something that does nothing, so that two cuts differ by what lies between them. With
`Cut.SOCKET` nothing is cut off: the frames leave over TCP, and their readers are read in pauses of the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from time import monotonic, thread_time_ns
from typing import Any, Final, cast

from uvicorn.server import ServerState

from backend import link
from backend.address import Address
from backend.framing import Framer
from backend.link import Delta, Step, Welcome
from backend.link_client import LinkClient
from benchmarks.outbound_texts import Spoken
from gateway.answer import Answer, AnswerLimits
from gateway.audit import Audit
from gateway.exchange import Exchange, Receive, Scope
from gateway.frames import ChatShape
from gateway.http_protocol import HttpConfig, HttpProtocol
from gateway.metrics import Metrics
from gateway.outlet import Send
from gateway.token_choice import TokenChoice
from gateway.watch import OpenRequests
from gateway.writers import SseWriter
from pipeline.outbound import Outbound
from pipeline.values import Delivery, EngineCall, FirstToken, Prompt

REQUEST: Final = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: 0\r\n\r\n"
_MAX_BUFFERED_BYTES: Final = 256 << 10
_NUM_PROMPT_IDS: Final = 64


class Cut(IntEnum):
    """The last thing that still does its work."""

    DISPATCH = 1  # bytes to deltas, and each to the sink of its slot
    CHOICE = 2  # to the writer: text stages and bookkeeping
    WRITER = 3  # to the outlet
    HTTP = 4  # to the transport: outlet and HTTP
    SOCKET = 5  # to the reader's socket


class _Deaf:
    """A sink, a writer and an outlet that do nothing."""

    worker = "bench"
    num_frames = 0
    blocked_since_s = None

    def tokens(self, ids: Any, finish: Any, stop: Any, first: Any, logprobs: Any, now_s: float) -> None: ...

    def text(self, index: int, text: str) -> None: ...

    def push(self, body: bytes) -> None: ...

    def text_writer(self, index: int) -> Callable[[str], None]:
        return self.write

    def write(self, text: str) -> None: ...

    def nothing(self, *_: Any, **__: Any) -> Any: ...

    abort = first = delta = take_back = start = failed = nothing


class _Transport(asyncio.Transport):
    """Takes bytes and forgets them."""

    def write(self, data: Any) -> None: ...

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Streams:
    """`num_streams` answers under way, and the frames that feed them. Make one with `await open_streams`."""

    def __init__(self, spoken: Spoken, metrics: Metrics) -> None:
        self.open = OpenRequests(metrics)
        self._spoken = spoken
        self._at = 0
        self._link = _open_link()
        self._slots: list[tuple[int, int]] = []
        self._readers: list[socket.socket] = []
        self._at_close: list[Callable[[], object]] = []

    def look(self, num_looks: int) -> float:
        """Thread CPU microseconds per stream of a tick of the clock that watches over all limits."""
        start_ns = thread_time_ns()
        for _ in range(num_looks):
            self.open.look(monotonic())
        return (thread_time_ns() - start_ns) / 1e3 / num_looks / len(self._slots)

    def cut_frames(self, num_steps: int) -> float:
        """As `feed`, of the framer alone."""
        framer, total_ns = Framer(), 0
        for _ in range(num_steps):
            data = self.next_frame()
            start_ns = thread_time_ns()
            for _frame in framer.feed(data):
                pass
            total_ns += thread_time_ns() - start_ns
        return total_ns / 1e3 / num_steps / len(self._slots)

    def feed(self, num_steps: int) -> float:
        """Thread CPU microseconds per token of so many steps."""
        receive, readers = self._link.data_received, self._readers
        total_ns = 0
        for _ in range(num_steps):
            frame = self.next_frame()
            start_ns = thread_time_ns()
            receive(frame)
            total_ns += thread_time_ns() - start_ns
            for reader in readers:
                with contextlib.suppress(BlockingIOError):  # a filter may have held all of its text
                    reader.recv(65536)
        return total_ns / 1e3 / num_steps / len(self._slots)

    def next_frame(self) -> bytes:
        """The next step: each stream goes on from a place of its own in the text."""
        chunks, at = self._spoken.chunks, self._at
        self._at += 1
        deltas = [
            Delta(number, generation, chunks[(at + 61 * index) % len(chunks)])
            for index, (number, generation) in enumerate(self._slots)
        ]
        return bytes(link.encode(Step(deltas)))

    def submit(self, call: EngineCall, sink: Any) -> Any:
        """`pipeline.ports.Engine.submit`."""
        handle = self._link.submit(call, sink)
        self._slots.append((handle._slot.number, handle._generation))
        return handle

    def read_from(self, reader: socket.socket) -> None:
        self._readers.append(reader)

    def on_close(self, act: Callable[[], object]) -> None:
        self._at_close.append(act)

    def close(self) -> None:
        """All clients go."""
        for act in self._at_close:
            act()
        for reader in self._readers:
            reader.close()


def _open_link() -> LinkClient:
    """A link whose handshake is over."""
    client = LinkClient(Address(path="/bench"), b"", "bench")
    client.connection_made(_Transport())
    client.data_received(bytes(link.encode(link.Challenge(b"n" * 32, link.VERSION))))
    mac = link.proof(b"", client._nonce, b"worker")
    welcome = Welcome(mac, "bench", ["bench"], 1 << 20, 16, {}, "", [], {})
    client.data_received(bytes(link.encode(welcome)))
    return client


async def open_streams(
    cut: Cut, num_streams: int, spoken: Spoken, make: Callable[[EngineCall], Outbound]
) -> Streams:
    """Answers with their first token behind them."""
    metrics = Metrics()
    streams = Streams(spoken, metrics)
    if cut <= Cut.DISPATCH:
        for _ in range(num_streams):
            streams.submit(_call(), _Deaf())
        return streams
    exchanges = await _exchanges(cut, num_streams, streams)
    for exchange in exchanges:
        answer = Answer(
            cast(Any, streams), _writer(cut, exchange), exchange.outlet, exchange.record, metrics,
            Audit(metrics, None), AnswerLimits(request_s=1e9, stall_s=1e9),
        )  # fmt: skip
        answer.start([_call()], make)
        (choice,) = answer._choices
        assert isinstance(choice, TokenChoice)
        choice.tokens([spoken.chunks[0][0]], None, None, FirstToken(0, 0.0, 0.0), None, monotonic())
        streams.open.add(exchange, answer)
    return streams


def _call() -> EngineCall:
    return EngineCall("", Prompt(memoryview(bytes(4 * _NUM_PROMPT_IDS)), _NUM_PROMPT_IDS, 0), {}, 1 << 20)


def _writer(cut: Cut, exchange: Exchange) -> Any:
    if cut is Cut.CHOICE:
        return _Deaf()
    outlet: Any = _Deaf() if cut is Cut.WRITER else exchange.outlet
    record = exchange.record
    shape = ChatShape(record.request_id, 1_700_000_000, "scripted")
    return SseWriter(outlet, shape, cast(Any, None), record, Delivery(stream=True), 1)


async def _exchanges(cut: Cut, num_streams: int, streams: Streams) -> Sequence[Exchange]:
    """What the ASGI app is given for so many requests."""
    found: list[Exchange] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, _MAX_BUFFERED_BYTES)
        while (await receive()).get("more_body"):
            pass
        found.append(exchange)
        await exchange.finished()

    loop = asyncio.get_running_loop()
    config = HttpConfig(
        app,
        max_header_bytes=65536,
        header_limit_s=60.0,
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        access_log=False,
    )
    config.load()

    def protocol() -> HttpProtocol:
        return HttpProtocol(config, ServerState(), {})

    if cut is Cut.SOCKET:
        server = await loop.create_server(protocol, "127.0.0.1", 0, backlog=4096)
        streams.on_close(server.close)
        for _ in range(num_streams):
            reader = socket.create_connection(server.sockets[0].getsockname()[:2])
            reader.sendall(REQUEST)
            reader.setblocking(False)
            streams.read_from(reader)
            await asyncio.sleep(0)
    else:
        for _ in range(num_streams):
            one = protocol()
            one.connection_made(_Transport())
            one.data_received(REQUEST)
            streams.on_close(partial(one.connection_lost, None))
    while len(found) < num_streams:  # noqa: ASYNC110 - each is a task that must run once
        await asyncio.sleep(0)
    return found
