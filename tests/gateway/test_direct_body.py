"""Chunks past `send`: the same bytes in the same order, and only while nothing waits."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from typing import Any

import pytest

from gateway.direct_body import DIRECT_EXTENSION, DirectFlow
from gateway.outlet import Outlet
from tests.gateway.answering import Client
from tests.gateway.asgi import served, slow_client
from tests.gateway.test_outlet import HEADERS, read_chunked

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Transport:
    """Notes what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.error: Exception | None = None

    def write(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.written.append(data)


class Cycle:
    """A response whose head has been sent."""

    def __init__(self, **fields: Any) -> None:
        self.response_started = True
        self.response_complete = self.disconnected = False
        self.chunked_encoding: bool | None = True
        self.scope = {"method": "POST"}
        self.__dict__.update(fields)


class Direct:
    """An outlet whose server offers the way past `send`."""

    def __init__(self, **fields: Any) -> None:
        self.transport, self.client, self.gone = Transport(), Client(), list[str]()
        self.flow = DirectFlow(self.transport)  # type: ignore[arg-type]
        self.cycle = Cycle(**fields)
        begin = self.flow.offer(self.cycle)[DIRECT_EXTENSION]  # type: ignore[arg-type]
        self.outlet = Outlet(self.client, 100, self.gone.append, (), begin)


class Exchanges:
    """An app that pushes pieces, and counts what goes through `send`."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.num_sent = 0  # messages
        self.blocked = asyncio.Event()
        self.cycles: list[weakref.ref[Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            self.num_sent += 1
            await send(message)

        self.cycles.append(weakref.ref(send.__self__))
        outlet = Outlet(counted, 8 << 20, pytest.fail, (), scope["extensions"][DIRECT_EXTENSION])
        outlet.start(200, HEADERS)
        for number, piece in enumerate(self.pieces):
            outlet.push(piece)
            if number % 100 == 0:
                await asyncio.sleep(0)
            if outlet.blocked_since_s is not None:
                self.blocked.set()
        outlet.end(b"end")
        while (await receive())["type"] != "http.disconnect":
            pass


async def test_chunks_go_past_send_and_head_and_end_do_not() -> None:
    direct = Direct()
    direct.outlet.start(200, HEADERS)
    direct.outlet.push(b"a")
    direct.outlet.push(b"")
    direct.outlet.push(b"b" * 17)
    assert direct.transport.written == [b"1\r\na\r\n", b"11\r\n" + b"b" * 17 + b"\r\n"]
    direct.outlet.end(b"c")
    assert [message["type"][14:] for message in direct.client.messages] == ["start", "body"]
    assert direct.client.body == b"c"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_started": False},
        {"response_complete": True},
        {"disconnected": True},
        {"chunked_encoding": False},
        {"scope": {"method": "HEAD"}},
    ],
    ids=["no head yet", "complete", "client gone", "not chunked", "no body"],
)
async def test_only_send_writes_when_chunks_may_not_be(fields: dict[str, Any]) -> None:
    direct = Direct(**fields)
    direct.outlet.start(200, HEADERS)
    direct.outlet.push(b"a")
    assert direct.transport.written == []
    assert direct.client.body == b"a"


async def test_a_paused_connection_is_written_by_send_alone_until_all_has_been_read() -> None:
    direct = Direct()
    direct.outlet.start(200, HEADERS)
    direct.outlet.push(b"a")
    direct.flow.pause_writing()
    direct.client.stops_reading()
    direct.outlet.push(b"b")
    direct.outlet.push(b"c")
    assert direct.transport.written == [b"1\r\na\r\n"]
    direct.flow.resume_writing()
    direct.outlet.push(b"d")
    direct.client.reads_again()
    await asyncio.wait_for(direct.outlet.flushed(), 5)
    assert direct.client.bodies == [b"b", b"cd"]
    direct.outlet.push(b"e")
    assert direct.transport.written == [b"1\r\na\r\n", b"1\r\ne\r\n"]


async def test_a_pause_in_which_nothing_was_pushed_is_over_with_the_next_push() -> None:
    direct = Direct()
    direct.outlet.start(200, HEADERS)
    direct.flow.pause_writing()
    direct.flow.resume_writing()
    for piece in (b"a", b"b"):
        direct.outlet.push(piece)
    assert direct.client.body == b"a"
    assert direct.transport.written == [b"1\r\nb\r\n"]


async def test_a_dropped_client_is_not_written_to() -> None:
    direct = Direct()
    direct.outlet.start(200, HEADERS)
    direct.outlet.drop()
    direct.outlet.push(b"a")
    assert direct.transport.written == []


async def test_a_write_that_raises_is_a_lost_client() -> None:
    direct = Direct()
    direct.outlet.start(200, HEADERS)
    direct.transport.error = RuntimeError("the handler is closed")
    direct.outlet.push(b"a")
    direct.outlet.push(b"b")
    assert direct.gone == ["send failed: RuntimeError"]


# -- a real server -------------------------------------------------------------------------------------------


async def test_a_client_that_reads_gets_every_byte_and_send_has_head_and_end_alone() -> None:
    app = Exchanges([b"%06d|" % number for number in range(300)])
    async with served(app) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(REQUEST)
            body = await asyncio.wait_for(read_chunked(client), 20)
    assert body == b"".join(app.pieces) + b"end"
    assert app.num_sent == 2


async def test_a_client_that_reads_late_gets_every_byte_in_order() -> None:
    app = Exchanges([b"%06d|" % number * 40 for number in range(4_000)])
    async with served(app) as port:
        with slow_client(port, REQUEST) as client:
            await asyncio.wait_for(app.blocked.wait(), 10)
            body = await asyncio.wait_for(read_chunked(client), 20)
    assert body == b"".join(app.pieces) + b"end"
    assert app.num_sent > 2


async def test_a_client_that_leaves_fails_nothing() -> None:
    left = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        outlet = Outlet(send, 1000, pytest.fail, (), scope["extensions"][DIRECT_EXTENSION])
        outlet.start(200, HEADERS)
        outlet.push(b"a")
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        outlet.push(b"b")
        outlet.end()
        left.set()

    async with served(app) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(REQUEST)
        await asyncio.wait_for(left.wait(), 10)


async def test_requests_of_one_connection_go_direct_one_after_the_other() -> None:
    app = Exchanges([b"a", b"b"])
    async with served(app) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            for _ in range(3):
                client.sendall(REQUEST)
                assert await asyncio.wait_for(read_chunked(client), 20) == b"abend"
    assert app.num_sent == 6


async def test_a_response_that_is_over_does_not_wait_for_the_garbage_collector() -> None:
    app = Exchanges([b"a"])
    async with served(app) as port:
        gc.disable()
        try:
            with socket.create_connection(("127.0.0.1", port)) as client:
                for _ in range(2):
                    client.sendall(REQUEST)
                    await asyncio.wait_for(read_chunked(client), 20)
            assert app.cycles[0]() is None
        finally:
            gc.enable()
