"""What a streamed token costs in the gateway, beside a bare uvicorn ASGI app that sends the same frames.

The scripted worker makes 50 tokens a second for each of 100, 400 and 1,000 streams, in a process of its
own; so do the gateway and the bare app. CPU time is the scheduler's, of the one process, while all streams
run. Tokenizer, detokenizer, a filter of 5,000 rules, metrics and heartbeats are on.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import uvloop

from benchmarks.load import StreamClient, StreamResult, chat_request, open_stream
from benchmarks.processes import Measured, embedded_model, free_port, gateway, running, scratch, worker
from benchmarks.report import Report, open_report, parser, percentile
from benchmarks.texts import prompt, write_rules

STEP_MS = 20.0
NUM_RULES = 5000
WARM_UP_S = 1.5


@dataclass(frozen=True, slots=True)
class Bench:
    """The processes and how long to look at them."""

    gateway: Measured
    worker: Measured
    bare: Measured
    window_s: float
    num_runs: int


@dataclass(frozen=True, slots=True)
class Window:
    """What happened while a number of streams ran."""

    num_frames: int
    cpu_s: Sequence[float]  # per watched process
    memory_bytes: int
    results: Sequence[StreamResult]


async def stream_window(
    port: int, num_streams: int, watched: Sequence[Measured], window_s: float, keep_gaps: bool = False
) -> Window:
    """Open streams, let them settle, and count frames and CPU time over the window."""
    num_tokens = int((window_s + WARM_UP_S) * 1000 / STEP_MS) + 10 + num_streams // 20
    clients: list[StreamClient] = []
    memory = watched[0].memory_bytes()
    for index in range(num_streams):
        request = chat_request("scripted", f"stream {index}", num_tokens)
        clients.append(await open_stream("127.0.0.1", port, request, keep_gaps))
    await _wait(lambda: all(client.result.first_s is not None for client in clients))
    await asyncio.sleep(WARM_UP_S)
    memory = watched[0].memory_bytes() - memory
    before = _frames(clients)
    cpu = [process.cpu_s() for process in watched]
    await asyncio.sleep(window_s)
    cpu = [process.cpu_s() - start for process, start in zip(watched, cpu, strict=True)]
    num_frames = _frames(clients) - before
    results = await asyncio.gather(*(client.done for client in clients))
    return Window(num_frames, cpu, memory, results)


def _frames(clients: Sequence[StreamClient]) -> int:
    return sum(client.result.num_content for client in clients)


async def _wait(is_true: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline_s = monotonic() + limit_s
    while not is_true():
        if monotonic() > deadline_s:
            raise TimeoutError("the streams did not start")
        await asyncio.sleep(0.02)


async def per_token(bench: Bench, report: Report, num_streams: int) -> float:
    """CPU per token of the gateway, of the worker, and of the bare app;

    the ratio of the first and the last.
    """
    ours, links, bares, shares = [], [], [], []
    memory = 0.0
    for _ in range(bench.num_runs):
        window = await stream_window(
            bench.gateway.port, num_streams, [bench.gateway, bench.worker], bench.window_s
        )
        ours.append(window.cpu_s[0] / window.num_frames * 1e6)
        links.append(window.cpu_s[1] / window.num_frames * 1e6)
        shares.append(_frames_per_token(window.results))
        # Later runs find the memory that earlier ones gave back to the allocator.
        memory = max(memory, window.memory_bytes / num_streams / 1024)
        bare = await stream_window(bench.bare.port, num_streams, [bench.bare], bench.window_s)
        bares.append(bare.cpu_s[0] / bare.num_frames * 1e6)
    report.add(f"gateway_us_per_token_{num_streams}", ours, "us")
    report.add(f"worker_us_per_token_{num_streams}", links, "us")
    report.add(f"bare_asgi_us_per_token_{num_streams}", bares, "us")
    report.add(f"frames_per_token_{num_streams}", shares)
    report.add(f"memory_kib_per_stream_{num_streams}", memory, "KiB")
    ratios = [gateway_us / bare_us for gateway_us, bare_us in zip(ours, bares, strict=True)]
    return report.add(f"gateway_vs_bare_asgi_{num_streams}", ratios)


def _frames_per_token(results: Sequence[StreamResult]) -> float:
    for result in results:
        if not result.is_done or result.num_tokens is None:
            raise RuntimeError(f"a stream did not end well: {result.status} {result.error}")
    return sum(result.num_content for result in results) / sum(result.num_tokens or 0 for result in results)


async def per_request(bench: Bench, report: Report, num_requests: int) -> None:
    """CPU per request of 30 output tokens, and the time that we add to the worker's own first token."""
    results: list[StreamResult] = []
    cpu_s = bench.gateway.cpu_s()
    start_s = monotonic()
    pending: set[asyncio.Task[StreamResult]] = set()
    for index in range(num_requests):
        await asyncio.sleep(max(0.0, start_s + index / 50 - monotonic()))  # 50 new requests a second
        pending.add(asyncio.create_task(_one(bench.gateway.port, index)))
    results = await asyncio.gather(*pending)
    cpu_s = bench.gateway.cpu_s() - cpu_s
    added = [_added_ttft_ms(result) for result in results]
    report.add("request_30_tokens_cpu_ms", cpu_s / num_requests * 1e3, "ms")
    report.add("added_ttft_p50_ms", percentile(added, 0.5), "ms")
    report.add("added_ttft_p99_ms", percentile(added, 0.99), "ms")


async def _one(port: int, index: int) -> StreamResult:
    request = chat_request("scripted", prompt(40, index), 30)
    client = await open_stream("127.0.0.1", port, request)
    return await client.done


def _added_ttft_ms(result: StreamResult) -> float:
    """The client's TTFT less what the worker reports of its own queue and prefill."""
    assert result.first_s is not None, result.error
    ttft_ms = (result.first_s - result.started_s) * 1e3
    return ttft_ms - result.timings["queue_ms"] - result.timings["prefill_ms"]


async def measure(bench: Bench, report: Report, counts: Sequence[int], num_requests: int) -> None:
    ratios = [await per_token(bench, report, num_streams) for num_streams in counts]
    await per_request(bench, report, num_requests)
    report.goal("gateway_vs_bare_asgi", statistics.median(ratios), 1.4, "x")
    frames = min(value for name, value in report.metrics.items() if name.startswith("frames_per_token"))
    report.goal("frames_per_token", frames, 0.98, "", at_most=False)


def main(arguments: argparse.Namespace) -> int:
    counts = (100, 400) if arguments.quick else (100, 400, 1000)
    window_s, num_runs = (2.5, 1) if arguments.quick else (3.0, 7)
    report = open_report("bench_gateway", arguments)
    with scratch() as folder:
        rules = write_rules(folder / "rules.txt", NUM_RULES)
        bare_port = free_port()
        num_frames = int((window_s + WARM_UP_S) * 1000 / STEP_MS) + 10 + max(counts) // 20
        bare = [sys.executable, "-m", "benchmarks.bare_asgi", str(bare_port), str(num_frames), str(STEP_MS)]
        scripted = ("--scripted", "--tokenizer", str(embedded_model()), "--step-ms", str(STEP_MS))
        with (
            worker(folder, *scripted) as (linked, address),
            gateway(folder, [address], "--rules", str(rules)) as ours,
            running(bare, folder / "bare.log", bare_port) as app,
        ):
            bench = Bench(ours, linked, app, window_s, num_runs)
            uvloop.run(measure(bench, report, counts, 200 if arguments.quick else 1000))
    return report.close()


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
