from __future__ import annotations

import asyncio
import re
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from tests.components import need
from tests.tcp_server import StreamServer, dialled, listening, losing_nothing

NUM_STEPS = 8  # of the loop, from a client's connection to a server that waits for its request, and more
LIMIT_S = 20
on_each_loop = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[[Awaitable[None]], None]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    openssl, folder = need("openssl"), tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-subj", "/CN=localhost", "-keyout", key, "-out", cert]
    subprocess.run([openssl, "req", *kind, *files], check=True, capture_output=True, timeout=30)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return context


async def read_on(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


def is_ended(client: socket.socket) -> bool:
    client.settimeout(LIMIT_S)
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


@on_each_loop
def test_a_connection_made_while_the_server_stops_is_closed(run: Run, tls: ssl.SSLContext) -> None:
    async def stop_after(num_steps: int, tls: ssl.SSLContext | None) -> None:
        server = StreamServer(read_on)
        await server.start(tls=tls)
        with socket.create_connection(("127.0.0.1", server.port)) as client:  # which says nothing
            for _ in range(num_steps):
                await asyncio.sleep(0)
            await server.stop()
            assert is_ended(client)

    with losing_nothing():
        for num_steps in range(NUM_STEPS):
            for context in (None, tls):
                run(stop_after(num_steps, context))


@on_each_loop
def test_the_end_closes_what_a_handler_leaves_and_what_nobody_reads(run: Run) -> None:
    async def left_open(*_: object) -> None:
        called.append("left open")

    async def unread(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.append("unread")
        writer.write(bytes(64 << 20))
        writer.close()

    async def main() -> None:
        async with (
            asyncio.timeout(LIMIT_S),
            listening(left_open) as one,
            listening(unread) as other,
            dialled(one.port),
            dialled(other.port),
        ):
            while len(called) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)

    called: list[str] = []
    with losing_nothing():
        run(main())


async def test_it_serves_again_on_the_port_that_it_had() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = StreamServer(answer)
    await server.start()
    for _ in range(2):
        await server.stop()
        await server.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port)).close()
        await server.start(server.port)
        async with dialled(server.port) as (reader, _):
            assert await reader.read() == b"hello"
    await server.stop()


def test_nothing_in_the_tests_listens_otherwise() -> None:
    here = Path(__file__).parent
    sources = {path: path.read_text() for path in here.rglob("*.py") if path != Path(__file__)}
    others = re.compile(r"\bstart_(unix_)?server\(|loop\(?\)?\.create_(unix_)?server\(")
    assert [str(path.relative_to(here)) for path, text in sources.items() if others.search(text)] == []
