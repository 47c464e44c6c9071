"""Runs side by side: their main figures, each with its ratio to the first run's.

Not here: how a ratio is judged. Whether more is better, the reader knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.bench.document import Document
from gateway.bench.rows import name_of, share, shown

_PERCENTILES: Final = ("p50", "p99")  # of all, so that the table stays one that is read


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure: (run, value in words) of each run."""

    name: str
    cells: tuple[tuple[str, str], ...]


def compared(runs: Sequence[tuple[str, Document]]) -> list[Compared]:
    """What any of the runs has, in the order of the report; a dash where a run has nothing."""
    by_run = [_numbers(document) for _, document in runs]
    names = dict.fromkeys(name for numbers in by_run for name in numbers)
    rows = []
    for name in names:
        first = by_run[0].get(name)
        cells = [
            (run, _cell(name, numbers.get(name), None if numbers is by_run[0] else first))
            for (run, _), numbers in zip(runs, by_run, strict=True)
        ]
        rows.append(Compared(name, tuple(cells)))
    return rows


def _numbers(document: Document) -> dict[str, float]:
    figures = document.figures
    numbers = {
        f"{name_of(name)} {percentile}, ms": value
        for name, spread in figures.latencies_ms.items()
        for percentile, value in spread.items()
        if percentile in _PERCENTILES
    }
    rate = figures.throughput
    numbers |= {
        "Requests/s": rate.requests_per_s,
        "Output tokens/s": rate.output_tokens_per_s,
        "Total tokens/s": rate.total_tokens_per_s,
        "At once": figures.concurrency_mean,
        "Failed": float(figures.num_failed),
    }
    shares = {
        "Stalled tokens": None if figures.stalls is None else figures.stalls.token_share,
        "Goodput": None if figures.goodput is None else figures.goodput.share,
        "Cached": figures.cached_share,
    }
    return numbers | {f"{name}, share": value for name, value in shares.items() if value is not None}


def _cell(name: str, value: float | None, first: float | None) -> str:
    if value is None:
        return "–"
    told = share(value) if name.endswith(", share") else shown(value)
    return f"{told} ({value / first:.2f})" if first else told
