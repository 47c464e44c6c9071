"""One load test from the first look at the server to its samples and what is said of the run.

Not here: the loops (`gateway/bench/run.py`), flags and reports (`gateway/bench/command.py`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Final

from backend.http_client import HttpClient, HttpLimits
from gateway.bench.client import BenchClient
from gateway.bench.description import run_info_of
from gateway.bench.health import HealthMeter, client_health
from gateway.bench.interrupts import ending
from gateway.bench.options import BenchOptions
from gateway.bench.prepare import prepare
from gateway.bench.progress import ProgressLine, Tally
from gateway.bench.run import MAX_BEHIND_S, Load
from gateway.bench.run_info import RunInfo
from gateway.bench.sample import Sample
from gateway.bench.terminal import say

_TICK_S: Final = 0.2
PATIENCE_S: Final = 5.0  # for a server's first answer, before it is said that it is waited for
_MAX_IDLE: Final = 1 << 17  # every connection of the largest closed loop


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a load test gives to its report."""

    samples: Sequence[Sample]
    run: RunInfo


async def run_session(options: BenchOptions) -> Outcome:
    """Look at the server, load it, and tell how that went. Raises `BenchError` if the load cannot begin."""
    limits = HttpLimits(connect_s=options.timeout_s, max_idle=_MAX_IDLE if options.keeps_alive else 0)
    http = HttpClient(limits)
    try:
        with _patience(options):
            prepared = await prepare(http, options)
        tally = Tally()
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        client = BenchClient(http, options.target, monotonic(), options.timeout_s, tally)
        load = Load(client, prepared.maker, options.plan, prepared.conversations)
        meter = HealthMeter()
        with ending(load.stop):
            async with _progress(options, client, tally):
                await load.run()
            plan, samples = options.plan, sorted(load.samples, key=lambda sample: sample.number)
            is_capped = plan.max_concurrency is not None
            health = client_health(
                meter.stop(), samples, plan.is_open, is_capped, load.num_left_out, MAX_BEHIND_S
            )
            run = run_info_of(options, prepared, samples, health, started_at, load.was_stopped)
            await http.close()
    finally:
        await http.close()
    return Outcome(samples, run)


def _shows_progress(options: BenchOptions) -> bool:
    choice = options.report.progress
    return choice == "on" or (choice == "auto" and sys.stderr.isatty())


@contextmanager
def _patience(options: BenchOptions) -> Iterator[None]:
    """Say what is waited for, where a server is silent: the load has not begun, and there is no progress."""

    def tell() -> None:
        waits = f"waiting for the first answer of {options.target.url}, at most {options.timeout_s:g} s"
        say(f"{waits} (--timeout-s)")

    timer = None
    if _shows_progress(options):
        timer = asyncio.get_running_loop().call_later(PATIENCE_S, tell)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


@asynccontextmanager
async def _progress(options: BenchOptions, client: BenchClient, tally: Tally) -> AsyncIterator[None]:
    if not _shows_progress(options):
        yield
        return
    plan = options.plan
    total = None if plan.num_requests is None else plan.num_requests + plan.warm_up_requests
    duration_s = None if plan.duration_s is None else plan.duration_s + plan.warm_up_s
    line = ProgressLine(tally, sys.stderr, total, duration_s)

    async def follow() -> None:
        with suppress(OSError):  # a stream that is full or gone costs the line, not the load
            while True:
                line.tick(client.now_s())
                await asyncio.sleep(_TICK_S)

    task = asyncio.ensure_future(follow())
    try:
        yield
    finally:
        task.cancel()
        with suppress(OSError):
            line.close()
