"""`headrace bench URL`: a load test of a server with OpenAI's API, and its report.

Exit codes: 0 done, 1 when the load cannot begin or more requests failed than allowed, 2 for wrong flags, 130
when it was interrupted (with a report of what there is). Not here: flags (`gateway/bench/flags.py`), the load
(`gateway/bench/session.py`), the report (`gateway/bench/delivery.py`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.bench.delivery import deliver
from gateway.bench.interrupts import reporting
from gateway.bench.open_files import make_room
from gateway.bench.options import BenchOptions, read_options
from gateway.bench.sample import INTERRUPTED, Sample
from gateway.bench.server_probe import BenchError
from gateway.bench.session import run_session
from gateway.bench.terminal import open_streams, say
from gateway.cli import BAD_USAGE, FAILED, OK
from gateway.cli import INTERRUPTED as WAS_INTERRUPTED
from gateway.event_loop import loop_factory, settle_memory


def main_bench(given: Mapping[str, Any]) -> int:
    """Run the load test and print its report."""
    open_streams()
    try:
        options = read_options(given, os.environ)
        make_room(options.plan)
    except ValueError as error:
        say(str(error))
        return BAD_USAGE
    try:
        return _bench(options)
    except (BenchError, OSError) as error:
        say(str(error))
        return FAILED


def _bench(options: BenchOptions) -> int:
    settle_memory()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        outcome = runner.run(run_session(options))
    with reporting():
        faults = deliver(outcome, options.report)
    for fault in faults:
        say(fault)
    if outcome.run.ended_early:
        return WAS_INTERRUPTED
    return FAILED if faults else exit_code(outcome.samples, options.report.max_failures)


def exit_code(samples: Sequence[Sample], max_failures: float) -> int:
    """Of all requests, those of the warm-up too."""
    ended = [sample for sample in samples if sample.error != INTERRUPTED]
    num_failed = sum(sample.error is not None for sample in ended)
    return FAILED if num_failed == len(ended) or num_failed > max_failures * len(ended) else OK
