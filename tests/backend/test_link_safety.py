"""No token ever reaches another stream: random submits, aborts and slot reuses with frames in flight.

Over real sockets. A scripted worker's tokens are a function of the prompt, and every stream here has a prompt
of its own, so each token can be checked as it comes.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from backend.link_client import LinkClient, LinkHandle, open_link
from backend.link_server import LinkServer
from backend.scripted import ScriptedEngine
from pipeline.errors import HeadraceError
from pipeline.values import EngineCall, Prompt
from tests.backend.linked import ids_of, is_lent, linked, make_call, scripted, until
from tests.components import need


class CheckingSink:
    """Knows what its stream must say, and counts what it must not."""

    def __init__(self, expected: Iterator[int]) -> None:
        self.expected = expected
        self.num_tokens = 0
        self.num_foreign = 0
        self.finish: str | None = None
        self.error: HeadraceError | None = None
        self.is_aborted = False

    def tokens(self, ids: list[int], finish: str | None, *_: Any) -> None:
        is_over = self.is_aborted or self.finish is not None or self.error is not None
        for token in ids:
            self.num_tokens += 1
            self.num_foreign += is_over or token != next(self.expected)
        self.finish = finish

    def failed(self, error: HeadraceError) -> None:
        self.error = error


async def storm(server: LinkServer, client: LinkClient, num_operations: int, seed: int) -> list[CheckingSink]:
    """Random operations on one link; returns all sinks when every stream is over."""
    rng = random.Random(seed)
    engine = server._engine
    assert isinstance(engine, ScriptedEngine)
    sinks: list[CheckingSink] = []
    live: list[tuple[LinkHandle, CheckingSink, int]] = []
    reader: Any = client._transport
    for number in range(num_operations):
        action = rng.random()
        if (action < 0.55 or not live) and client.slots.num_requests < 200:
            num_ids = 17_000 if rng.random() < 0.01 else rng.randint(1, 5)
            prompt = [number % 500, number // 500, seed, *(rng.randrange(500) for _ in range(num_ids))]
            sink = CheckingSink(engine.tape.walk(ids_of(prompt)))
            max_tokens = rng.randint(1, 12)
            live.append((client.submit(make_call(prompt, max_tokens), sink), sink, max_tokens))
            sinks.append(sink)
        elif action < 0.85:
            handle, sink, _ = live.pop(rng.randrange(len(live)))
            sink.is_aborted = sink.finish is None
            handle.abort()
        elif action < 0.87:
            reader.pause_reading()
            await asyncio.sleep(0.003)
            reader.resume_reading()
        else:
            await asyncio.sleep(0)
        if len(live) > 300:
            live = [entry for entry in live if entry[1].finish is None]
    await until(lambda: all(sink.finish or sink.error or sink.is_aborted for sink in sinks), 60)
    await until(lambda: not client.slots.num_requests and not server.num_running, 60)
    for _, sink, max_tokens in live:
        assert sink.is_aborted or sink.num_tokens == max_tokens
    return sinks


async def check_storm(folder: Path, num_operations: int, seed: int, **options: Any) -> None:
    async with scripted(folder, step_ms=0.0, max_running=64, **options) as server, linked(server) as client:
        for connection in server._connections:  # a small buffer, so that a pause of the reader is felt
            sock: Any = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined]
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
            connection._transport.set_write_buffer_limits(high=2048)  # type: ignore[attr-defined]
        sinks = await storm(server, client, num_operations, seed)
        assert sum(sink.num_foreign for sink in sinks) == 0
        assert [sink.error for sink in sinks if sink.error is not None] == []
        assert client.slots.num_dropped == 0
        assert server.num_late == 0
        assert len({sink.num_tokens for sink in sinks}) > 5
        await until(lambda: all(slot.state == "free" for slot in client.slots.table))
        assert len(client.slots.table) < len(sinks) / 4
        if server.address.is_unix:  # tcp's buffers take all that a paused reader leaves
            assert all(connection.outbox.peak_ids > 1 for connection in server._connections)  # type: ignore[attr-defined]
        assert (server.num_waiting, server.assembly.num_bytes) == (0, 0)
        stats = server._engine.stats()
        assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_stream_sees_a_foreign_token(tmp_path: Path, seed: int) -> None:
    await check_storm(tmp_path, 2500, seed)


def test_no_stream_sees_a_foreign_token_on_uvloop(tmp_path: Path) -> None:
    uvloop.run(check_storm(tmp_path, 2500, 3))


async def test_no_stream_sees_a_foreign_token_over_tcp(tmp_path: Path) -> None:
    await check_storm(tmp_path, 1000, 4, listen="tcp://127.0.0.1:0")


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_no_stream_sees_a_foreign_token_in_100000_operations(tmp_path: Path) -> None:
    for seed in range(10):
        await check_storm(tmp_path / str(seed), 10_000, seed)


async def test_links_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    rng = random.Random(6)
    async with scripted(tmp_path, step_ms=0.0) as server:
        engine = server._engine
        assert isinstance(engine, ScriptedEngine)
        foreign = 0
        for turn in range(40):
            async with linked(server) as client:
                sinks = []
                for number in range(20):
                    prompt = [turn, number, rng.randrange(500)]
                    sinks.append(CheckingSink(engine.tape.walk(ids_of(prompt))))
                    client.submit(make_call(prompt, max_tokens=1000), sinks[-1])
                await asyncio.sleep(rng.random() * 0.01)
            assert all(sink.error is not None for sink in sinks)
            foreign += sum(sink.num_foreign for sink in sinks)
        assert foreign == 0
        await until(lambda: server.num_connections == server.num_running == 0)
        assert engine.stats().running == 0


async def test_garbage_over_a_socket_ends_that_connection_only(tmp_path: Path) -> None:
    rng = random.Random(7)
    async with scripted(tmp_path) as server, linked(server) as client:
        for _ in range(20):
            reader, writer = await asyncio.open_unix_connection(server.address.path)
            writer.write(rng.randbytes(rng.choice((3, 50, 5000))) + b"\xff" * 8)
            await asyncio.wait_for(reader.read(), 10)  # the challenge, then the end
            writer.close()
        sink = CheckingSink(iter(itertools.repeat(0)))
        client.submit(make_call([1], max_tokens=3), sink)
        await until(lambda: sink.finish)
        await until(lambda: server.num_connections == 1)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for `localhost`, its own authority, with its key in the same file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-x509", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = [
        need("openssl"),
        "req",
        *kind,
        *names,
        "-keyout",
        str(path),
        "-out",
        str(path.with_suffix(".crt")),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    path.write_text(path.read_text() + path.with_suffix(".crt").read_text())
    return path


async def check_long_prompts(folder: Path, tls: Path | None, num_prompts: int = 6) -> None:
    """Prompts of up to several pieces arrive whole beside each other, and their buffers are free after it."""
    client_tls = server_tls = None
    if tls is not None:
        server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server_tls.load_cert_chain(tls)
        client_tls = ssl.create_default_context(cafile=str(tls))
    async with scripted(folder, step_ms=0.5, tls=server_tls, max_model_len=1 << 20) as server:
        engine = server._engine
        assert isinstance(engine, ScriptedEngine)
        client = await open_link(server.address, tls=client_tls)
        await client.welcomed()
        buffers, sinks = [], []
        for number in range(num_prompts):
            ids = [number, *(index % 500 for index in range(7919 * number))]
            buffers.append(bytearray(ids_of(ids)))
            prompt = Prompt(memoryview(buffers[-1]).toreadonly(), len(ids), 0)
            sinks.append(CheckingSink(engine.tape.walk(bytes(buffers[-1]))))  # a function of the whole prompt
            client.submit(EngineCall("scripted", prompt, {}, 5), sinks[-1])
            del prompt
        await until(lambda: all(sink.finish for sink in sinks))
        assert [(sink.num_tokens, sink.num_foreign) for sink in sinks] == [(5, 0)] * num_prompts
        assert not any(is_lent(buffer) for buffer in buffers)
        client.close()


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_long_prompts_arrive_whole_and_their_buffers_are_free(
    tmp_path: Path, certificate: Path, run: Any, has_tls: bool
) -> None:
    gc.disable()
    try:
        run(check_long_prompts(tmp_path, certificate if has_tls else None))
    finally:
        gc.enable()
