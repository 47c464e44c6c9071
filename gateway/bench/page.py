"""The report as one HTML file: no script, nothing from elsewhere; light or dark as its reader's system is.

One run, or several: the first is told in full, the others beside it. Whatever a server or a user wrote is
escaped, and the page's own policy allows nothing but its style. Not here: the charts
(`gateway/bench/charts.py`, `strips.py`), and the numbers' form (`rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Final

from gateway.bench.bars import bars
from gateway.bench.charts import Line, curves, marked, stroke, text
from gateway.bench.compare import Compared, compared, distinct, settings, unlike
from gateway.bench.document import Document
from gateway.bench.goodput import Goodput
from gateway.bench.rows import (
    ADDED_TTFT,
    LATENCIES,
    Facts,
    Grid,
    facts_of,
    failures_of,
    latencies_of,
    load_of,
    notes_of,
    server_of,
    settings_of,
    share,
    shown,
    turns_of,
)
from gateway.bench.stages import before_first_token
from gateway.bench.strips import has_unmeasured, strips

MAX_RUNS: Final = 5  # more have no colours, and cannot be told apart in a chart
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_MAX_TITLE: Final = 80
_CURVES: Final = ("ttft", "tpot", "tbt", "e2e")


def page(runs: Sequence[tuple[str, Document]]) -> str:
    """The HTML of named runs, the first one in full.

    Raises `ValueError` for none, or more than `MAX_RUNS`.
    """
    if not 1 <= len(runs) <= MAX_RUNS:
        raise ValueError(f"a page shows 1 to {MAX_RUNS} runs, not {len(runs)}")
    runs = distinct(runs)
    document = runs[0][1]
    model = document.run.model  # in full, it stands among the settings
    title = text(f"Load test of {model if len(model) <= _MAX_TITLE else model[:_MAX_TITLE] + '…'}")
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}</title><link rel="icon" href="data:,"><style>{_style()}</style></head>'
    )
    return f"{head}<body><main>{''.join(_body(runs, title))}</main></body></html>\n"


def _style() -> str:
    static = resources.files("gateway") / "static"
    return "".join((static / name).read_text(encoding="utf-8") for name in ("theme.css", "report.css"))


def _body(runs: Sequence[tuple[str, Document]], title: str) -> Iterator[str]:
    document = runs[0][1]
    run = document.run
    yield f"<header><h1>{title}</h1>"
    yield f'<p class="lead">{text(run.url + run.endpoint)}<br>{text(load_of(run))}</p></header>'
    yield from (f'<p class="note" role="note">{text(note)}</p>' for note in notes_of(document))
    yield _headline(document)
    if len(runs) > 1:
        yield "<h2>Side by side</h2>"
        yield from (f'<p class="note" role="note">{text(note)}</p>' for note in unlike(runs))
        yield _compared(settings(runs), "words", "How each was made")
        yield _compared(compared(runs), "", "In brackets: the ratio to the first, where that is not 0")
    yield from _latency(runs)
    yield from _over_time(document)
    yield from _server(document)
    for grid in (turns_of(document), failures_of(document)):
        if grid.rows:
            kind = "words" if grid == failures_of(document) else ""
            yield f"<h2>{text(grid.title)}</h2>{_grid(grid, kind, '')}"
    for facts in (facts_of(document), settings_of(run)):
        yield f"<h2>{text(facts.title)}</h2>{_facts(facts)}"
    yield f"<h2>What the names mean</h2>{_meanings()}"


def _headline(document: Document) -> str:
    figures = document.figures
    numbers = [
        (f"{LATENCIES[name][0]} {percent}", shown(figures.latencies_ms[name][percent]), "ms")
        for name, percent in (
            ("ttft", "p50"),
            ("ttft", "p99"),
            ("tpot", "p50"),
            ("tbt", "p99"),
            ("e2e", "p50"),
        )
        if percent in figures.latencies_ms.get(name, {})
    ]
    numbers += [
        ("Requests", shown(figures.throughput.requests_per_s), "/s"),
        ("Output tokens", shown(figures.throughput.output_tokens_per_s), "/s"),
    ]
    if figures.goodput is not None:
        numbers.append(_goodput(figures.goodput))
    if figures.stalls is not None:
        numbers.append(("Stalled tokens", share(figures.stalls.token_share), ""))
    cards = [_card(*each) for each in numbers]
    cards.append(
        _card("Failed", f"{figures.num_failed:,}", f"of {figures.num_requests:,}", figures.num_failed > 0)
    )
    return f'<dl class="headline">{"".join(cards)}</dl>'


def _goodput(goodput: Goodput) -> tuple[str, str, str]:
    return "Goodput", share(goodput.share), ""


def _card(name: str, value: str, unit: str, is_bad: bool = False) -> str:
    kind = ' class="bad"' if is_bad else ""
    return f"<div{kind}><dt>{text(name)}</dt><dd>{text(value)} <small>{text(unit)}</small></dd></div>"


def _latency(runs: Sequence[tuple[str, Document]]) -> Iterator[str]:
    """Of each latency the share of requests within a time, then the numbers of the first run."""
    document = runs[0][1]
    charts = []
    for name in _CURVES:
        lines = [
            Line(index, run, each.curves_ms[name])
            for index, (run, each) in enumerate(runs)
            if name in each.curves_ms
        ]
        if lines:
            short, meaning = LATENCIES[name]
            title = f"{short}, ms <small>share of {'gaps' if name == 'tbt' else 'requests'} within it</small>"
            charts.append(_chart(title, curves(f"{short}: {meaning}", lines), _told(lines)))
    if charts:
        yield "<h2>Latency</h2>"
        yield _keys([(index, name) for index, (name, _) in enumerate(runs)]) if len(runs) > 1 else ""
        yield f'<div class="charts">{"".join(charts)}</div>'
    grid = latencies_of(document)
    if grid.rows:
        yield _grid(grid, "", f"{grid.title}{f', of {runs[0][0]}' if len(runs) > 1 else ''}")


def _chart(title: str, chart: str, told: str = "") -> str:
    return f'<div class="card"><h3>{title}</h3>{chart}{told}</div>'


def _told(lines: Sequence[Line]) -> str:
    """What the dots of several curves say. A single curve has labels."""
    if len(lines) < 2:
        return ""
    said = (", ".join(f"p{percent} {shown(value)}" for percent, value in marked(line)) for line in lines)
    return _keys([(line.index, f"{line.name}: {each}") for line, each in zip(lines, said, strict=True)])


def _over_time(document: Document) -> Iterator[str]:
    if charts := strips(document):
        yield "<h2>Over time</h2>"
        if has_unmeasured(document):
            yield '<p class="lead">Grey: warm-up and drain, which are not measured.</p>'
        yield f'<div class="charts">{"".join(_chart(each.title, each.chart) for each in charts)}</div>'


def _keys(words: Sequence[tuple[int, str]]) -> str:
    """Words for each run, after its line: (its index, what is said)."""
    keys = (
        f'<li><svg viewBox="0 0 30 8" aria-hidden="true">{stroke(0, 4, 30, 4, f"line s{index}")}</svg>'
        f"<span>{text(each)}</span></li>"
        for index, each in words
    )
    return f'<ul class="legend">{"".join(keys)}</ul>'


def _server(document: Document) -> Iterator[str]:
    grid = server_of(document)
    if not grid.rows:
        return
    yield "<h2>Where the time to the first token went</h2>"
    stages = before_first_token(document.figures.stages_ms)
    if added := document.figures.added_ttft_ms:
        stages[ADDED_TTFT] = added
    percents = [each for each in grid.columns if each.startswith("p")]
    if stages and percents:
        chart = bars("The server's stages", stages, percents[0], percents[-1])
        told = f"{percents[0]} and, pale, {percents[-1]}"
        yield _chart(f"Stages, ms <small>{told}</small>", chart)
    yield _grid(grid, "", grid.title)


def _compared(rows: Sequence[Compared], kind: str, caption: str) -> str:
    """A column for each run."""
    columns = tuple(name for name, _ in rows[0].cells)
    cells = tuple((row.name, *(value for _, value in row.cells)) for row in rows)
    table = _grid(Grid("", columns, cells), kind, caption)
    return f'<div class="compared" style="--columns:{len(columns)}">{table}</div>'


def _grid(grid: Grid, kind: str, caption: str) -> str:
    heads = "".join(f'<th scope="col">{text(each)}</th>' for each in ("", *grid.columns))
    rows = "".join(
        f'<tr><th scope="row">{text(name)}</th>{"".join(f"<td>{text(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in grid.rows
    )
    said = f"<caption>{text(caption)}</caption>" if caption else ""
    table = f'<table class="{kind}">{said}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<div class="card scroll">{table}</div>'


def _facts(facts: Facts) -> str:
    rows = "".join(
        f'<tr><th scope="row">{text(name.strip())}</th><td>{text(value)}</td></tr>'
        for name, value in facts.rows
    )
    return f'<div class="card scroll"><table class="words"><tbody>{rows}</tbody></table></div>'


def _meanings() -> str:
    names = "".join(f"<dt>{name}</dt><dd>{text(meaning)}</dd>" for name, meaning in LATENCIES.values())
    more = {
        "Failed": "an error status, an error frame, a stream cut short, a timeout, no connection",
        "p50, p99": "percentiles, by linear interpolation; latencies are of requests that succeeded",
        ADDED_TTFT: "the client's TTFT less the server's: network, connection, the client itself",
    }
    names += "".join(f"<dt>{name}</dt><dd>{text(meaning)}</dd>" for name, meaning in more.items())
    return f'<div class="card"><dl class="meanings">{names}</dl></div>'
