import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from websockets.asyncio.client import connect

from gateway.http_protocol import HttpConfig
from gateway.listen import bind
from gateway.server import Server
from gateway.settings import Http
from tests.gateway.tiny_app import TinyApp

MAX_HEADER_BYTES = 4096
# What the kernel hands over at once, and more: a head may be complete in one piece, and still be too large.
ONE_PIECE = 60_000

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def serving(header_limit_s: float = 30.0, keep_alive_s: int = 30) -> AsyncIterator[int]:
    """The tiny app behind our protocol on a free port."""
    app, sockets, started = TinyApp(), bind(Http(port=0)), asyncio.Event()
    config = HttpConfig(
        app,
        max_header_bytes=MAX_HEADER_BYTES,
        header_limit_s=header_limit_s,
        timeout_keep_alive=keep_alive_s,
        ws="websockets-sansio",
        log_config=None,
        access_log=False,
    )
    server = Server(config, app, drain_limit_s=0.0, started=started.set)
    task = asyncio.create_task(server.serve(sockets=sockets))
    await started.wait()
    try:
        yield sockets[0].getsockname()[1]
    finally:
        server.stop()
        await task


@contextlib.asynccontextmanager
async def connection(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read_response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def send_slowly(writer: asyncio.StreamWriter, piece: bytes, num_pieces: int) -> int:
    """Sends until the server has had enough; the number of bytes sent."""
    for index in range(num_pieces):
        try:
            writer.write(piece)
            await writer.drain()
        except ConnectionError:
            return index * len(piece)
        await asyncio.sleep(0)
    return num_pieces * len(piece)


async def expect_431(connected: Connection) -> None:
    status, headers, body = await read_response(connected[0])
    assert status == 431
    assert headers["connection"] == "close"
    assert headers["content-type"].startswith("application/json")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "headers_too_large")
    assert str(MAX_HEADER_BYTES) in error["message"]
    assert await connected[0].read() == b""


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nbig: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nbig: " + b"a" * ONE_PIECE + b"\r\n\r\n",
        b"GET /" + b"a" * ONE_PIECE + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 2000 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"n" * ONE_PIECE + b": v\r\n\r\n",
    ],
    ids=["just over", "one value", "request line", "many headers", "one name"],
)
async def test_a_complete_head_over_the_limit_is_431_and_closed(head: bytes) -> None:
    async with serving() as port, connection(port) as connected:
        connected[1].write(head)
        await expect_431(connected)


@pytest.mark.parametrize(
    "start",
    [b"GET /", b"GET / HTTP/1.1\r\nhost: x\r\nbig: ", b"GET / HTTP/1.1\r\n", b"G"],
    ids=["request line", "value", "name", "method"],
)
async def test_a_head_that_never_ends_is_refused_early(start: bytes) -> None:
    async with serving() as port, connection(port) as connected:
        connected[1].write(start)
        await send_slowly(connected[1], b"a" * 500, 40)
        status, _, _ = await read_response(connected[0])
        assert status == (400 if start == b"G" else 431)


async def test_a_head_that_trickles_in_small_headers_is_431() -> None:
    async with serving() as port, connection(port) as connected:
        connected[1].write(b"GET / HTTP/1.1\r\n")
        await send_slowly(connected[1], b"a: b\r\n", 1000)
        await expect_431(connected)


async def test_a_head_just_under_the_limit_passes_in_one_piece_and_byte_by_byte() -> None:
    head = b"GET / HTTP/1.1\r\nhost: x\r\nbig: " + b"a" * (MAX_HEADER_BYTES - 60) + b"\r\n\r\n"
    async with serving() as port, connection(port) as (reader, writer):
        writer.write(head)
        assert (await read_response(reader))[0] == 200
        await send_slowly(writer, head[:-1][:1], 1)
        for start in range(1, len(head), 101):
            writer.write(head[start : start + 101])
            await asyncio.sleep(0)
        assert (await read_response(reader))[0] == 200


async def test_a_body_much_larger_than_the_header_limit_passes_in_any_framing() -> None:
    body = b"x" * 300_000
    chunked = b"".join(b"1\r\nx\r\n" for _ in range(20_000)) + b"0\r\n\r\n"
    async with serving() as port, connection(port) as (reader, writer):
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n" + body)
        assert (await read_response(reader))[2] == b"300000"
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunked)
        assert (await read_response(reader))[2] == b"20000"
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await read_response(reader))[0] == 200


async def test_pipelined_requests_are_all_answered_and_a_large_one_among_them_is_not() -> None:
    small = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving() as port, connection(port) as (reader, writer):
        writer.write(small * 200)  # 5,600 bytes: over the limit together, not one by one
        for _ in range(200):
            assert (await read_response(reader))[0] == 200


