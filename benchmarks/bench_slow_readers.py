"""Readers of one byte a second beside quick ones: what the quick ones see, what it takes, who is closed.

200 quick streams of 50 tokens a second run alone, then with company: the same heavy answers (20 log
probabilities a token, 2 KB a frame) read by quick readers, or by slow ones; and slow readers of a resumable
stream that is over, who are owed all of it at once. Phases alternate. The gaps are those of the quick
streams' frames, over a whole phase: the kernel's buffers fill, the gateway's bound is reached, the slow ones
are closed. What heavy answers cost everybody is in the phase with quick company: the goal compares with that.

`--nginx` puts the real nginx between all readers and the gateway.

Verdict: the quick ones' gaps are the same; a slow reader costs 0.3 MiB in the gateway and 0.2 in the kernel
until it is closed, 0.6 with nginx between; a slow reader of a journal costs the gateway nothing. The loser is
the kernel's own choice of buffers: it took 3.8 MiB for each before the gateway noticed, 9.5 with nginx, and
7 and 20 s until they were closed instead of 1 and 2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Final

import uvloop

from benchmarks.event_load import EventClient, Started, follow, start_stream
from benchmarks.load import StreamClient, chat_request, open_stream, request
from benchmarks.nginx_site import nginx
from benchmarks.processes import Measured, embedded_model, gateway, scratch, worker
from benchmarks.report import Report, open_report, parser, percentile

HOST: Final = "127.0.0.1"
NUM_QUICK: Final = 200
STEP_MS: Final = 20.0
SLOW_READER_S: Final = 5.0
WINDOW_BYTES: Final = 4096  # a slow reader's receive buffer
SAMPLE_S: Final = 0.1
ENDLESS: Final = 20_000
JOURNAL_TOKENS: Final = 8000
JOURNAL_BYTES: Final = 12_000_000  # more than the kernel's buffers and nginx take for one who does not read
MAX_JOURNAL_BYTES: Final = 64 << 20
REASONS: Final = ("reads too slowly", "has not read for")  # of the gateway's log lines
PHASES: Final = ("alone", "quick_company", "slow", "slow_resumable")
HEAVY: Final = ("quick_company", "slow")  # phases in which heavy answers are generated


@dataclass(frozen=True, slots=True)
class Sizes:
    """`heavy_step_ms`: of the worker whose answers the company gets. `window_s`: of a phase with heavy
    answers, until the kernel's buffers are full and the slow ones are closed; `short_s`: of another phase."""

    num_slow: int
    heavy_step_ms: float
    window_s: float
    short_s: float
    num_runs: int


@dataclass(frozen=True, slots=True)
class Phase:
    """What was seen of the quick streams and of the gateway. MiB are peaks over the phase, over its start."""

    gaps_ms: Sequence[float]
    gateway_mib: float
    kernel_mib: float
    closed_after_s: Sequence[float]


