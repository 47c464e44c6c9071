"""What the proxy adds: from the engine's token to the client's byte, and from a disconnect to the abort.

A scripted worker notes when it hands each token on; the client notes when each frame is there; both read the
same monotonic clock. A token is a frame, so the k-th frame is told from the k-th token. The ways in: straight
to the gateway, and through the real nginx with the site of this repository, over HTTP/1.1 (plain and TLS) and
over HTTP/2, where all streams share one connection; and readers of resumable streams. The ways alternate.

`held_share` is unbuffered proven token by token: frames that had not come when the engine made the next token
of their stream. `together_share`: frames that a client found in one read with another of the same stream.

Disconnects: from the client's close to the abort in the worker's engine; before the first token (a long
prefill) and in mid-stream; over HTTP/2 by a reset of the stream and by a close of the connection.

Verdict: nginx adds 0.2 ms (plain HTTP/1.1), 0.4 (TLS) or 0.5 (HTTP/2) to a token's 0.55 ms, holds none, and a
disconnect reaches the engine in 1 ms, with it or without. The loser is HTTP/2, by what its framing costs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import ssl
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Final

import uvloop

from benchmarks.event_load import EventClient, start_stream
from benchmarks.h2_client import H2Client
from benchmarks.load import StreamClient, request
from benchmarks.nginx_site import Nginx, nginx
from benchmarks.processes import Measured, embedded_model, gateway, scratch
from benchmarks.report import Report, open_report, parser, percentile
from benchmarks.stamped_worker import JobTimes, StampedWorker, stamped_worker
from benchmarks.texts import prompt

STEP_MS: Final = 20.0
PREFILL_MS_PER_1K: Final = 1000.0  # 10 ms for a short prompt, seconds for a long one
LONG_PROMPT_WORDS: Final = 3000
NUM_STREAMS: Final = 8
NUM_OPENING: Final = 15  # tokens of a stream within which all have come: a late reader is owed the first ones
LIMIT_S: Final = 20.0
_CONTENT: Final = b'"content":"'


class TimedClient(StreamClient):
    """Keeps when each frame with text was there; those of one read have one time."""

    def __init__(self, asking: bytes) -> None:
        super().__init__(asking)
        self.times_s: list[float] = []
        self.has_text = asyncio.Event()
        self._has_role = False
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        now_s = monotonic()
        joined = self._rest + data
        self._rest = joined[1 - len(_CONTENT) :]  # too little to be counted twice
        num_frames = joined.count(_CONTENT)
        if num_frames and not self._has_role:  # the first frame's content is empty
            self._has_role = True
            num_frames -= 1
        if num_frames:
            self.times_s.extend([now_s] * num_frames)
            self.has_text.set()
        super().data_received(data)


@dataclass(frozen=True, slots=True)
class Way:
    """How clients reach the gateway. `closes`: a client leaves by closing the connection, not its stream.
    `is_resumable`: they follow resumable streams, as EventSource does."""

    name: str
    port: int
    tls: ssl.SSLContext | None = None
    is_h2: bool = False
    closes: bool = True
    is_resumable: bool = False

    async def open(self, requests: Sequence[bytes]) -> tuple[list[TimedClient], Callable[[], None]]:
        """Clients that have asked, over HTTP/2 on one connection; and what cuts all that they hold."""
        if self.is_h2:
            assert self.tls is not None
            connection = await H2Client.connect("127.0.0.1", self.port, self.tls)
            clients = [TimedClient(each) for each in requests]
            for client in clients:
                connection.open(client)
            return clients, connection.close
        loop = asyncio.get_running_loop()
        name = None if self.tls is None else "localhost"
        clients = [TimedClient(each) for each in requests]
        for client in clients:
            await loop.create_connection(
                partial(_same, client), "127.0.0.1", self.port, ssl=self.tls, server_hostname=name
            )

        def cut() -> None:
            for client in clients:
                client.close()

        return clients, cut


def _same(client: TimedClient) -> TimedClient:
    return client


@dataclass(frozen=True, slots=True)
class Delays:
    """Of one window: each token's time from the engine to the client, in milliseconds, and the two shares."""

    delays_ms: Sequence[float]
    held_share: float
    together_share: float


