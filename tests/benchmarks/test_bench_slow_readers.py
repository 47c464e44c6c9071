"""The benchmark of slow readers: who was closed, by the log, and that the slow ones are slow."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress

from benchmarks.bench_slow_readers import WINDOW_BYTES, closed_after_s, kernel_mib, sip, slow_reader
from tests.tcp_server import listening


def test_the_closed_ones_are_told_from_the_log() -> None:
    lines = [
        {"detail": "reads too slowly: 262145 bytes wait, the limit is 262144", "total_ms": 1500.0},
        {"detail": None, "total_ms": 1.0},
        {"detail": "closed the connection", "total_ms": 2.0},
        {"event": "stream_reader", "detail": "has not read for 5.1 s, the limit is 5 s", "total_ms": 5250.0},
        {"event": "rule_hit"},
    ]
    text = "WARNING reads too slowly\n" + "".join(json.dumps(line) + "\n" for line in lines)
    half = json.dumps(lines[0])[:-10]  # still being written
    assert closed_after_s((text + half).encode()) == [1.5, 5.25]


async def test_a_slow_reader_takes_a_byte_at_a_time() -> None:
    ours, theirs = socket.socketpair()
    gone, end = socket.socketpair()
    end.close()
    with ours, theirs, gone:
        ours.setblocking(False)
        gone.setblocking(False)
        theirs.sendall(b"abc")
        sipping = asyncio.create_task(sip([gone, ours]))
        await asyncio.sleep(0)
        sipping.cancel()
        with suppress(asyncio.CancelledError):
            await sipping
        assert ours.recv(10) == b"bc"


async def test_a_slow_reader_has_a_small_window() -> None:
    asked = asyncio.Queue[bytes]()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.put_nowait(await reader.readexactly(5))
        writer.close()

    async with listening(answered) as server:
        client = await slow_reader(server.port, b"GET /")
        with client:
            assert await asked.get() == b"GET /"
            # The kernel doubles what it is told, for its own book-keeping.
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2 * WINDOW_BYTES


def test_memory_of_sockets_is_a_number() -> None:
    assert kernel_mib() >= 0.0
