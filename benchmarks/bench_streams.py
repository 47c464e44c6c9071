"""What a token costs with the journal of resumable streams on, beside plain SSE with the same prompts.

The scripted worker makes 50 tokens a second for each of 100 and of 400 streams, one reader each. In turn, in
one run: plain SSE; streams in memory; streams whose journal is in a shared store (Valkey), with the readers
at the process that generates; and the same with all readers at another gateway process. CPU time is the
scheduler's, of each process apart. The filter is off: it costs the same in each, and would only make the
journal's share smaller.

A second worker fills journals as quick as the gateway takes them: what an event takes in memory and in the
store, and how fast a reader that comes back gets 2,000 of them.

Verdict: the journal costs 1.15 of plain SSE in memory, and 1.2 to 1.4 with the store, whose own CPU time is a
fifth of plain SSE on top. The loser is a reader at another process: the three together take twice plain SSE.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Final

import uvloop

from benchmarks.event_load import EventClient, Started, delete_stream, follow, start_stream
from benchmarks.load import StreamClient, chat_request, open_stream
from benchmarks.processes import Measured, embedded_model, gateway, scratch, worker
from benchmarks.report import Report, open_report, parser, percentile
from benchmarks.store_server import StoreServer, store_server

HOST: Final = "127.0.0.1"
STEP_MS: Final = 20.0
WARM_UP_S: Final = 1.0
SETTLE_S: Final = 0.3  # until what was left is aborted
AT_ONCE: Final = 8  # clients that come, and go, at the same time
ENDLESS: Final = 20_000
MODEL: Final = "scripted"
QUICK_MODEL: Final = "quick"  # of the worker that fills journals
NUM_EVENTS: Final = 2000  # tokens of the streams that are read again


@dataclass(frozen=True, slots=True)
class Bench:
    """`memory` keeps its streams alone; `writer` and `reader` share the store."""

    memory: Measured
    writer: Measured
    reader: Measured
    store: StoreServer
    window_s: float
    num_runs: int

    @property
    def ways(self) -> list[Way]:
        """The yardstick first."""
        store = self.store.process
        return [
            Way("plain", None, self.memory, {"gateway": self.memory}),
            Way("memory", self.memory, self.memory, {"gateway": self.memory}),
            Way("store", self.writer, self.writer, {"gateway": self.writer, "server": store}),
            Way(
                "across",
                self.writer,
                self.reader,
                {"writer": self.writer, "reader": self.reader, "server": store},
            ),
        ]


@dataclass(frozen=True, slots=True)
class Way:
    """Where streams start, None for plain SSE, where they are read, and whose CPU time is taken."""

    name: str
    starts_at: Measured | None
    read_at: Measured
    watched: dict[str, Measured]

    async def open(self, index: int) -> tuple[StreamClient, Started | None]:
        """A client whose answer does not end by itself."""
        prompt = f"stream {index}"
        if self.starts_at is None:
            request = chat_request(MODEL, prompt, ENDLESS)
            return await open_stream(HOST, self.read_at.port, request, keep_gaps=True), None
        started = await start_stream(HOST, self.starts_at.port, chat(MODEL, prompt, ENDLESS))
        return await follow(HOST, self.read_at.port, started, keep_gaps=True), started

    async def end(self, started: Started | None, at_once: asyncio.Semaphore) -> None:
        if started is not None and self.starts_at is not None:
            async with at_once:
                await delete_stream(HOST, self.starts_at.port, started)


@dataclass(slots=True)
class Window:
    """CPU microseconds per frame of each process, and the gaps between frames of a stream."""

    us: dict[str, float]
    gaps_ms: Sequence[float]


@dataclass(slots=True)
class Windows:
    """All windows of one way."""

    found: list[Window] = field(default_factory=list)

    def us(self, *processes: str) -> list[float]:
        """Of these processes together."""
        return [sum(window.us[name] for name in processes) for window in self.found]

    def gaps_ms(self, share: float) -> list[float]:
        return [percentile(window.gaps_ms, share) for window in self.found]


def chat(model: str, prompt: str, num_tokens: int) -> dict[str, object]:
    """The chat that `load.chat_request` asks for."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num_tokens,
        "stream": True,
    }