@dataclass(frozen=True, slots=True)
class Bench:
    """`gateway`: where resumable streams are started, whatever way their readers come."""

    worker: StampedWorker
    gateway: Measured
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def chat(self, max_tokens: int, num_words: int = 8) -> tuple[int, dict[str, Any]]:
        """The seed of a new job, and the chat for it."""
        seed = next(self.seeds)
        messages = [{"role": "user", "content": prompt(num_words, seed)}]
        return seed, {"model": "scripted", "messages": messages, "max_tokens": max_tokens, "seed": seed}

    async def ask(self, way: Way, num_tokens: int) -> tuple[int, bytes]:
        """The seed of a job, and the request for its answer."""
        seed, fields = self.chat(num_tokens)
        if not way.is_resumable:
            return seed, request(fields)
        started = await start_stream("127.0.0.1", self.gateway.port, fields)
        return seed, EventClient.asking(started.url)

    async def delays(self, way: Way, num_tokens: int) -> Delays:
        """A window of some streams at once, past the time in which they come."""
        asked = [await self.ask(way, num_tokens) for _ in range(NUM_STREAMS)]
        clients, cut = await way.open([body for _, body in asked])
        async with asyncio.timeout(LIMIT_S + num_tokens * STEP_MS / 1e3):
            results = await asyncio.gather(*(client.done for client in clients))
        cut()
        if failed := [result for result in results if not result.is_done]:
            raise RuntimeError(f"{way.name}: {failed[0].status} {failed[0].error}")
        jobs = [self.worker.job(seed) for seed, _ in asked]
        return delays_of(jobs, [client.times_s for client in clients], skip=NUM_OPENING)

    async def abort_ms(self, way: Way, is_before_first: bool) -> float:
        """From a client's close to the abort in the engine."""
        seed, fields = self.chat(1500, LONG_PROMPT_WORDS if is_before_first else 8)
        (client,), cut = await way.open([request(fields)])
        async with asyncio.timeout(LIMIT_S):
            if is_before_first:
                while self.worker.job(seed) is None:  # noqa: ASYNC110  # another process has it
                    await asyncio.sleep(0.002)
                await asyncio.sleep(0.01 + 0.001 * (seed % 40))
            else:
                await client.has_text.wait()
                await asyncio.sleep(0.02 + 0.001 * (seed % 40))
            if is_before_first == bool(client.times_s):
                raise RuntimeError(f"{way.name}: {len(client.times_s)} tokens had come")
            closed_s = monotonic()
            cut() if way.closes else client.close()
            aborted_s = await self._aborted(seed)
        cut()
        return (aborted_s - closed_s) * 1e3

    async def _aborted(self, seed: int) -> float:
        while True:
            job = self.worker.job(seed)
            assert job is not None
            if job.aborted_s is not None:
                return job.aborted_s
            await asyncio.sleep(0.005)


def delays_of(jobs: Sequence[JobTimes | None], arrivals: Sequence[Sequence[float]], skip: int) -> Delays:
    """The k-th frame of a client against the k-th token of its job, but the first `skip`.

    Raises `RuntimeError` unless there is a frame for each token.
    """
    delays_ms: list[float] = []
    num_held = num_followed = num_together = 0
    for job, times_s in zip(jobs, arrivals, strict=True):
        if job is None or len(job.steps_s) != len(times_s):
            raise RuntimeError(f"{len(times_s)} frames for {job and len(job.steps_s)} tokens")
        made_s, there_s = job.steps_s[skip:], times_s[skip:]
        delays_ms += [(there - made) * 1e3 for there, made in zip(there_s, made_s, strict=True)]
        num_held += sum(there >= following for there, following in zip(there_s, made_s[1:], strict=False))
        num_followed += len(there_s) - 1
        num_together += sum(count for count in Counter(there_s).values() if count > 1)
    return Delays(delays_ms, num_held / num_followed, num_together / len(delays_ms))


