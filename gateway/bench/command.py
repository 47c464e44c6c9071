"""`headrace bench URL`: a load test of a server with OpenAI's API, and its report.

Exit codes: 0 done, 1 when the load cannot begin or more requests failed than allowed, 2 for wrong flags, 130
when it was interrupted (with a report of what there is). Not here: flags (`gateway/bench/flags.py`), the load
(`gateway/bench/session.py`), figures (`gateway/bench/figures.py`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.bench.document import Document, document_of, to_json
from gateway.bench.figures import INTERRUPTED
from gateway.bench.options import BenchOptions, ReportOptions, read_options
from gateway.bench.page import page
from gateway.bench.sample import Sample
from gateway.bench.server_probe import BenchError
from gateway.bench.session import run_session
from gateway.bench.table import table
from gateway.cli import BAD_USAGE, FAILED, OK
from gateway.cli import INTERRUPTED as WAS_INTERRUPTED


def main_bench(given: Mapping[str, Any]) -> int:
    """Run the load test and print its report."""
    try:
        options = read_options(given, os.environ)
    except ValueError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return BAD_USAGE
    try:
        return _bench(options)
    except (BenchError, OSError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return FAILED


def _bench(options: BenchOptions) -> int:
    settle_memory()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        outcome = runner.run(run_session(options))
    report = options.report
    _write(report, document_of(outcome.samples, outcome.run, report.figures, report.has_samples))
    if outcome.run.ended_early:
        return WAS_INTERRUPTED
    return exit_code(outcome.samples, report.max_failures)


def settle_memory() -> None:
    """A full collection stops all streams for as long as it takes; what is here by now stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def exit_code(samples: Sequence[Sample], max_failures: float) -> int:
    """Of all requests, those of the warm-up too."""
    ended = [sample for sample in samples if sample.error != INTERRUPTED]
    num_failed = sum(sample.error is not None for sample in ended)
    return FAILED if num_failed == len(ended) or num_failed > max_failures * len(ended) else OK


def _write(report: ReportOptions, document: Document) -> None:
    shown = sys.stderr if report.json == "-" else sys.stdout
    print(table(document, is_terminal=shown.isatty()), end="", file=shown)
    if report.json == "-":
        sys.stdout.write(to_json(document).decode())
    elif report.json is not None:
        Path(report.json).write_bytes(to_json(document))
    if report.html is not None:
        Path(report.html).write_text(page([(report.name, document), *report.compared]), encoding="utf-8")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
