"""Charts as inline SVG: no script, no font and no image from elsewhere, colours from the page's style sheet.

Each is an image with a name and a description in words; its numbers also stand in a table of the page.
Colours are classes `s0`, `s1`, ..., one for each run, told apart by dashes too. Not here: what stands around
the charts (`gateway/bench/page.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from gateway.bench.percentiles import Spread
from gateway.bench.rows import shown
from gateway.bench.scale import Scale, fitting, linear

Points = Sequence[tuple[float, float]]
MARKED: Final = (50, 90, 99)  # percentiles with a dot and a number
_WIDTH, _HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 452, 12, 218
_ROW_HEIGHT: Final = 26


@dataclass(frozen=True, slots=True)
class Line:
    """One run's curve: (percent, milliseconds)."""

    name: str
    points: Points


def text(value: str) -> str:
    """Any text for the inside of an element or an attribute."""
    return escape("".join(each if each.isprintable() else " " for each in value))


def image(name: str, description: str, width: int, height: int, parts: Iterable[str], kind: str = "") -> str:
    """An SVG with what a screen reader says of it."""
    label = f'role="img" aria-label="{text(name)}. {text(description)}"'
    return f'<svg class="chart {kind}" viewBox="0 0 {width} {height}" {label}>{"".join(parts)}</svg>'


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
        yield words(x, bottom + 15, f"{tick:,.6g}", "tick", "middle")
    yield words(scale.end, bottom + 29, unit, "tick", "end")


def upward(scale: Scale, left: float, right: float, num: int = 4, unit: str = "") -> Iterator[str]:
    """The y axis on the left, with a grid."""
    for tick in scale.ticks(num):
        y = scale.at(tick)
        yield stroke(left, y, right, y, "grid")
        yield words(left - 6, y + 4, f"{tick:,.6g}{unit}", "tick", "end")


def curves(name: str, lines: Sequence[Line]) -> str:
    """What share of the requests (or gaps) took at most how long; lines by run. Each has points."""
    median = dict(lines[0].points)[50]
    x_scale = fitting(median, max(line.points[-1][1] for line in lines), _LEFT, _RIGHT)
    y_scale = Scale(0, 100, _BOTTOM, _TOP)
    parts = [
        *across(x_scale, _TOP, _BOTTOM, _axis(x_scale)),
        *upward(y_scale, _LEFT, _RIGHT, num=5, unit=" %"),
    ]
    for index, line in reversed(list(enumerate(lines))):  # the first run on top
        places = [(x_scale.at(value), y_scale.at(percent)) for percent, value in line.points]
        parts.append(path([(places[0][0], _BOTTOM), *places], f"s{index}"))
        parts += _marks(line, x_scale, y_scale, index, is_told=index == 0)
    told = (f"{line.name}: " + ", ".join(f"p{p} {shown(ms)} ms" for p, ms in _marked(line)) for line in lines)
    return image(name, "; ".join(told), _WIDTH, _HEIGHT, parts)


def _axis(scale: Scale) -> str:
    return "ms, logarithmic" if scale.is_log else "ms"


def _marked(line: Line) -> list[tuple[int, float]]:
    by_percent = dict(line.points)
    return [(percent, by_percent[percent]) for percent in MARKED]


def _marks(line: Line, x_scale: Scale, y_scale: Scale, index: int, is_told: bool) -> Iterator[str]:
    middle = (x_scale.start + x_scale.end) / 2
    for percent, value in _marked(line):
        x, y = x_scale.at(value), y_scale.at(percent)
        yield dot(x, y, 3.5, f"mark s{index}", f"{line.name}: p{percent} {shown(value)} ms")
        if is_told:
            is_left = x > middle
            yield words(
                x + (-8 if is_left else 8),
                y + 12,
                f"p{percent}  {shown(value)}",
                "told",
                "end" if is_left else "start",
            )


def bars(name: str, spreads: Mapping[str, Spread], short: str, long: str) -> str:
    """A bar for each: one percentile solid, a higher one pale behind it. `short`, `long`: p50, p99."""
    left, right = 150, 850
    scale = linear(max(spread[long] for spread in spreads.values()), left, right)
    height = _ROW_HEIGHT * len(spreads)
    parts = list(across(scale, 0, height, "ms"))
    for index, (label, spread) in enumerate(spreads.items()):
        y = index * _ROW_HEIGHT
        told = f"{label}: {short} {shown(spread[short])} ms, {long} {shown(spread[long])} ms"
        parts.append(words(left - 10, y + 17, label, "name", "end"))
        parts.append(box(left, y + 6, scale.at(spread[long]) - left, 14, "pale s0", told))
        parts.append(box(left, y + 6, max(1.0, scale.at(spread[short]) - left), 14, "full s0", told))
        parts.append(
            words(
                scale.at(spread[long]) + 8, y + 17, f"{shown(spread[short])} / {shown(spread[long])}", "told"
            )
        )
    told = "; ".join(
        f"{each}: {shown(spread[short])}, {shown(spread[long])}" for each, spread in spreads.items()
    )
    return image(name, f"{short} and {long} in ms. {told}", 960, height + 34, parts, "wide")
