"""What a report says, as words and numbers in rows: the table and the page show the same ones.

Not here: where on a screen they stand (`gateway/bench/table.py`, `gateway/bench/page.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gateway.bench.document import Document
from gateway.bench.figures import Figures
from gateway.bench.percentiles import Spread
from gateway.bench.phrases import one_line
from gateway.bench.run_info import ClientHealth, RunInfo

# By the name in the document: what it is called, and what it means.
LATENCIES: Final = {
    "ttft": ("TTFT", "time to first token, from when the request was sent"),
    "ttft_from_due": ("TTFT from due", "time to first token, from when the request was due"),
    "tpot": ("TPOT", "time per output token after the first, mean of a request"),
    "tbt": ("TBT", "time between tokens: every gap between two frames"),
    "e2e": ("E2E", "end to end: from sent to the end of the answer, its [DONE]"),
}
ADDED_TTFT: Final = "TTFT added"
ABSENT: Final = "–"
_ENDS: Final = ("mean", "min")
_DIGITS: Final = ((1, 3), (10, 2), (100, 1))  # below the limit, so many decimals
_LEAST: Final = 0.0005
_MAX_DETAIL: Final = 200  # characters of an example of a failure


@dataclass(frozen=True, slots=True)
class Grid:
    """A table with a title: `columns` head the cells; the first cell of each row is its name."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """A list with a title: of (name, value)."""

    title: str
    rows: tuple[tuple[str, str], ...]


def shown(value: float) -> str:
    """With three significant digits where they are worth something: 0.123, 4.56, 78.9, 12,345."""
    size = abs(value)
    if size < _LEAST:
        return "0.00"
    digits = next((digits for limit, digits in _DIGITS if round(size, digits) < limit), 0)
    return f"{value:,.{digits}f}"


def share(value: float) -> str:
    return f"{value * 100:.2f} %" if 0 < value < 0.1 or 0.9 < value < 1 else f"{value * 100:.1f} %"


def load_of(run: RunInfo) -> str:
    """How the load was made, in one line."""
    return f"{loop_of(run)}; prompts {run.prompt_lengths}, answers {run.output_lengths} tokens"


def loop_of(run: RunInfo) -> str:
    """When its requests were sent."""
    if run.mode == "closed":
        return f"closed loop, {run.concurrency} at once"
    cap = f", at most {run.concurrency} at once" if run.concurrency is not None else ""
    return f"open loop, {shown(run.rate or 0)} requests/s, {run.arrivals}{cap}"


def facts_of(document: Document) -> Facts:
    figures, run = document.figures, document.run
    rate = figures.throughput
    rows = [
        ("Requests", _requests(figures)),
        ("Measured", f"{shown(figures.window_s)} s of {shown(run.duration_s)} s{_early(run)}"),
        ("Requests/s", shown(rate.requests_per_s)),
        ("Output tokens/s", shown(rate.output_tokens_per_s)),
        ("Prompt tokens/s", shown(rate.prompt_tokens_per_s)),
        ("Total tokens/s", shown(rate.total_tokens_per_s)),
        ("At once", f"{shown(figures.concurrency_mean)} on average, {figures.concurrency_peak} at most"),
        ("Tokens", _tokens(figures)),
        *_optional(figures),
        ("Client", _client(run.client)),
    ]
    return Facts("Load", tuple(rows))


def _requests(figures: Figures) -> str:
    parts = [f"{figures.num_requests:,} measured", f"{figures.num_ok:,} ok", f"{figures.num_failed:,} failed"]
    if figures.num_interrupted:
        parts.append(f"{figures.num_interrupted:,} cut off by the end")
    if figures.num_outside:
        failed = f" ({num:,} of them failed)" if (num := figures.num_failed_outside) else ""
        parts.append(f"{figures.num_outside:,} in warm-up or drain{failed}")
    return ", ".join(parts)


def _early(run: RunInfo) -> str:
    return ", ended early" if run.ended_early else ""


def _tokens(figures: Figures) -> str:
    text = f"{figures.prompt_tokens:,} prompt, {figures.output_tokens:,} output"
    if not figures.has_usage:
        text += " (no usage told: frames counted)"
    return text


def _optional(figures: Figures) -> Iterator[tuple[str, str]]:
    if (per_token := figures.frames_per_token) is not None:
        yield "Frames per token", f"{per_token:.3f}"
    if (cached := figures.cached_share) is not None:
        yield "Cached", f"{share(cached)} of the prompt tokens"
    if (stalls := figures.stalls) is not None:
        limit = f"over {shown(stalls.limit_ms)} ms after the one before"
        yield (
            "Stalled tokens",
            f"{share(stalls.token_share)} {limit}; {share(stalls.request_share)} of requests",
        )
    if (goodput := figures.goodput) is not None:
        yield "Goodput", f"{share(goodput.share)} of requests, {shown(goodput.requests_per_s)} requests/s"
        for name, limit_ms in goodput.limits_ms.items():
            yield f"  {name_of(name)} <= {shown(limit_ms)} ms", share(goodput.shares[name])


def _client(client: ClientHealth) -> str:
    return (
        f"{share(client.cpu_share)} of a core; its loop late by {shown(client.lag_p50_ms)} ms at p50, "
        f"{shown(client.lag_p99_ms)} at p99"
    )


def name_of(name: str) -> str:
    return LATENCIES[name][0] if name in LATENCIES else name


def latencies_of(document: Document) -> Grid:
    """TTFT from due only in an open loop: in a closed one nothing is due before it is sent."""
    figures = document.figures
    chosen = [
        (name_of(name), spread)
        for name, spread in figures.latencies_ms.items()
        if name != "ttft_from_due" or document.run.mode == "open"
    ]
    if document.run.mode == "open" and figures.lateness_ms:
        chosen.append(("Sent late by", figures.lateness_ms))
    return _grid("Latency, ms", chosen)


def server_of(document: Document) -> Grid:
    figures = document.figures
    added = [(ADDED_TTFT, figures.added_ttft_ms)] if figures.added_ttft_ms else []
    return _grid("Server, ms", [*figures.stages_ms.items(), *added])


def turns_of(document: Document) -> Grid:
    turns = document.figures.turns
    grid = _grid("TTFT by turn, ms", [(f"turn {each.turn + 1}", each.ttft_ms) for each in turns])
    cells = ["" if each.cached_share is None else share(each.cached_share) for each in turns]
    rows = tuple((*row, cell) for row, cell in zip(grid.rows, cells, strict=True))
    return Grid(grid.title, (*grid.columns, "cached"), rows)


def failures_of(document: Document) -> Grid:
    rows = tuple(
        (clipped(kind), f"{each.count:,}", clipped(each.example)) for kind, each in document.failures.items()
    )
    return Grid("Failures", ("count", "first of them"), rows)


def clipped(text: str) -> str:
    """In one line, with an end that is not too far away."""
    line = one_line(text)
    return line if len(line) <= _MAX_DETAIL else line[: _MAX_DETAIL - 1] + "…"


def settings_of(run: RunInfo) -> Facts:
    rows = [
        ("URL", run.url + run.endpoint),
        ("Model", run.model),
        ("Load", load_of(run)),
        ("Seed", str(run.seed)),
        ("Started", run.started_at),
        *run.options.items(),
        *run.versions.items(),
        ("Client's machine", run.machine),
    ]
    return Facts("Settings", tuple((clipped(name), clipped(value)) for name, value in rows))


def notes_of(document: Document) -> list[str]:
    return [clipped(note) for note in document.run.client.notes]


def grids_of(document: Document) -> list[Grid]:
    """All of them that have rows."""
    grids = (latencies_of(document), server_of(document), turns_of(document), failures_of(document))
    return [each for each in grids if each.rows]


def _grid(title: str, spreads: Iterable[tuple[str, Spread]]) -> Grid:
    """One row for each: mean, min, the percentiles, max."""
    named = list(spreads)
    columns = _columns([spread for _, spread in named])
    rows = tuple(
        (clipped(name), *(shown(spread[each]) if each in spread else "" for each in columns))
        for name, spread in named
    )
    return Grid(title, columns, rows)


def _columns(spreads: Iterable[Mapping[str, float]]) -> tuple[str, ...]:
    percentiles = dict.fromkeys(name for spread in spreads for name in spread if name.startswith("p"))
    return (*_ENDS, *percentiles, "max")