@pytest.mark.parametrize("tail", [b"0\r\ntrailer: ", b"1;extension="], ids=["trailer", "chunk extension"])
async def test_an_endless_trailer_or_chunk_extension_ends_the_connection(tail: bytes) -> None:
    async with serving() as port, connection(port) as (reader, writer):
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n" + tail)
        await send_slowly(writer, b"a" * 1000, 20)
        with contextlib.suppress(ConnectionError):
            assert (
                await reader.read() == b""
            )  # the app has the request already: no answer can be put before its own


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01", b"HELLO\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"]
)
async def test_what_is_not_http_gets_a_json_400_and_is_closed(garbage: bytes) -> None:
    async with serving() as port, connection(port) as (reader, writer):
        writer.write(garbage)
        status, headers, body = await read_response(reader)
        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert await reader.read() == b""


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nhost", b"\r\n"], ids=["nothing", "half a head", "a line end"]
)
async def test_headers_that_do_not_come_end_the_connection(sent: bytes) -> None:
    async with serving(header_limit_s=0.1) as port, connection(port) as (reader, writer):
        writer.write(sent)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 " if b"GET" in sent else b"")
        assert bool(answer) == (b"GET" in sent)


async def test_a_client_of_http_1_0_gets_bodies_without_chunks_and_then_the_end() -> None:
    async with serving() as port:
        async with connection(port) as (reader, writer):
            writer.write(b"GET /stream HTTP/1.0\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding" not in head
            assert await reader.readexactly(10) == b"tick\ntick\n"
        for path, body in ((b"/", b"ok"), (b"/echo", b"0")):
            async with connection(port) as (reader, writer):
                writer.write(b"GET %s HTTP/1.0\r\n\r\n" % path)
                status, _, content = await read_response(reader)
                assert (status, content) == (200, body)
                assert await reader.read() == b""


async def test_line_ends_between_requests_do_not_keep_a_connection_for_ever() -> None:
    async with serving(header_limit_s=0.1, keep_alive_s=30) as port, connection(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await read_response(reader))[0] == 200
        writer.write(b"\r\n")
        assert await reader.read() == b""


async def test_an_idle_connection_outlives_the_header_limit_and_ends_at_the_keep_alive_limit() -> None:
    async with serving(header_limit_s=0.1, keep_alive_s=1) as port, connection(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await read_response(reader))[0] == 200
        await asyncio.sleep(0.4)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await read_response(reader))[0] == 200
        assert await reader.read() == b""


@pytest.mark.parametrize("query", [b"", b"?close"])
async def test_an_answer_before_the_body_was_read_reaches_a_client_that_still_sends(query: bytes) -> None:
    async with serving() as port, connection(port) as (reader, writer):
        writer.write(b"POST /early%s HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n" % query)
        await send_slowly(writer, b"x" * 100_000, 30)
        assert (await read_response(reader))[0] == 413


async def test_a_body_that_never_ends_after_its_answer_is_cut() -> None:
    async with serving(header_limit_s=0.1) as port, connection(port) as (reader, writer):
        writer.write(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\nxx")
        assert (await read_response(reader))[0] == 413
        assert await reader.read() == b""


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"
WEBSOCKET = b"connection: Upgrade\r\nupgrade: websocket\r\n"


@pytest.mark.parametrize(
    "body", [b"content-length: 5\r\n\r\nhello", b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["http2", "websocket"])
async def test_an_offer_of_another_protocol_is_ignored_and_the_body_still_read_at_any_split(
    offer: bytes, body: bytes
) -> None:
    request = b"POST /echo HTTP/1.1\r\nhost: x\r\n" + offer + body
    async with serving() as port, connection(port) as (reader, writer):
        for split in range(len(request)):
            writer.write(request[:split])
            await asyncio.sleep(0.001)
            writer.write(request[split:])
            assert (await read_response(reader))[2] == b"5"


async def test_an_offer_of_http2_without_a_body_is_ignored_and_pipelined_requests_follow() -> None:
    request = b"GET / HTTP/1.1\r\nhost: x\r\n" + H2C + b"\r\n"
    async with serving() as port, connection(port) as (reader, writer):
        writer.write(request * 1500)  # in one piece: more than Python's recursion limit
        for _ in range(1500):
            assert (await read_response(reader))[2] == b"ok"


async def test_a_websocket_lives_longer_than_the_header_limit() -> None:
    async with serving(header_limit_s=0.1) as port, connect(f"ws://127.0.0.1:{port}/") as websocket:
        await asyncio.sleep(0.3)
        await websocket.send("still there")
        assert await websocket.recv() == "still there"
