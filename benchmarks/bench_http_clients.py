"""What an event of a stream and a request cost a client of HTTP: ours, aiohttp, httpx, the least possible.

A server in another process sends a chat chunk of 190 bytes to each of 200 streams 20 times a second, each in
a write and an HTTP chunk of its own. A way opens all streams and lets them settle; then events and CPU time
are counted; the ways take turns. Every way ends at the payload of the event: ours and those called `reads`
cut the body's reads with `backend/sse_reader.py`, those called `lines` take the library's lines, as most
programs do. `bare` parses HTTP with httptools, counts chunks, and cuts nothing: nearly all of it is the
kernel's and the loop's read. Then small requests, 16 at a time, each with its whole response.

Verdict: an event costs ours 1.15 of what it costs `bare`, aiohttp 1.8 of ours with reads and 2.1 with lines,
httpx 6. A request costs aiohttp 3 of ours, httpx 50. The losers are aiohttp, which wakes a task for every
read, and httpx, in which five generators hand a read on.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from time import monotonic, process_time
from typing import Any, Final, Protocol, cast

import aiohttp
import httptools
import httpx
import uvloop

from backend.http_client import HttpClient
from backend.http_ports import Headers, HttpFault, HttpRequest, Origin
from backend.sse_reader import SseReader
from benchmarks.processes import free_port, running, scratch
from benchmarks.report import Report, open_report, parser

HOST: Final = "127.0.0.1"
STEP_MS: Final = 50.0
NUM_STREAMS: Final = 200
AT_ONCE: Final = 16
MAX_EVENT_BYTES: Final = 1 << 20
BODY: Final = b'{"model":"m","input":"a short text"}'
JSON: Final = (b"content-type", b"application/json")


class Counted:
    """Events so far, of all streams."""

    def __init__(self) -> None:
        self.num_events = 0


class Way(Protocol):
    """A client of HTTP."""

    async def open(self, port: int) -> None: ...

    def stream(self, counted: Counted) -> Coroutine[Any, Any, None]:
        """One stream, until it is cancelled."""

    async def request(self) -> None:
        """A request with its whole response."""

    async def close(self) -> None: ...


# -- ours ----------------------------------------------------------------------------------------------------


class _Events:
    """Our receiver, as an engine's is: every event is told at once."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self._read = SseReader(MAX_EVENT_BYTES).feed
        self.failed_with: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begun(self, status: int, headers: Headers) -> None:
        pass

    def data(self, data: bytes) -> None:
        for _ in self._read(data):
            self._counted.num_events += 1

    def ended(self) -> None:
        self.failed(HttpFault("the stream ended"))

    def failed(self, fault: HttpFault) -> None:
        self.failed_with.set_exception(fault)


class Ours:
    name = "ours"

    async def open(self, port: int) -> None:
        self._client, self._origin = HttpClient(), Origin(HOST, port)

    async def stream(self, counted: Counted) -> None:
        events = _Events(counted)
        call = self._client.send(self._origin, HttpRequest("POST", "/stream", [JSON], BODY), events)
        try:
            await events.failed_with
        finally:
            call.abort()

    async def request(self) -> None:
        request = HttpRequest("POST", "/v1/embeddings", [JSON], BODY)
        assert (await self._client.fetch(self._origin, request, 30.0, 1 << 20)).status == 200

    async def close(self) -> None:
        await self._client.close()


# -- the least -----------------------------------------------------------------------------------------------