async def window(way: Way, num_streams: int, window_s: float) -> Window:
    """Open streams, let them settle, count frames and CPU time; then all leave, and streams are deleted."""
    at_once = asyncio.Semaphore(AT_ONCE)

    async def opened(index: int) -> tuple[StreamClient, Started | None]:
        async with at_once:
            return await way.open(index)

    streams = await asyncio.gather(*(opened(index) for index in range(num_streams)))
    clients = [client for client, _ in streams]
    await _wait(lambda: all(client.result.first_s is not None for client in clients))
    await asyncio.sleep(WARM_UP_S)
    for client in clients:
        client.result.gaps_s.clear()
    num_frames = sum(client.result.num_content for client in clients)
    cpu_s = {name: process.cpu_s() for name, process in way.watched.items()}
    await asyncio.sleep(window_s)
    cpu_s = {name: process.cpu_s() - cpu_s[name] for name, process in way.watched.items()}
    num_frames = sum(client.result.num_content for client in clients) - num_frames
    gaps_ms = [1e3 * gap_s for client in clients for gap_s in client.result.gaps_s]
    for client in clients:
        if client.done.done():
            raise RuntimeError(f"{way.name}: a stream ended: {client.result.status} {client.result.error}")
        client.close()
    await asyncio.gather(*(way.end(started, at_once) for _, started in streams))
    await asyncio.sleep(SETTLE_S)
    return Window({name: used_s / num_frames * 1e6 for name, used_s in cpu_s.items()}, gaps_ms)