async def report_delays(
    bench: Bench, report: Report, ways: Sequence[Way], num_runs: int, num_tokens: int
) -> None:
    windows: dict[str, list[Delays]] = {way.name: [] for way in ways}
    for _ in range(num_runs):
        for way in ways:
            windows[way.name].append(await bench.delays(way, num_tokens))
    medians = {
        name: [statistics.median(window.delays_ms) for window in found] for name, found in windows.items()
    }
    for name, found in windows.items():
        report.add(f"{name}_token_p50_ms", medians[name], "ms")
        report.add(f"{name}_token_p99_ms", [percentile(window.delays_ms, 0.99) for window in found], "ms")
        report.add(f"{name}_held_share", [window.held_share for window in found])
        report.add(f"{name}_together_share", [window.together_share for window in found])
        if name != ways[0].name:
            added = [
                through - straight
                for through, straight in zip(medians[name], medians[ways[0].name], strict=True)
            ]
            report.add(f"{name}_added_p50_ms", added, "ms")
    held = max(statistics.median(w.held_share for w in found) for found in windows.values())
    report.goal("held_share_max", held, 0.0, "of tokens")


async def report_disconnects(bench: Bench, report: Report, ways: Sequence[Way], num_tries: int) -> None:
    moments = {"before_first": True, "mid_stream": False}
    found: dict[str, list[float]] = {f"{way.name}_abort_{moment}": [] for way in ways for moment in moments}
    for _ in range(num_tries):
        for way in ways:
            for moment, is_before_first in moments.items():
                found[f"{way.name}_abort_{moment}"].append(await bench.abort_ms(way, is_before_first))
    for name, values in found.items():
        report.add(f"{name}_p50_ms", statistics.median(values), "ms")
        report.add(f"{name}_max_ms", max(values), "ms")
    report.goal("disconnect_ms_max", max(max(values) for values in found.values()), 200, "ms")


def ways_in(front: Nginx, behind: Measured) -> tuple[list[Way], list[Way]]:
    """Those for delays, the straight one first; those for disconnects."""
    h1, h2 = front.tls("http/1.1"), front.tls("h2")
    common = [
        Way("straight", behind.port),
        Way("nginx_h1", front.port),
        Way("nginx_h1_tls", front.tls_port, h1),
    ]
    return (
        [
            *common,
            Way("nginx_h2", front.tls_port, h2, is_h2=True),
            Way("straight_events", behind.port, is_resumable=True),
            Way("nginx_h2_events", front.tls_port, h2, is_h2=True, is_resumable=True),
        ],
        [
            *common,
            Way("nginx_h2_reset", front.tls_port, h2, is_h2=True, closes=False),
            Way("nginx_h2_close", front.tls_port, h2, is_h2=True),
        ],
    )


async def measure(
    bench: Bench, report: Report, front: Nginx, behind: Measured, arguments: argparse.Namespace
) -> None:
    num_runs, num_tokens, num_tries = (2, 80, 4) if arguments.quick else (7, 200, 25)
    delaying, leaving = ways_in(front, behind)
    for way in delaying:  # warm: tokenizer, connections to the gateway
        await bench.delays(way, 2 * NUM_OPENING)
    await report_delays(bench, report, delaying, num_runs, num_tokens)
    await report_disconnects(bench, report, leaving, num_tries)


def main(arguments: argparse.Namespace) -> int:
    report = open_report("bench_nginx", arguments)
    with (
        scratch() as folder,
        stamped_worker(folder, embedded_model(), STEP_MS, PREFILL_MS_PER_1K) as worker,
        gateway(folder, [worker.address]) as behind,
        nginx(folder, behind) as front,
    ):
        uvloop.run(measure(Bench(worker, behind), report, front, behind, arguments))
    return report.close()


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
