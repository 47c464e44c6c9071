"""Streams through the real nginx: what comes out while the upstream still holds the rest, and how they end.

The upstream of most tests is the test itself: it sends a frame, waits until the client has it, and only then
sends the next. A proxy that buffers never passes. What the site says besides is in `test_nginx_site.py`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import stack
from tests.e2e.asking import CHAT, COMPLETE, ask, chat, converse
from tests.e2e.h2_client import H2Client, StreamLost, connect_h2
from tests.e2e.nginx_site import Nginx, site, start_nginx
from tests.e2e.played_upstream import Request, Upstream, listening, stream_head
from tests.stack import Gateway, Worker
from tests.wire import LIMIT_S, Head, Wire, connect

JOBS = "headrace_link_jobs"
EVENTS = "/v1/streams/0123456789abcdef/events?token=t"
NUM_PARALLEL = 12
# Far above what was measured, see `test_client_that_does_not_read…`; far below an endless answer.
MAX_WAITING_BYTES = 24 << 20


@dataclass(frozen=True, slots=True)
class Served:
    """The real thing, from the engine's place to nginx."""

    worker: Worker
    gateway: Gateway
    nginx: Nginx


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    """With a send_timeout that a test can wait for; nothing here reads slowly but where it is meant."""
    folder = tmp_path_factory.mktemp("nginx")
    impatient = site({"send_timeout              30s;": "send_timeout 500ms;"})
    with start_nginx(folder, f"unix:{folder}/up.sock", impatient) as started:
        yield started


@pytest.fixture
async def upstream(nginx: Nginx) -> AsyncIterator[Upstream]:
    async with listening(nginx.upstream) as played:
        yield played


@pytest.fixture
async def http2(nginx: Nginx) -> AsyncIterator[H2Client]:
    async with connect_h2(nginx.tls_port, nginx.tls("h2")) as connection:
        yield connection


@asynccontextmanager
async def client_of(nginx: Nginx, protocol: str) -> AsyncIterator[Wire]:
    """A client over TLS that speaks `http/1.1` or `h2`."""
    if protocol == "h2":
        async with connect_h2(nginx.tls_port, nginx.tls("h2")) as connection:
            yield connection.stream()
    else:
        async with connect(nginx.tls_port, tls=nginx.tls()) as wire:
            yield wire


@pytest.fixture(params=["plain", "http/1.1", "h2"])
async def client(request: pytest.FixtureRequest, nginx: Nginx) -> AsyncIterator[Wire]:
    """The same client over HTTP/1.1, with and without TLS, and over HTTP/2."""
    opened = connect(nginx.port) if request.param == "plain" else client_of(nginx, request.param)
    async with opened as wire:
        yield wire


async def start_stream(
    client: Wire,
    upstream: Upstream,
    content_type: str = "text/event-stream; charset=utf-8",
    method: str = "POST",
    path: str = CHAT,
) -> tuple[Request, Head]:
    """A request whose answer has begun, without a frame yet."""
    body = {"stream": True} if method == "POST" else None
    reading = asyncio.create_task(client.request(method, path, body, {"accept-encoding": "gzip, br, zstd"}))
    request = await upstream.next()
    await request.send(stream_head(content_type))
    return request, await reading


@pytest.mark.parametrize(
    ("method", "path", "content_type", "piece"),
    [
        ("POST", CHAT, "text/event-stream; charset=utf-8", b"data: %d\n\n"),
        ("POST", CHAT, "application/x-ndjson", b'{"text": "%d"}\n'),
        ("POST", CHAT, "text/plain; charset=utf-8", b"%d"),
        ("GET", EVENTS, "text/event-stream; charset=utf-8", b"id: %d\ndata: x\n\n"),
    ],
    ids=["sse", "ndjson", "text", "eventsource"],
)
async def test_stream_passes_each_piece_before_the_next_is_sent(
    client: Wire, upstream: Upstream, method: str, path: str, content_type: str, piece: bytes
) -> None:
    request, head = await start_stream(client, upstream, content_type, method, path)
    assert request.path == path
    assert head.status == 200
    assert head["content-type"] == content_type
    assert head["server-timing"] == "parse;dur=1.5"
    assert head.get("content-encoding") is None
    for number in range(20):
        await request.chunk(piece % number)
        assert await client.piece() == piece % number
    await request.end()
    assert await client.piece() == b""


async def test_stream_passes_a_heartbeat_before_the_first_token(client: Wire, upstream: Upstream) -> None:
    request, _ = await start_stream(client, upstream)
    await request.chunk(b": ping\n\n")
    frame = await client.frame()
    assert frame is not None
    assert frame.is_comment


async def test_disconnect_reaches_the_upstream_before_it_has_answered(
    client: Wire, upstream: Upstream
) -> None:
    reading = asyncio.create_task(client.post(CHAT, {"stream": True}))
    request = await upstream.next()
    reading.cancel()
    await asyncio.wait([reading])
    await client.close()
    await request.peer_gone()


async def test_disconnect_reaches_the_upstream_in_mid_stream(client: Wire, upstream: Upstream) -> None:
    request, _ = await start_stream(client, upstream)
    await request.chunk(b"data: 1\n\n")
    assert await client.frame()
    await client.close()
    await request.peer_gone()


async def test_upstream_gone_in_mid_stream_cuts_the_body(client: Wire, upstream: Upstream) -> None:
    """Not a tidy end, which most clients read as success."""
    request, _ = await start_stream(client, upstream)
    await request.chunk(b"data: 1\n\n")
    assert await client.frame()
    request.writer.close()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await client.frame()