class _Bare(asyncio.Protocol):
    """Parses, counts chunks of body, and that is all. Answers end a future."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self._parts: list[bytes] = []
        self.on_body = self._parts.append
        self._feed = httptools.HttpResponseParser(self).feed_data
        self.answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._feed(data)
        if self._parts:
            self._counted.num_events += len(self._parts)
            self._parts.clear()

    def on_message_complete(self) -> None:
        if self.answered is not None:
            self.answered.set_result(None)


class Bare:
    name = "bare"
    _REQUEST: Final = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"

    async def open(self, port: int) -> None:
        self._port = port
        self._free: list[_Bare] = []

    async def _connected(self, counted: Counted) -> _Bare:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: _Bare(counted), HOST, self._port))[1]

    async def stream(self, counted: Counted) -> None:
        protocol = await self._connected(counted)
        try:
            protocol.transport.write(self._REQUEST % (b"/stream", len(BODY), BODY))
            await asyncio.get_running_loop().create_future()
        finally:
            protocol.transport.abort()

    async def request(self) -> None:
        protocol = self._free.pop() if self._free else await self._connected(Counted())
        protocol.answered = asyncio.get_running_loop().create_future()
        protocol.transport.write(self._REQUEST % (b"/v1/embeddings", len(BODY), BODY))
        await protocol.answered
        self._free.append(protocol)

    async def close(self) -> None:
        for protocol in self._free:
            protocol.transport.abort()


# -- the others ----------------------------------------------------------------------------------------------


class Aiohttp:
    def __init__(self, has_lines: bool) -> None:
        self.name = "aiohttp_lines" if has_lines else "aiohttp_reads"
        self._has_lines = has_lines

    async def open(self, port: int) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(f"http://{HOST}:{port}", connector=connector, timeout=timeout)

    async def stream(self, counted: Counted) -> None:
        headers = {"content-type": "application/json"}
        async with self._session.post("/stream", data=BODY, headers=headers) as response:
            if self._has_lines:
                async for line in response.content:
                    counted.num_events += line.startswith(b"data: ")
            else:
                read = SseReader(MAX_EVENT_BYTES).feed
                async for data in response.content.iter_any():
                    counted.num_events += len(read(data))

    async def request(self) -> None:
        headers = {"content-type": "application/json"}
        async with self._session.post("/v1/embeddings", data=BODY, headers=headers) as response:
            assert await response.read()

    async def close(self) -> None:
        await self._session.close()


class Httpx:
    def __init__(self, has_lines: bool) -> None:
        self.name = "httpx_lines" if has_lines else "httpx_reads"
        self._has_lines = has_lines

    async def open(self, port: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=AT_ONCE)
        self._client = httpx.AsyncClient(base_url=f"http://{HOST}:{port}", limits=limits, timeout=None)

    async def stream(self, counted: Counted) -> None:
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", "/stream", content=BODY, headers=headers) as response:
            if self._has_lines:
                async for line in response.aiter_lines():
                    counted.num_events += line.startswith("data: ")
            else:
                read = SseReader(MAX_EVENT_BYTES).feed
                async for data in response.aiter_raw():
                    counted.num_events += len(read(data))

    async def request(self) -> None:
        headers = {"content-type": "application/json"}
        response = await self._client.post("/v1/embeddings", content=BODY, headers=headers)
        assert response.content

    async def close(self) -> None:
        await self._client.aclose()


WAYS: Final[tuple[Callable[[], Any], ...]] = (
    Bare,
    Ours,
    lambda: Aiohttp(False),
    lambda: Aiohttp(True),
    lambda: Httpx(False),
    lambda: Httpx(True),
)


# -- all -----------------------------------------------------------------------------------------------------


async def us_per_event(way: Way, port: int, num_streams: int, window_s: float) -> float:
    """CPU microseconds of this process per event. Raises what ends a stream early."""
    counted = Counted()
    await way.open(port)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(way.stream(counted)) for _ in range(num_streams)]
        await _wait(lambda: counted.num_events >= 4 * num_streams)
        num_events, cpu_s = counted.num_events, process_time()
        await asyncio.sleep(window_s)
        num_events, cpu_s = counted.num_events - num_events, process_time() - cpu_s
        for task in tasks:
            task.cancel()
    await way.close()
    return cpu_s / num_events * 1e6


async def us_per_request(way: Way, port: int, num_requests: int) -> float:
    await way.open(port)
    left = num_requests

    async def ask() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await way.request()

    await _all(way.request for _ in range(AT_ONCE))  # connects
    cpu_s = process_time()
    await _all(ask for _ in range(AT_ONCE))
    cpu_s = process_time() - cpu_s
    await way.close()
    return cpu_s / num_requests * 1e6


async def _all(works: Any) -> None:
    await asyncio.gather(*(work() for work in works))


async def _wait(is_true: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline_s = monotonic() + limit_s
    while not is_true():
        if monotonic() > deadline_s:
            raise TimeoutError("the streams did not start")
        await asyncio.sleep(0.02)


async def measure(
    report: Report, port: int, num_streams: int, window_s: float, num_requests: int, num_runs: int
) -> None:
    events: dict[str, list[float]] = {}
    requests: dict[str, list[float]] = {}
    for run in range(num_runs):
        ways = [make() for make in WAYS]
        for way in ways if run % 2 == 0 else reversed(ways):  # whoever comes second has it warmer
            gc.collect()  # nobody pays for what another one has left
            events.setdefault(way.name, []).append(await us_per_event(way, port, num_streams, window_s))
            requests.setdefault(way.name, []).append(await us_per_request(way, port, num_requests))
    for kind, found in (("event", events), ("request", requests)):
        for name, values in found.items():
            report.add(f"{name}_us_per_{kind}", values, "us")
        for name in found.keys() - {"ours"}:
            pairs = zip(found[name], found["ours"], strict=True)
            report.add(f"{name}_vs_ours_per_{kind}", [theirs / ours for theirs, ours in pairs], "x")


def main(arguments: argparse.Namespace) -> int:
    report = open_report("bench_http_clients", arguments)
    window_s, num_requests, num_runs = (1.0, 500, 2) if arguments.quick else (2.0, 3000, 7)
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.sse_server", str(port), str(STEP_MS)]
    with scratch() as folder, running(command, folder / "server.log", port):
        uvloop.run(measure(report, port, NUM_STREAMS, window_s, num_requests, num_runs))
    for kind, least in (("event", 1.5), ("request", 1.5)):
        name = f"aiohttp_reads_vs_ours_per_{kind}"
        report.goal(name, report.metrics[name], least, "x", at_most=False)
    return report.close()


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