@dataclass(slots=True)
class Bench:
    """`port` is where all readers come in: the gateway's, or nginx's."""

    gateway: Measured
    port: int
    sizes: Sizes
    journal: Started | None = None
    peaks: dict[str, float] = field(default_factory=dict)

    async def phase(self, name: str) -> Phase:
        """The quick streams, with this company."""
        clients = await self._quick()
        start = self.gateway.log.stat().st_size
        async with self._sampled(), self._company(name):
            for client in clients:
                client.result.gaps_s.clear()
            await asyncio.sleep(self.sizes.window_s if name in HEAVY else self.sizes.short_s)
            gaps_ms = [1e3 * gap_s for client in clients for gap_s in client.result.gaps_s]
            num_slow = self.sizes.num_slow if name.startswith("slow") else 0
            closed = await self._closed(start, num_slow)
        for client in clients:
            if client.result.error or client.result.is_done:
                raise RuntimeError(f"a quick stream ended: {client.result.status} {client.result.error}")
            client.close()
        await asyncio.sleep(0.5)  # all are aborted in the worker
        return Phase(gaps_ms, self.peaks["gateway"], self.peaks["kernel"], closed)

    async def _quick(self) -> list[StreamClient]:
        clients = []
        for index in range(NUM_QUICK):
            asking = chat_request("scripted", f"quick {index}", ENDLESS)
            clients.append(await open_stream(HOST, self.port, asking, keep_gaps=True))
        await asyncio.sleep(1.0)
        return clients

    @asynccontextmanager
    async def _company(self, name: str) -> AsyncIterator[None]:
        if name == "alone":
            yield
        elif name == "quick_company":
            others = [await open_stream(HOST, self.port, each) for each in self._heavy()]
            yield
            for each in others:
                each.close()
        else:
            asked = self._heavy() if name == "slow" else [self._reading()] * self.sizes.num_slow
            readers = [await slow_reader(self.port, each) for each in asked]
            sipping = asyncio.create_task(sip(readers))
            yield
            sipping.cancel()
            for reader in readers:
                reader.close()

    def _heavy(self) -> list[bytes]:
        return [request(heavy(f"heavy {index}", ENDLESS)) for index in range(self.sizes.num_slow)]

    def _reading(self) -> bytes:
        assert self.journal is not None
        return EventClient.asking(self.journal.url)

    @asynccontextmanager
    async def _sampled(self) -> AsyncIterator[None]:
        """Keep the peaks of memory while this runs."""
        before = self._memory()
        self.peaks = dict.fromkeys(before, 0.0)

        async def watch() -> None:
            while True:
                for name, mib in self._memory().items():
                    self.peaks[name] = max(self.peaks[name], mib - before[name])
                await asyncio.sleep(SAMPLE_S)

        watching = asyncio.create_task(watch())
        yield
        watching.cancel()

    def _memory(self) -> dict[str, float]:
        return {"gateway": self.gateway.memory_bytes() / 2**20, "kernel": kernel_mib()}

    async def _closed(self, start: int, expected: int, limit_s: float = 40.0) -> list[float]:
        """After how long each slow reader was closed, from the log lines past this byte."""
        deadline_s = monotonic() + limit_s
        while True:
            found = closed_after_s(self.gateway.log.read_bytes()[start:])
            if len(found) >= expected or monotonic() > deadline_s:
                return found
            await asyncio.sleep(0.2)


def heavy(prompt: str, num_tokens: int) -> dict[str, Any]:
    """A chat whose frames have 2 KB."""
    messages = [{"role": "user", "content": prompt}]
    common = {"model": "heavy", "messages": messages, "max_tokens": num_tokens, "stream": True}
    return common | {"logprobs": True, "top_logprobs": 20}


async def finished_stream(port: int) -> Started:
    """A resumable stream that is over, and large. Raises `RuntimeError` if it is not."""
    asking = heavy("a journal", JOURNAL_TOKENS) | {"model": "at_once"}
    started = await start_stream(HOST, port, asking)
    reader = await follow(HOST, port, started)
    async with asyncio.timeout(60):
        result = await reader.done
    if not result.is_done or reader.num_bytes < JOURNAL_BYTES:
        raise RuntimeError(f"the journal has {reader.num_bytes} bytes: {result.error}")
    return started


async def slow_reader(port: int, asking: bytes) -> socket.socket:
    """A connection that has asked and takes as little as the kernel allows."""
    loop, client = asyncio.get_running_loop(), socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)
    client.setblocking(False)
    await loop.sock_connect(client, (HOST, port))
    await loop.sock_sendall(client, asking)
    return client


async def sip(sockets: Sequence[socket.socket]) -> None:
    """Read a byte a second from each."""
    while True:
        for client in sockets:
            with suppress(BlockingIOError, ConnectionError):
                client.recv(1)
        await asyncio.sleep(1.0)