async def test_one_http2_connection_carries_parallel_streams(http2: H2Client, upstream: Upstream) -> None:
    """Each goes on while the others wait; one is cancelled and one is cut, which touches no other."""
    streams = []
    for _ in range(NUM_PARALLEL):
        client = http2.stream()
        request, _ = await start_stream(client, upstream)
        streams.append((client, request))
    for number in range(5):
        for each, (client, request) in enumerate(streams):
            data = b"data: %d of %d\n\n" % (number, each)
            await request.chunk(data)
            assert await client.piece() == data
    (cancelled, its_request), (cut, cut_request), *others = streams
    await cancelled.close()
    await its_request.peer_gone()
    cut_request.writer.close()
    for client, request in reversed(others):
        await request.chunk(b"data: last\n\n")
        assert await client.piece() == b"data: last\n\n"
    with pytest.raises(StreamLost):  # nginx keeps a reset until it writes something else on the connection
        await cut.piece()
    for client, request in others:
        await request.end()
        assert await client.piece() == b""


async def test_http2_stream_that_nobody_reads_stops_alone(http2: H2Client, upstream: Upstream) -> None:
    """Its window closes; nginx stops to read from the upstream, ends it after send_timeout, and no other."""
    slow, quick = http2.stream(), http2.stream()
    request, _ = await start_stream(slow, upstream)
    beside, _ = await start_stream(quick, upstream)
    filling = asyncio.create_task(fill_until_cut(request))
    number = 0
    while not filling.done():
        await beside.chunk(b"data: %d\n\n" % (number := number + 1))
        assert await quick.piece() == b"data: %d\n\n" % number
    assert await filling < MAX_WAITING_BYTES


async def test_client_that_does_not_read_stops_the_upstream_and_is_cut(
    nginx: Nginx, upstream: Upstream
) -> None:
    """What waits between gateway and client is bounded: the gateway's own limits see a slow reader."""
    with socket.socket() as client:
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", nginx.port))
        await loop.sock_sendall(
            client, f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode()
        )
        request = await upstream.next()
        await request.send(stream_head())
        assert await fill_until_cut(request) < MAX_WAITING_BYTES  # ended by send_timeout
        with pytest.raises(ConnectionResetError):  # the kernel does not keep the rest for a client like this
            await read_all(client)


async def read_all(client: socket.socket) -> None:
    """Until the peer ends the connection tidily."""
    while await asyncio.get_running_loop().sock_recv(client, 1 << 20):
        pass


async def fill_until_cut(request: Request) -> int:
    """Send without an end until nginx closes the connection; how many bytes went."""
    num_bytes = 0
    with suppress(ConnectionError):
        async with asyncio.timeout(LIMIT_S):
            while num_bytes < MAX_WAITING_BYTES:
                await request.chunk(b"x" * 8000)
                num_bytes += 8000
    return num_bytes


async def test_websocket_upgrade_and_both_directions_pass(nginx: Nginx, upstream: Upstream) -> None:
    async with connect(nginx.tls_port, tls=nginx.tls()) as client:
        await client.send(
            b"GET /v1/realtime?model=m HTTP/1.1\r\nhost: localhost\r\n"
            b"upgrade: websocket\r\nconnection: Upgrade\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        request = await upstream.next()
        assert request.path == "/v1/realtime?model=m"
        assert b"\r\nupgrade: websocket\r\n" in request.head.lower()
        assert b"\r\nconnection: upgrade\r\n" in request.head.lower()
        await request.send(
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n\r\n"
        )
        assert (await client.head()).status == 101
        await client.send(b"\x81\x85mask-")
        assert await request.read(7) == b"\x81\x85mask-"
        await request.send(b"\x81\x02ok")
        assert await client.read(4) == b"\x81\x02ok"
        await client.close()
        await request.peer_gone()


@pytest.fixture(scope="module")
def served(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A scripted worker and a gateway behind the site as it is."""
    folder = tmp_path_factory.mktemp("served")
    with (
        stack.start_scripted(folder, embedded_model, "--step-ms", "5") as worker,
        stack.start_gateway(folder, [worker]) as gateway,
        start_nginx(folder, f"127.0.0.1:{gateway.port}") as nginx,
    ):
        yield Served(worker, gateway, nginx)


@pytest.mark.parametrize("protocol", ["http/1.1", "h2"])
async def test_gateway_behind_nginx_streams_the_same_answer(served: Served, protocol: str) -> None:
    direct = await ask(served.gateway.port, chat(max_tokens=50))
    async with client_of(served.nginx, protocol) as client:
        behind = await converse(client, chat(max_tokens=50))
    assert behind.kind == direct.kind == COMPLETE
    assert behind.text == direct.text
    assert behind.num_deltas > 40, "tokens come one by one; a few are half a character"


@pytest.mark.parametrize("protocol", ["http/1.1", "h2"])
async def test_disconnect_behind_nginx_aborts_in_the_worker(served: Served, protocol: str) -> None:
    worker = served.worker
    async with client_of(served.nginx, protocol) as client:
        assert (await client.post(CHAT, chat(max_tokens=5000))).status == 200
        assert await client.frame()
        assert worker.metric(JOBS) == 1
        await client.close()
        # 5,000 tokens would take 25 s more.
        await asyncio.to_thread(
            worker.process.wait_until, lambda: worker.metric(JOBS) == 0, 20, "free of what nobody reads"
        )
