"""nginx/headrace.conf under the real nginx: what comes out while the upstream still holds the rest.

The upstream of most tests is the test itself: it sends a frame, waits until the client has it, and only then
sends the next. A proxy that buffers never passes.
"""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.settings import Settings
from tests.components import need
from tests.processes import ROOT, Process, answers, free_port
from tests.stack import Gateway, Worker, running
from tests.wire import LIMIT_S, Head, Wire, connect

CONF = ROOT / "nginx" / "headrace.conf"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
CHAT = "/v1/chat/completions"
JOBS = "headrace_link_jobs"

# Only what differs between this machine and a server: ports, paths, the upstream's address.
MAIN = """
{user}
daemon off;
worker_processes 1;
pid nginx.pid;
error_log {folder}/error.log notice;
events {{ worker_connections 128; }}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    access_log off;
    include {folder}/headrace.conf;
}}
"""


@dataclass(frozen=True, slots=True)
class Nginx:
    """A running nginx with our site. `upstream` is where it expects the gateway: mostly a test's socket."""

    process: Process
    folder: Path
    port: int
    tls_port: int
    upstream: Path

    @property
    def access_log(self) -> str:
        return (self.folder / "access.log").read_text()


def write_site(folder: Path, port: int, tls_port: int, upstream: str) -> list[str]:
    """The site and a frame around it in `folder`; the command that runs nginx with it."""
    site = CONF.read_text()
    for old, new in {
        "listen 443 ssl;": f"listen 127.0.0.1:{tls_port} ssl;",
        "listen 127.0.0.1:8080;": f"listen 127.0.0.1:{port};",
        "server 127.0.0.1:8000;": f"server {upstream};",
        "/etc/nginx/headrace.crt": f"{folder}/headrace.crt",
        "/etc/nginx/headrace.key": f"{folder}/headrace.key",
        "/var/log/nginx/headrace.log": f"{folder}/access.log",
    }.items():
        assert site.count(old) == 1, f"{old!r} is {site.count(old)} times in {CONF.name}"
        site = site.replace(old, new)
    (folder / "headrace.conf").write_text(site)
    # As root, nginx would drop to a user who may not enter the test's folder.
    user = "user root;" if folder.owner() == "root" else ""
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, user=user))
    make_certificate(folder / "headrace.key", folder / "headrace.crt")
    return [need("nginx"), "-p", str(folder), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"]


def make_certificate(key: Path, certificate: Path) -> None:
    """A self-signed one for localhost."""
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([need("openssl"), *options.split(), *names, *files], check=True, capture_output=True)


@contextmanager
def start_nginx(folder: Path, upstream: str) -> Iterator[Nginx]:
    """The real nginx with our site in front of `upstream`, as nginx's `server` names it."""
    port, tls_port = free_port(), free_port()
    command = write_site(folder, port, tls_port, upstream)
    with running(Process("nginx", command, folder / "nginx.log")) as process:
        process.wait_until(lambda: answers(port, "/metrics") == 403, 20, "listening")
        yield Nginx(process, folder, port, tls_port, Path(upstream.removeprefix("unix:")))


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    folder = tmp_path_factory.mktemp("nginx")
    with start_nginx(folder, f"unix:{folder}/up.sock") as started:
        yield started


class Request:
    """What nginx has passed on, and the connection to answer it on."""

    def __init__(
        self, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.head = head
        self.body = body
        self._reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def read(self, num_bytes: int) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(num_bytes), LIMIT_S)

    async def peer_gone(self) -> None:
        """Returns when nginx has closed this connection."""
        with suppress(ConnectionError):
            assert await asyncio.wait_for(self._reader.read(1), LIMIT_S) == b""


class Upstream:
    """Plays the gateway: hands each request to the test, in order."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.writers: list[asyncio.StreamWriter] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, for as many requests as come before the test answers with something else."""
        self.writers.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        lines = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
        body = await reader.readexactly(int(lines.get(b"content-length", 0)))
        self.requests.put_nowait(Request(head, body, reader, writer))

    async def next(self) -> Request:
        return await asyncio.wait_for(self.requests.get(), LIMIT_S)


@pytest.fixture
async def upstream(nginx: Nginx) -> AsyncIterator[Upstream]:
    played = Upstream()
    server = await asyncio.start_unix_server(played.connected, nginx.upstream, limit=1 << 20)
    yield played
    for writer in played.writers:
        writer.close()
    server.close()
    await server.wait_closed()


@pytest.fixture(params=["plain", "tls"])
async def client(request: pytest.FixtureRequest, nginx: Nginx) -> AsyncIterator[Wire]:
    tls = ssl.create_default_context(cafile=nginx.folder / "headrace.crt") if request.param == "tls" else None
    async with connect(nginx.tls_port if tls else nginx.port, tls=tls) as wire:
        yield wire


async def start_stream(client: Wire, upstream: Upstream) -> tuple[Request, Head]:
    """A chat request whose answer has begun, without a frame yet."""
    reading = asyncio.create_task(client.post(CHAT, {"stream": True}, {"accept-encoding": "gzip"}))
    request = await upstream.next()
    await request.send(STREAM_HEAD)
    return request, await reading


def test_config_passes_the_check_of_nginx(tmp_path: Path) -> None:
    command = write_site(tmp_path, free_port(), free_port(), "127.0.0.1:8000")
    check = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr
    assert "[warn]" not in check.stderr


async def test_stream_passes_each_frame_before_the_next_is_sent(client: Wire, upstream: Upstream) -> None:
    request, head = await start_stream(client, upstream)
    assert head.status == 200
    assert head["content-type"] == "text/event-stream; charset=utf-8"
    assert head.get("content-encoding") is None
    for number in range(20):
        await request.chunk(b"data: %d\n\n" % number)
        frame = await client.frame()
        assert frame is not None
        assert frame.raw == b"data: %d\n\n" % number
    await request.send(b"0\r\n\r\n")
    assert await client.frame() is None


async def test_stream_passes_a_heartbeat_before_the_first_token(client: Wire, upstream: Upstream) -> None:
    request, _ = await start_stream(client, upstream)
    await request.chunk(b": ping\n\n")
    frame = await client.frame()
    assert frame is not None
    assert frame.is_comment


async def test_disconnect_reaches_the_upstream_before_it_has_answered(
    client: Wire, upstream: Upstream
) -> None:
    body = b'{"stream": true}'
    await client.send(
        (
            f"POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\n"
            f"host: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode()
        + body
    )
    request = await upstream.next()
    await client.close()
    await request.peer_gone()


async def test_disconnect_reaches_the_upstream_in_mid_stream(client: Wire, upstream: Upstream) -> None:
    request, _ = await start_stream(client, upstream)
    await request.chunk(b"data: 1\n\n")
    assert await client.frame()
    await client.close()
    await request.peer_gone()


async def test_upstream_gone_in_mid_stream_cuts_the_body(client: Wire, upstream: Upstream) -> None:
    request, _ = await start_stream(client, upstream)
    await request.chunk(b"data: 1\n\n")
    assert await client.frame()
    request.writer.close()
    with pytest.raises(
        (asyncio.IncompleteReadError, ConnectionError)
    ):  # not a tidy end of the chunked coding
        await client.frame()


async def test_http2_streams_frame_by_frame(nginx: Nginx, upstream: Upstream) -> None:
    curl = await asyncio.create_subprocess_exec(
        *(need("curl"), "--silent", "--no-buffer", "--http2", "--cacert", str(nginx.folder / "headrace.crt")),
        *("--write-out", "\nversion %{http_version}", "--json", '{"stream": true}'),
        f"https://localhost:{nginx.tls_port}{CHAT}",
        stdout=asyncio.subprocess.PIPE,
    )
    assert curl.stdout
    try:
        request = await upstream.next()
        await request.send(STREAM_HEAD)
        for number in range(5):
            await request.chunk(b"data: %d\n\n" % number)
            got = await asyncio.wait_for(curl.stdout.readuntil(b"\n\n"), LIMIT_S)
            assert got == b"data: %d\n\n" % number
        await request.send(b"0\r\n\r\n")
        assert await asyncio.wait_for(curl.stdout.read(), LIMIT_S) == b"\nversion 2"
    finally:
        if curl.returncode is None:
            curl.kill()
        await curl.wait()


async def test_websocket_upgrade_and_both_directions_pass(client: Wire, upstream: Upstream) -> None:
    await client.send(
        b"GET /v1/realtime?model=m HTTP/1.1\r\nhost: localhost\r\n"
        b"upgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    request = await upstream.next()
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


async def test_plain_request_has_no_connection_header_and_a_true_address(
    client: Wire, upstream: Upstream
) -> None:
    reading = asyncio.create_task(client.request("GET", "/v1/models", headers={"x-forwarded-for": "1.2.3.4"}))
    request = await upstream.next()
    head = request.head.lower()
    assert b"\r\nconnection:" not in head
    assert b"\r\nx-forwarded-for: 127.0.0.1\r\n" in head
    assert b"1.2.3.4" not in head
    await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    assert (await reading).status == 200


async def test_body_of_exactly_the_gateways_limit_passes(nginx: Nginx, upstream: Upstream) -> None:
    limit = Settings().http.max_body_bytes
    async with connect(nginx.port) as client:
        reading = asyncio.create_task(client.post(CHAT, b" " * limit))
        request = await upstream.next()
        assert len(request.body) == limit
        await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        assert (await reading).status == 200


async def test_body_over_the_gateways_limit_is_413_as_json(nginx: Nginx, upstream: Upstream) -> None:
    limit = Settings().http.max_body_bytes
    async with connect(nginx.port) as client:
        await client.send(
            (
                f"POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\n"
                f"host: localhost\r\ncontent-length: {limit + 1}\r\n\r\n"
            ).encode()
        )
        head = await client.head()
        assert head.status == 413
        assert head["content-type"] == "application/json"
        error = (await client.json())["error"]
    assert error["code"] == "body_too_large"
    assert str(limit) in error["message"]
    assert upstream.requests.empty()


async def test_header_line_within_the_limit_passes(nginx: Nginx, upstream: Upstream) -> None:
    async with connect(nginx.port) as client:
        reading = asyncio.create_task(client.request("GET", "/v1/models", headers={"x-long": "x" * 60_000}))
        request = await upstream.next()
        assert b"x" * 60_000 in request.head
        await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        assert (await reading).status == 200


async def test_header_line_over_the_limit_is_431_as_json(nginx: Nginx, upstream: Upstream) -> None:
    async with connect(nginx.port) as client:
        head = await client.request("GET", "/v1/models", headers={"x-long": "x" * 70_000})
        assert head.status == 431
        assert (await client.json())["error"]["code"] == "headers_too_large"
    assert upstream.requests.empty()


async def test_request_whose_connection_breaks_is_not_repeated(nginx: Nginx, upstream: Upstream) -> None:
    """On a kept connection nginx's default would send a GET again: a generation twice."""
    async with connect(nginx.port) as client:
        reading = asyncio.create_task(client.request("GET", "/v1/models"))
        request = await upstream.next()
        await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        assert (await reading).status == 200
        assert await client.body() == b"{}"

        reading = asyncio.create_task(client.request("GET", "/v1/streams/s/events"))
        assert b"GET /v1/streams/s/events " in await request.read(len(request.head))
        request.writer.close()
        head = await reading
        assert head.status == 502
        assert head["content-type"] == "application/json"
    assert upstream.requests.empty()


async def test_gateway_down_is_502_as_json_with_retry_after(nginx: Nginx) -> None:
    async with connect(nginx.port) as client:
        head = await client.post(CHAT, {})
        assert head.status == 502
        assert head["retry-after"] == "1"
        assert (await client.json())["error"]["code"] == "gateway_unreachable"


async def test_errors_of_the_gateway_pass_unchanged(nginx: Nginx, upstream: Upstream) -> None:
    body = b'{"error":{"message":"of the gateway"}}'
    async with connect(nginx.port) as client:
        reading = asyncio.create_task(client.post(CHAT, {}))
        request = await upstream.next()
        answer = b"HTTP/1.1 413 Too Large\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
        await request.send(answer % (len(body), body))
        assert (await reading).status == 413
        assert await client.body() == body


@pytest.mark.parametrize(
    "path", ["/metrics", "/metrics/", "//metrics", "/%6detrics", "/v1/../metrics", "/metrics?a"]
)
async def test_metrics_are_closed_to_the_outside(nginx: Nginx, upstream: Upstream, path: str) -> None:
    async with connect(nginx.port) as client:
        head = await client.request("GET", path)
        assert head.status == 403
        assert (await client.json())["error"]["code"] == "forbidden"
    assert upstream.requests.empty()


async def test_access_log_has_neither_query_nor_probes(nginx: Nginx, upstream: Upstream) -> None:
    for path in ("/v1/streams/logged/events?token=hidden-token", "/health"):
        async with connect(nginx.port) as client:
            reading = asyncio.create_task(client.request("GET", path))
            request = await upstream.next()
            await request.send(
                b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-request-id: id-1\r\nconnection: close\r\n\r\n{}"
            )
            assert (await reading).status == 200
    nginx.process.wait_until(lambda: "/v1/streams/logged/events" in nginx.access_log, 10, "logged")
    assert "id-1" in nginx.access_log
    assert "hidden-token" not in nginx.access_log
    assert "/health" not in nginx.access_log


def chat(max_tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": "Tell me a story."}]
    return {
        "model": "scripted",
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "messages": messages,
    }


async def text_of(port: int) -> str:
    """The streamed answer; one frame for each of its 50 tokens."""
    async with connect(port) as client:
        assert (await client.post(CHAT, chat(50))).status == 200
        frames = await client.frames()
    assert frames[-1].is_done
    deltas = [
        frame.data["choices"][0]["delta"].get("content") for frame in frames[:-1] if not frame.is_comment
    ]
    texts = [delta for delta in deltas if delta]
    assert len(texts) > 40, "tokens arrive one by one; a few are half a character"
    return "".join(texts)


async def test_gateway_behind_nginx_streams_the_same_answer(
    scripted_worker: Callable[..., Worker], gateway: Callable[..., Gateway], tmp_path: Path
) -> None:
    behind = gateway([scripted_worker()])
    with start_nginx(tmp_path, f"127.0.0.1:{behind.port}") as nginx:
        assert await text_of(nginx.port) == await text_of(behind.port)


async def test_disconnect_behind_nginx_aborts_in_the_worker(
    scripted_worker: Callable[..., Worker], gateway: Callable[..., Gateway], tmp_path: Path
) -> None:
    worker = scripted_worker("--step-ms", "20")
    behind = gateway([worker])
    with start_nginx(tmp_path, f"127.0.0.1:{behind.port}") as nginx:
        async with connect(nginx.port) as client:
            assert (await client.post(CHAT, chat(5000))).status == 200
            assert await client.frame()
            assert worker.metric(JOBS) == 1
        # 5,000 tokens would take 100 s more.
        worker.process.wait_until(lambda: worker.metric(JOBS) == 0, 20, "free of what nobody reads")
        assert behind.metric("headrace_open_requests") == 0