def closed_after_s(log: bytes) -> list[float]:
    """Of each reader that the gateway has closed as too slow, one log line each."""
    lines = [json.loads(line) for line in log.split(b"\n") if line[:1] == b"{" and line[-1:] == b"}"]
    return [
        line["total_ms"] / 1e3
        for line in lines
        if any(reason in (line.get("detail") or "") for reason in REASONS)
    ]


def kernel_mib() -> float:
    """Memory of all TCP sockets of this machine; 0 where it is not told."""
    try:
        lines = Path("/proc/net/sockstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    words = next(line for line in lines if line.startswith("TCP:")).split()
    return int(words[words.index("mem") + 1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(bench: Bench, report: Report) -> None:
    bench.journal = await finished_stream(bench.gateway.port)
    found: dict[str, list[Phase]] = {name: [] for name in PHASES}
    for _ in range(bench.sizes.num_runs):
        for name in PHASES:
            found[name].append(await bench.phase(name))
    for name, phases in found.items():
        for share, label in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            gaps = [percentile(phase.gaps_ms, share) for phase in phases]
            report.add(f"{name}_gap_{label}_ms", gaps, "ms")
    _report_slow(report, found, bench.sizes.num_slow)


def _report_slow(report: Report, found: dict[str, list[Phase]], num_slow: int) -> None:
    p99 = {name: [percentile(phase.gaps_ms, 0.99) for phase in phases] for name, phases in found.items()}
    for name in ("slow", "slow_resumable"):
        phases = found[name]
        report.add(f"{name}_closed_share", [len(phase.closed_after_s) / num_slow for phase in phases])
        closed = [each for phase in phases for each in phase.closed_after_s]
        if closed:
            report.add(f"{name}_closed_after_s", closed, "s")
        report.add(f"{name}_gateway_mib_each", [phase.gateway_mib / num_slow for phase in phases], "MiB")
        report.add(f"{name}_kernel_mib_each", [phase.kernel_mib / num_slow for phase in phases], "MiB")
        for other in ("alone", "quick_company"):
            ratios = [slow / quick for slow, quick in zip(p99[name], p99[other], strict=True)]
            report.add(f"{name}_gap_p99_vs_{other}", ratios)
        report.goal(f"{name}_gap_p99", report.metrics[f"{name}_gap_p99_vs_quick_company"], 1.2, "x")
        share = report.metrics[f"{name}_closed_share"]
        report.goal(f"{name}_closed_share", share, 1.0, "of readers", at_most=False)


def main(arguments: argparse.Namespace) -> int:
    sizes = Sizes(20, 4.0, 8.0, 6.0, 1) if arguments.quick else Sizes(100, 20.0, 12.0, 12.0, 3)
    report = open_report("bench_slow_readers", arguments)
    with scratch() as folder, ExitStack() as running:
        scripted = ("--scripted", "--tokenizer", str(embedded_model()), "--prefill-ms-per-1k", "0")
        steps = {"scripted": STEP_MS, "heavy": sizes.heavy_step_ms, "at_once": 0.2}
        addresses = [
            running.enter_context(
                worker(folder, *scripted, "--step-ms", str(step_ms), "--served-model-name", name, name=name)
            )[1]
            for name, step_ms in steps.items()
        ]
        kept = ("--stream-keep-s", "900", "--stream-max-bytes", str(MAX_JOURNAL_BYTES))
        limits = ("--slow-reader-s", str(SLOW_READER_S), *kept)
        behind = running.enter_context(gateway(folder, addresses, *limits))
        port = running.enter_context(nginx(folder, behind)).port if arguments.nginx else behind.port
        uvloop.run(measure(Bench(behind, port, sizes), report))
    return report.close()


if __name__ == "__main__":
    flags = parser(__doc__)
    flags.add_argument("--nginx", action="store_true", help="all readers come through nginx")
    sys.exit(main(flags.parse_args()))
