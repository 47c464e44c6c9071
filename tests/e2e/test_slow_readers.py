"""Clients that do not read, or read byte by byte, beside quick ones: bounded memory, a named end, and nobody
else is slower for it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from tests import stack
from tests.e2e.asking import CHAT, COMPLETE, Outcome, ask, chat, streamed, whole
from tests.e2e.resting import (
    assert_no_fault,
    at_rest,
    num_jobs,
    request_lines,
    resident_bytes,
    wait_for,
    wait_until_held,
)
from tests.stack import Gateway, Worker
from tests.wire import LIMIT_S, Wire

MAX_BYTES = 64 << 10
MAX_FRAME_BYTES = 8 << 10  # of the frames here
NUM_SLOW = 6
ENDLESS = 20_000
# About 3 KB a frame: the kernel's buffers, some megabytes that nobody bounds, are full within seconds.
LARGE: dict[str, Any] = {"logprobs": True, "top_logprobs": 20}


@dataclass(frozen=True, slots=True)
class Served:
    """One worker behind two gateways: one is impatient about bytes, the other about time."""

    worker: Worker
    by_bytes: Gateway
    by_time: Gateway


@pytest.fixture(scope="module")
def served(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("slow_readers")
    with ExitStack() as running:
        worker = running.enter_context(
            stack.start_scripted(folder, embedded_model, "--step-ms", "1", "--prefill-ms-per-1k", "0")
        )

        def gateway(name: str, max_bytes: int, max_s: float) -> Gateway:
            limits = ("--slow-reader-bytes", str(max_bytes), "--slow-reader-s", str(max_s))
            return running.enter_context(stack.start_gateway(folder, [worker], *limits, name=name))

        yield Served(worker, gateway("by_bytes", MAX_BYTES, 60), gateway("by_time", 256 << 20, 0.5))


@asynccontextmanager
async def small_window(port: int, body: dict[str, Any]) -> AsyncIterator[socket.socket]:
    """A socket that has asked, and takes as little as the kernel allows as long as nobody reads from it."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))
        content = json.dumps(body).encode()
        lines = ("host: localhost", "connection: close", f"content-length: {len(content)}", "", "")
        await loop.sock_sendall(
            client,
            "\r\n".join((f"POST {CHAT} HTTP/1.1", "content-type: application/json", *lines)).encode()
            + content,
        )
        yield client


async def rest_of(client: socket.socket, num_bytes: int = 1 << 16) -> bytes:
    """All that still comes until the peer closes, read in such pieces."""
    received = bytearray()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LIMIT_S):
            while piece := await loop.sock_recv(client, num_bytes):
                received += piece
    except ConnectionError:
        pass
    return bytes(received)


async def until(gateway: Gateway, is_true: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_for, gateway, is_true, what)


async def quick_clients(port: int, expected: Outcome) -> None:
    """They get every token; on a busy machine the link may bring two at once, so frames are not counted."""
    outcomes = await asyncio.gather(*(ask(port, chat("Be quick", 200)) for _ in range(10)))
    assert [outcome.kind for outcome in outcomes] == [COMPLETE] * 10
    assert {outcome.text for outcome in outcomes} == {expected.text}


async def test_clients_that_do_not_read_are_closed_at_the_bound_and_quick_ones_get_all(
    served: Served,
) -> None:
    gateway, worker = served.by_bytes, served.worker
    expected = await ask(gateway.port, chat("Be quick", 200))
    assert expected.kind == COMPLETE
    before, memory = at_rest(gateway, [worker]), resident_bytes(gateway.pid)
    async with asyncio.timeout(90), _slow(gateway.port, NUM_SLOW) as clients:
        await until(gateway, lambda: num_jobs(worker) == NUM_SLOW, "running the slow ones")
        await quick_clients(gateway.port, expected)
        await until(gateway, lambda: num_jobs(worker) == 0, "rid of those who do not read")
        assert resident_bytes(gateway.pid) - memory < 32 << 20  # an endless answer each would be hundreds
        assert gateway.metric("headrace_buffered_peak_bytes") <= MAX_BYTES + MAX_FRAME_BYTES
        for client in clients:
            assert b"[DONE]" not in (await rest_of(client))[-200:]
    wait_until_held(gateway, [worker], before)
    for line in lines_of_the_dropped(gateway, NUM_SLOW):
        assert line["ended"] == "client_closed"
        assert "reads too slowly" in line["detail"]
        assert str(MAX_BYTES) in line["detail"]
        assert MAX_BYTES < line["buffered_peak_bytes"] <= MAX_BYTES + MAX_FRAME_BYTES
    assert_no_fault(gateway)


def lines_of_the_dropped(gateway: Gateway, count: int) -> list[dict[str, Any]]:
    """The request log's lines of all that was not completed; a line comes a moment after its end."""

    def found() -> list[dict[str, Any]]:
        return [line for line in request_lines(gateway) if line["ended"] != "complete"]

    wait_for(gateway, lambda: len(found()) >= count, f"logging {count}")
    lines = found()
    assert len(lines) == count
    return lines


@asynccontextmanager
async def _slow(port: int, count: int) -> AsyncIterator[list[socket.socket]]:
    """Clients that ask for an endless answer and do not read."""
    if count == 0:
        yield []
        return
    body = chat(f"Endless {count}", ENDLESS, **LARGE)
    async with small_window(port, body) as client, _slow(port, count - 1) as others:
        yield [client, *others]


async def test_client_that_does_not_read_is_closed_after_its_time(served: Served) -> None:
    gateway, worker = served.by_time, served.worker
    before = at_rest(gateway, [worker])
    async with small_window(gateway.port, chat("Endless", ENDLESS, **LARGE)) as client:
        await until(gateway, lambda: num_jobs(worker) == 1, "running")
        await until(gateway, lambda: num_jobs(worker) == 0, "rid of it")
        assert b"[DONE]" not in (await rest_of(client))[-200:]
    wait_until_held(gateway, [worker], before)
    (line,) = lines_of_the_dropped(gateway, 1)
    assert line["ended"] == "client_closed"
    assert "has not read for" in line["detail"]
    assert "0.5 s" in line["detail"]
    assert_no_fault(gateway)


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_reads_byte_by_byte_gets_all(served: Served, stream: bool) -> None:
    port, body = served.by_bytes.port, chat("Slowly, please", 50, stream=stream)
    expected = await ask(port, body)
    assert expected.kind == COMPLETE
    async with small_window(port, body) as client:
        received = await rest_of(client, num_bytes=1)
    reader = asyncio.StreamReader()
    reader.feed_data(received)
    reader.feed_eof()
    outcome = await outcome_of(Wire(reader, cast(asyncio.StreamWriter, None)), stream)
    assert (outcome.kind, outcome.text) == (COMPLETE, expected.text)


async def outcome_of(wire: Wire, stream: bool) -> Outcome:
    """Of an answer that has been received."""
    head = await wire.head()
    return streamed(await wire.frames()) if stream else whole(head, await wire.body())