async def _wait(is_true: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline_s = monotonic() + limit_s
    while not is_true():
        if monotonic() > deadline_s:
            raise TimeoutError("the streams did not start")
        await asyncio.sleep(0.02)


async def per_token(bench: Bench, report: Report, num_streams: int) -> dict[str, list[float]]:
    """CPU per token of each way; the ratios to plain SSE, of each run."""
    ways = {way.name: Windows() for way in bench.ways}
    for _ in range(bench.num_runs):
        for way in bench.ways:
            ways[way.name].found.append(await window(way, num_streams, bench.window_s))
    for name, windows in ways.items():
        for process in windows.found[0].us:
            report.add(f"{name}_{process}_us_per_token_{num_streams}", windows.us(process), "us")
        report.add(f"{name}_gap_p50_ms_{num_streams}", windows.gaps_ms(0.5), "ms")
        report.add(f"{name}_gap_p99_ms_{num_streams}", windows.gaps_ms(0.99), "ms")
    compared = {
        "journal_memory_vs_plain": ways["memory"].us("gateway"),
        "journal_store_vs_plain": ways["store"].us("gateway"),
        "journal_store_and_server_vs_plain": ways["store"].us("gateway", "server"),
        "journal_across_writer_vs_plain": ways["across"].us("writer"),
        "journal_across_reader_vs_plain": ways["across"].us("reader"),
        "journal_across_all_vs_plain": ways["across"].us("writer", "reader", "server"),
    }
    plain = ways["plain"].us("gateway")
    ratios = {
        name: [ours / theirs for ours, theirs in zip(values, plain, strict=True)]
        for name, values in compared.items()
    }
    for name, values in ratios.items():
        report.add(f"{name}_{num_streams}", values)
    return ratios


async def fill(port: int, num_streams: int) -> list[Started]:
    """Journals of `NUM_EVENTS` tokens each, that have ended."""
    chats = [chat(QUICK_MODEL, f"journal {index}", NUM_EVENTS) for index in range(num_streams)]
    started = [await start_stream(HOST, port, each) for each in chats]
    while metric(port, "headrace_open_requests"):  # noqa: ASYNC110  # another process has it
        await asyncio.sleep(0.05)
    return started


async def replay(port: int, started: Started) -> EventClient:
    """Read all of a stream."""
    client = await follow(HOST, port, started)
    async with asyncio.timeout(60):
        result = await client.done
    if not result.is_done or result.num_content < NUM_EVENTS // 2:
        raise RuntimeError(f"a replay brought {result.num_content} events: {result.error}")
    return client


async def report_replay(report: Report, name: str, port: int, journals: Sequence[Started]) -> None:
    clients = [await replay(port, started) for started in journals]
    times_s = [(client.result.ended_s or 0.0) - client.result.started_s for client in clients]
    pairs = list(zip(clients, times_s, strict=True))
    report.add(f"replay_{name}_kevents_per_s", [client.last_id / time_s / 1e3 for client, time_s in pairs])
    report.add(
        f"replay_{name}_mb_per_s", [client.num_bytes / time_s / 1e6 for client, time_s in pairs], "MB/s"
    )


async def kept(bench: Bench, report: Report, num_journals: int, num_replays: int) -> None:
    """What events take where they are kept, and how quick they come back."""
    for way, port in (("memory", bench.memory.port), ("store", bench.writer.port)):
        await fill(port, 1)  # warm: the model, the connection to the store
        memory, used = bench.memory.memory_bytes(), bench.store.used_bytes()
        journals = await fill(port, num_journals)
        memory, used = bench.memory.memory_bytes() - memory, bench.store.used_bytes() - used
        num_events = num_journals * (await replay(port, journals[-1])).last_id
        if way == "memory":
            report.add("journal_kib_per_stream_of_2000", memory / num_journals / 1024, "KiB")
            report.add("journal_bytes_per_event", memory / num_events, "bytes")
        else:
            report.add("store_bytes_per_event", used / num_events, "bytes")
            # Its copy does not have them yet: this is the store's speed too.
            await report_replay(report, "across", bench.reader.port, journals[:num_replays])
        await report_replay(report, way, port, journals[:num_replays])
        for started in journals:
            await delete_stream(HOST, port, started)


def metric(port: int, name: str) -> float:
    """The sum of a metric over its labels. Raises `KeyError` if the gateway does not have it."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    values = [float(value) for key, value in pairs if key.partition("{")[0] == name]
    if not values:
        raise KeyError(name)
    return sum(values)


def report_appends(bench: Bench, report: Report) -> None:
    """How long the writing gateway waited for the store, on average over all its appends."""
    name = "headrace_store_append_seconds"
    count = metric(bench.writer.port, f"{name}_count")
    report.add("store_append_mean_ms", metric(bench.writer.port, f"{name}_sum") / count * 1e3, "ms")


async def measure(bench: Bench, report: Report, arguments: argparse.Namespace) -> None:
    num_journals, num_replays = (10, 3) if arguments.quick else (100, 10)
    # First: where many streams have been, memory comes from what they left.
    await kept(bench, report, num_journals, num_replays)
    ratios = [await per_token(bench, report, num_streams) for num_streams in (100, 400)]
    report_appends(bench, report)
    for name, limit in (("journal_memory_vs_plain", 1.3), ("journal_store_vs_plain", 1.8)):
        worst = max(percentile(each[name], 0.5) for each in ratios)
        report.goal(name, worst, limit, "x")


def main(arguments: argparse.Namespace) -> int:
    window_s, num_runs = (1.5, 1) if arguments.quick else (3.0, 7)
    report = open_report("bench_streams", arguments)
    with scratch() as folder, ExitStack() as running:
        server = running.enter_context(store_server(folder))
        uvloop.run(measure(_started(running, folder, server, window_s, num_runs), report, arguments))
    return report.close()


def _started(running: ExitStack, folder: Path, server: StoreServer, window_s: float, num_runs: int) -> Bench:
    """Two workers, and three gateways in front of both."""
    scripted = ("--scripted", "--tokenizer", str(embedded_model()), "--prefill-ms-per-1k", "0")
    steps = {MODEL: STEP_MS, QUICK_MODEL: 1.0}
    addresses = [
        running.enter_context(
            worker(folder, *scripted, "--step-ms", str(step_ms), "--served-model-name", name, name=name)
        )[1]
        for name, step_ms in steps.items()
    ]

    def start(name: str, *args: str) -> Measured:
        return running.enter_context(gateway(folder, addresses, *args, name=name))

    shared = ("--redis", server.url)
    return Bench(
        start("memory"), start("writer", *shared), start("reader", *shared), server, window_s, num_runs
    )


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
