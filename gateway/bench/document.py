"""The JSON document of a run: all that the table and the page show, so that a run can be shown again later.

Its shape is `Document`; `version` changes when a reader of the old one would misread the new one. Not here:
how the figures are computed (`gateway/bench/figures.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

from gateway.bench.bounds import Amount, Count
from gateway.bench.figures import DEFAULTS, FigureOptions, Figures, Measured, figures_of
from gateway.bench.run_info import RunInfo
from gateway.bench.sample import Sample
from gateway.bench.timeline import Timeline, timeline_of

BENCH: Final = "headrace bench"
VERSION: Final = 1
_EDGES: Final = ("steady_from_s", "steady_until_s", "duration_s")
_ROUNDING_MS: Final = 1e-6
# Where a curve is sampled: each percent, and more closely where the slowest few are.
CURVE_PERCENTS: Final = (*map(float, range(100)), 99.5, 99.9, 99.99, 100.0)


class Failures(msgspec.Struct, frozen=True):
    """Of one kind. `example`: what was told of the first."""

    count: Count
    example: str


class Document(msgspec.Struct, frozen=True):
    """`curves_ms`: of each latency, (percent, milliseconds) pairs. `samples`: only where asked for."""

    bench: str
    version: int
    run: RunInfo
    figures: Figures
    failures: Mapping[str, Failures]
    curves_ms: Mapping[str, tuple[tuple[Amount, Amount], ...]]
    timeline: Timeline
    samples: tuple[Sample, ...] | None = None


def document_of(
    samples: Sequence[Sample],
    run: RunInfo,
    options: FigureOptions = DEFAULTS,
    keeps_samples: bool = False,
) -> Document:
    """All of a run. Any samples will do: none, one, or failed ones only."""
    measured = Measured(samples, run)
    return Document(
        bench=BENCH,
        version=VERSION,
        run=run,
        figures=figures_of(measured, options),
        failures=_failures(measured),
        curves_ms={
            name: tuple(each.curve(CURVE_PERCENTS))
            for name, each in measured.latencies.distributions.items()
            if len(each)
        },
        timeline=timeline_of(measured),
        samples=tuple(measured.all) if keeps_samples else None,
    )


def to_json(document: Document) -> bytes:
    """Indented. Results are rounded to a nanosecond; the samples' times and the window's edges are exact, so
    that who computes the figures again finds the same samples in the window: from <= sent < until.
    """
    plain: dict[str, Any] = _rounded(msgspec.to_builtins(msgspec.structs.replace(document, samples=None)))
    plain["run"] |= {name: getattr(document.run, name) for name in _EDGES}
    if document.samples is None:
        del plain["samples"]
    else:
        plain["samples"] = document.samples
    return msgspec.json.format(msgspec.json.encode(plain), indent=1) + b"\n"


def from_json(data: bytes, name: str = "document") -> Document:
    """All that a report of it needs is there. Raises `ValueError` that names the file and the field."""
    try:
        kind = msgspec.json.decode(data, type=_Kind)
        if (kind.bench, kind.version) != (BENCH, VERSION):
            raise ValueError(f"{name} is of {kind.bench!r} version {kind.version}, not {BENCH!r} {VERSION}")
        document = msgspec.json.decode(data, type=Document)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not the JSON of a load test: {error}") from None
    for latency, curve in document.curves_ms.items():
        if fault := _fault(curve):
            raise ValueError(
                f"{name} is not the JSON of a load test: {fault} - at `$.curves_ms[{latency!r}]`"
            )
    return document


class _Kind(msgspec.Struct):
    """What tells a document from any other JSON."""

    bench: str
    version: int


def _fault(curve: Sequence[tuple[float, float]]) -> str | None:
    """What makes it no curve: the points are those of `CURVE_PERCENTS`, and ascend."""
    if tuple(percent for percent, _ in curve) != CURVE_PERCENTS:
        return f"Expected {len(CURVE_PERCENTS)} points, at the percents 0, 1, ..., 99, 99.5, 99.9, 99.99, 100"
    if any(before - after > _ROUNDING_MS for (_, before), (_, after) in pairwise(curve)):
        return "Expected values that ascend"
    return None


def _failures(measured: Measured) -> dict[str, Failures]:
    """By kind, the most frequent one first."""
    failed = measured.failed
    examples: dict[str, str] = {}
    for sample in failed:
        examples.setdefault(sample.error or "", sample.detail)
    counts = Counter(sample.error or "" for sample in failed)
    return {kind: Failures(count, examples[kind]) for kind, count in counts.most_common()}


def _rounded(plain: Any) -> Any:
    if isinstance(plain, float):
        return round(plain, 9)
    if isinstance(plain, str):
        return plain.encode(errors="replace").decode()  # a file's name may be any bytes
    if isinstance(plain, dict):
        return {_rounded(key): _rounded(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_rounded(value) for value in plain]
    return plain
