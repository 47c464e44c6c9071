"""What an event of a stream and a request cost a client of HTTP: ours, aiohttp, httpx, the least possible.

A server in another process sends a chat chunk of 190 bytes to each of 200 streams 20 times a second, each in
a write and an HTTP chunk of its own. A way opens all streams and lets them settle; then events and CPU time
are counted; the ways take turns. Every way ends at the payload of the event: ours and those called `reads`
cut the body's reads with `backend/sse_reader.py`, those called `lines` take the library's lines, as most
programs do. `bare` parses HTTP with httptools, counts chunks, and cuts nothing: nearly all of it is the
kernel's and the loop's read. Then small requests, 16 at a time, each with its whole response.

Verdict: an event costs ours 1.1 of what it costs `bare`, aiohttp 1.8 of ours with reads and 2.1 with lines,
httpx 6. A request costs aiohttp 2.3 of ours, httpx 35. The losers are aiohttp, which wakes a task for every
read, and httpx, in which five generators hand a read on.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections.abc import Callable
from time import monotonic, process_time
from typing import Any, Final

import uvloop

from benchmarks.http_clients import AT_ONCE, WAYS, Counted, Way
from benchmarks.processes import free_port, running, scratch
from benchmarks.report import Report, open_report, parser

STEP_MS: Final = 50.0
NUM_STREAMS: Final = 200


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
