"""Runs side by side: how each was made, their main figures with the ratio to the first run's, and a warning
where their loads were unlike.

Not here: how a ratio is judged. Whether more is better, the reader knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.bench.document import Document
from gateway.bench.phrases import counted
from gateway.bench.rows import ABSENT, clipped, loop_of, name_of, share, shown

_PERCENTILES: Final = ("p50", "p99")  # of all, so that the table stays one that is read
_MAX_OFF: Final = 0.05  # by which the tokens of a request may differ between like loads
_MEASURED_OPTIONS: Final = ("tokens per word",)  # told of the server, not asked for
_MAX_RATIO: Final = 1e6
_MAX_NAME: Final = 40  # characters: it heads a column
_CHAT: Final = "/chat/completions"


@dataclass(frozen=True, slots=True)
class Compared:
    """One row: (run, value in words) of each run."""

    name: str
    cells: tuple[tuple[str, str], ...]


def distinct(runs: Sequence[tuple[str, Document]]) -> list[tuple[str, Document]]:
    """The same runs, each with a short name of its own: files in two folders may be called the same."""
    named: dict[str, Document] = {}
    for given, document in runs:
        name = given if len(given) <= _MAX_NAME else given[: _MAX_NAME - 1] + "…"
        number, own = 1, name
        while own in named:
            number += 1
            own = f"{name} ({number})"
        named[own] = document
    return list(named.items())


def settings(runs: Sequence[tuple[str, Document]]) -> list[Compared]:
    """How each run was made, without what no run has."""
    by_run = [{"Server": _server(each), **_load(each), **_measured(each)} for _, each in runs]
    rows = [
        Compared(name, tuple((run, clipped(told[name])) for (run, _), told in zip(runs, by_run, strict=True)))
        for name in by_run[0]
    ]
    return [row for row in rows if any(value for _, value in row.cells)]


def unlike(runs: Sequence[tuple[str, Document]]) -> list[str]:
    """A sentence for each run whose load was not that of the first: its ratios tell of that too."""
    first_name, first = runs[0]
    told = []
    for name, document in runs[1:]:
        if differing := list(_differing(first, document)):
            told.append(
                f"Unlike loads: “{clipped(name)}” differs from “{clipped(first_name)}” in "
                f"{', '.join(differing)}. Its ratios tell of that too."
            )
    return told


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


def _server(document: Document) -> str:
    run = document.run
    version = run.versions.get("server")
    return run.url if version is None else f"{run.url}, {version}"


def _load(document: Document) -> Mapping[str, str]:
    """What shapes a load: with another of any of these, the figures are of something else."""
    run = document.run
    further = [
        f"{name} {value}" for name, value in sorted(run.options.items()) if name not in _MEASURED_OPTIONS
    ]
    return {
        "Model": run.model,
        "Endpoint": "chat completions" if run.endpoint.endswith(_CHAT) else "completions",
        "Load": loop_of(run),
        "Prompts": f"{run.prompt_lengths} tokens",
        "Answers": f"{run.output_lengths} tokens",
        "Options": "; ".join(further),
        "Client": run.machine,
    }


def _measured(document: Document) -> Mapping[str, str]:
    figures = document.figures
    early = ", ended early" if document.run.ended_early else ""
    requests = counted(figures.num_requests, "request")
    return {
        "Measured": f"{requests} in {shown(figures.window_s)} s{early}",
        "Started": document.run.started_at,
    }


def _differing(first: Document, other: Document) -> Iterator[str]:
    loads = _load(first), _load(other)
    yield from (name.lower() for name in loads[0] if loads[0][name] != loads[1][name])
    tokens = _tokens(first), _tokens(other)
    for name in tokens[0]:
        counts = tokens[0][name], tokens[1].get(name)
        if counts[1] is not None and abs(counts[1] - counts[0]) > _MAX_OFF * max(counts[0], counts[1]):
            yield f"{name[:1].lower()}{name[1:]} ({shown(counts[1])}, not {shown(counts[0])})"
    goodputs = first.figures.goodput, other.figures.goodput
    if goodputs[0] and goodputs[1] and goodputs[0].limits_ms != goodputs[1].limits_ms:
        yield "the limits of goodput"


def _tokens(document: Document) -> dict[str, float]:
    figures = document.figures
    if not figures.num_ok:
        return {}
    return {
        "Prompt tokens a request": figures.prompt_tokens / figures.num_ok,
        "Output tokens a request": figures.output_tokens / figures.num_ok,
    }


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
        **_tokens(document),
    }
    if figures.stalls is not None:
        numbers["Stall limit, ms"] = figures.stalls.limit_ms
    judged = figures.num_ok + figures.num_failed
    shares = {
        "Stalled tokens": None if figures.stalls is None else figures.stalls.token_share,
        "Goodput": None if figures.goodput is None else figures.goodput.share,
        "Cached": figures.cached_share,
        "Failed": figures.num_failed / judged if judged else None,
    }
    return numbers | {f"{name}, share": value for name, value in shares.items() if value is not None}


def _cell(name: str, value: float | None, first: float | None) -> str:
    """With the ratio to the first run's, where that is not 0."""
    if value is None:
        return ABSENT
    told = share(value) if name.endswith(", share") else shown(value)
    return f"{told} ({_ratio(value / first)})" if first else told


def _ratio(ratio: float) -> str:
    return f"×{shown(ratio)}" if ratio < _MAX_RATIO else f"×{ratio:.0e}"
