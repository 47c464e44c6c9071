"""The report as text for a terminal: calm, 80 columns, bold titles on a terminal and no other escapes.

Not here: what the rows say (`gateway/bench/rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Final

from gateway.bench.document import Document
from gateway.bench.rows import Facts, Grid, facts_of, failures_of, grids_of, notes_of, settings_of

WIDTH: Final = 80
_NAME_WIDTH: Final = 16
_BOLD: Final = "\x1b[1m{}\x1b[0m"


def table(document: Document, width: int = WIDTH, is_terminal: bool = False) -> str:
    """All lines, each with its line break. `width` is kept but for columns that need more."""
    return "".join(line + "\n" for line in _lines(document, width, _BOLD if is_terminal else "{}"))


def _lines(document: Document, width: int, title: str) -> Iterator[str]:
    settings = dict(settings_of(document.run).rows)
    yield title.format(f"{settings['URL']}  {settings['Model']}")
    yield from wrap(settings["Load"], width)
    yield ""
    yield from _facts(facts_of(document), width)
    for grid in grids_of(document):
        yield ""
        if grid == failures_of(document):
            yield title.format(grid.title)
            yield from _listed(grid, width)
        else:
            yield from _grid(grid, title)
    for note in notes_of(document):
        yield ""
        yield from wrap(f"Note: {note}", width)


def _facts(facts: Facts, width: int) -> Iterator[str]:
    for name, value in facts.rows:
        yield from _indented(name, value, width)


def _indented(name: str, value: str, width: int) -> Iterator[str]:
    """The name on the left, the value beside it on as many lines as it takes."""
    lines = wrap(value, max(20, width - _NAME_WIDTH - 1)) or [""]
    yield f"{name:<{_NAME_WIDTH}} {lines[0]}".rstrip()
    for line in lines[1:]:
        yield f"{'':<{_NAME_WIDTH}} {line}"


def _grid(grid: Grid, title: str) -> Iterator[str]:
    """Numbers right-aligned under their heads."""
    columns = list(zip(grid.columns, *(row[1:] for row in grid.rows), strict=True))
    widths = [max(7, *(len(cell) for cell in cells)) for cells in columns]
    name_width = max(_NAME_WIDTH, len(grid.title), *(len(row[0]) for row in grid.rows))

    def cells(values: tuple[str, ...]) -> str:
        return "".join(f" {value:>{size}}" for value, size in zip(values, widths, strict=True))

    yield title.format(f"{grid.title:<{name_width}}") + cells(grid.columns)
    for name, *values in grid.rows:
        yield f"{name:<{name_width}}" + cells(tuple(values))


def _listed(grid: Grid, width: int) -> Iterator[str]:
    for name, *values in grid.rows:
        yield from _indented(name, "  ".join(values), width)
