"""The report goes where it is wanted: table, JSON, page. What fails in one of them spares the others.

A load may have taken hours on machines that cost money: what it measured is written down as long as there is
a place for it. Not here: what the report says (`gateway/bench/document.py`, `table.py`, `page.py`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.bench.document import BENCH, VERSION, document_of, to_json
from gateway.bench.options import ReportOptions
from gateway.bench.page import page
from gateway.bench.session import Outcome
from gateway.bench.table import table
from gateway.bench.terminal import show

T = TypeVar("T")


def deliver(outcome: Outcome, report: ReportOptions) -> list[str]:
    """Write and print all that is wanted. Returns a sentence for each thing that went wrong."""
    faults: list[str] = []

    def made(name: str, make: Callable[[], T]) -> T | None:
        # Any exception is a fault of ours, and the rest of the report is worth more than a traceback.
        try:
            return make()
        except Exception as error:
            told = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            faults.append(f"{name} could not be made: {told}")
            return None

    samples, run = outcome.samples, outcome.run
    document = made("the report", lambda: document_of(samples, run, report.figures, report.has_samples))
    if report.json is not None:
        data = None if document is None else made("the JSON", lambda: to_json(document))
        written = data or made("the JSON of the requests", lambda: bare_json(outcome))
        if written is not None:
            made(f"--json {report.json}", lambda: _write(report.json, written))
    shown = sys.stderr if report.json == "-" else sys.stdout
    text = (
        None if document is None else made("the table", lambda: table(document, is_terminal=shown.isatty()))
    )
    made("the output", lambda: show(text or bare_table(outcome), shown))
    if report.html is not None and document is not None:
        runs = [(report.name, document), *report.compared]
        html = made("the page", lambda: page(runs))
        if html is not None:
            made(f"--html {report.html}", lambda: _write(report.html, html.encode()))
    return faults


def _write(path: str | None, data: bytes) -> None:
    """`-` is standard output."""
    if path == "-":
        show(data.decode(), sys.stdout)
    elif path is not None:
        Path(path).write_bytes(data)


def bare_json(outcome: Outcome) -> bytes:
    """The run and its requests, without any figures: of these, all of them can be made again."""
    plain = {"bench": BENCH, "version": VERSION, "run": outcome.run, "samples": outcome.samples}
    return msgspec.json.encode(plain) + b"\n"


def bare_table(outcome: Outcome) -> str:
    """How many requests there were, by what became of them."""
    counts = Counter(sample.error or "ok" for sample in outcome.samples)
    return "".join(f"{kind:<16} {count}\n" for kind, count in counts.most_common())
