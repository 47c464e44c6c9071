"""Charts as inline SVG: no script, no font and no image from elsewhere, colours from the page's style sheet.

All have one width, at which their text can be read on a phone and beside each other on a wide screen. Each is
an image with a name and a description in words; its numbers also stand in a table of the page. Colours are
classes `s0`, `s1`, ..., one for each run, told apart by dashes too. Not here: what stands around the charts
(`gateway/bench/page.py`), the run over time (`gateway/bench/strips.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from gateway.bench.rows import shown
from gateway.bench.scale import Scale, fitting

Points = Sequence[tuple[float, float]]
WIDTH: Final = 460
LEFT, RIGHT = 48, 446
MARKED: Final = (50, 90, 99)  # percentiles with a dot, and a number where there is one run
_HEIGHT: Final = 254
_TOP, _BOTTOM = 22, 222  # above the top is room for the label of a percentile near 100
_GAP: Final = 8  # from a point to its label
_CHARACTER: Final = 6.4  # the width of one in a label, at most


@dataclass(frozen=True, slots=True)
class Line:
    """One run's curve: (percent, milliseconds). `index`: the run's, by which it has its colour."""

    index: int
    name: str
    points: Points


def text(value: str) -> str:
    """Any text for the inside of an element or an attribute."""
    return escape("".join(each if each.isprintable() else " " for each in value))


def image(name: str, description: str, height: int, parts: Iterable[str]) -> str:
    """An SVG with what a screen reader says of it."""
    label = f'role="img" aria-label="{text(name)}. {text(description)}"'
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" {label}>{"".join(parts)}</svg>'


def words(x: float, y: float, value: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{text(value)}</text>'


def stroke(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="{kind}"/>'


def path(points: Points, kind: str) -> str:
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="line {kind}"/>'


def dot(x: float, y: float, radius: float, kind: str, told: str = "") -> str:
    title = f"<title>{text(told)}</title>" if told else ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}">{title}</circle>'


def box(x: float, y: float, width: float, height: float, kind: str, told: str = "") -> str:
    title = f"<title>{text(told)}</title>" if told else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
    return f'<rect {place} class="{kind}">{title}</rect>'


def across(scale: Scale, top: float, bottom: float, unit: str) -> Iterator[str]:
    """The x axis below, with a grid."""
    for tick in scale.ticks():
        x = scale.at(tick)
        yield stroke(x, top, x, bottom, "grid")
        yield words(x, bottom + 15, short(tick), "tick", "middle")
    yield words(scale.end, bottom + 29, unit, "tick", "end")


def upward(scale: Scale, num: int = 4, unit: str = "") -> Iterator[str]:
    """The y axis on the left, with a grid."""
    for tick in scale.ticks(num):
        y = scale.at(tick)
        yield stroke(LEFT, y, RIGHT, y, "grid")
        yield words(LEFT - 6, y + 4, f"{short(tick)}{unit}", "tick", "end")


def short(tick: float) -> str:
    """A round number in the room of an axis: 0.5, 2,000, 50 k, 1 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(tick) >= max(size, 1e4):
            return f"{tick / size:,.6g} {unit}"
    return f"{tick:,.6g}"


def curves(name: str, lines: Sequence[Line]) -> str:
    """What share of the requests (or gaps) took at most how long; lines by run. Each has points."""
    above_0 = [value for _, value in lines[0].points if value > 0]
    typical = above_0[len(above_0) // 2] if above_0 else 0.0
    x_scale = fitting(typical, max(line.points[-1][1] for line in lines), LEFT, RIGHT)
    y_scale = Scale(0, 100, _BOTTOM, _TOP)
    parts = [*across(x_scale, _TOP, _BOTTOM, _axis(x_scale)), *upward(y_scale, num=5, unit=" %")]
    if any(line.points[0][1] < x_scale.low for line in lines):
        parts.append(words(LEFT, _BOTTOM + 29, "shorter ones stand at the left edge", "tick"))
    for line in reversed(lines):  # the first run on top
        places = [(x_scale.at(value), y_scale.at(percent)) for percent, value in line.points]
        parts.append(path([(places[0][0], _BOTTOM), *places], f"s{line.index}"))
    for line in reversed(lines):
        parts += _marks(line, x_scale, y_scale, is_told=len(lines) == 1)
    told = (f"{line.name}: " + ", ".join(f"p{p} {shown(ms)} ms" for p, ms in marked(line)) for line in lines)
    return image(name, "; ".join(told), _HEIGHT, parts)


def _axis(scale: Scale) -> str:
    return "ms, logarithmic" if scale.is_log else "ms"


def marked(line: Line) -> list[tuple[int, float]]:
    """(percent, milliseconds) of what has a dot."""
    by_percent = dict(line.points)
    return [(percent, by_percent[percent]) for percent in MARKED]


def _marks(line: Line, x_scale: Scale, y_scale: Scale, is_told: bool) -> Iterator[str]:
    for percent, value in marked(line):
        x, y = x_scale.at(value), y_scale.at(percent)
        yield dot(x, y, 3.5, f"mark s{line.index}", f"{line.name}: p{percent} {shown(value)} ms")
        if is_told:
            yield _label(x, y, f"p{percent} {shown(value)}")


def _label(x: float, y: float, value: str) -> str:
    """A curve only rises, so that it is never below and right of a point of it, nor above and left."""
    if x + _GAP + _CHARACTER * len(value) <= RIGHT:
        return words(x + _GAP, y + 13, value, "told")
    return words(x - _GAP, y - 5, value, "told", "end")
