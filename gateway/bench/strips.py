"""The timeline as charts of the same seconds: inline SVG.

Not here: what came when (`gateway/bench/timeline.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gateway.bench.charts import LEFT, RIGHT, across, box, dot, image, path, stroke, upward, words
from gateway.bench.document import Document
from gateway.bench.phrases import counted
from gateway.bench.rows import shown
from gateway.bench.scale import Scale, fitting, linear
from gateway.bench.timeline import Slice

_TOP, _BOTTOM = 16, 136
_HEIGHT: Final = _BOTTOM + 32
_CROSS: Final = 3.5
_MIN_WIDTH: Final = 1.0  # of what is not measured: a narrower box would look like a line of the grid


@dataclass(frozen=True, slots=True)
class Strip:
    """A chart with its title."""

    title: str
    chart: str


@dataclass(frozen=True, slots=True)
class _Rate:
    """A line: its title, and the value of a slice."""

    title: str
    value: Callable[[Slice], float]


def strips(document: Document) -> list[Strip]:
    """TTFT as points with failures as crosses, then rates and requests under way. None without requests."""
    timeline = document.timeline
    slice_s = timeline.slice_s
    if not any(each.num_sent for each in timeline.slices):
        return []
    rates = [
        _Rate("Requests that ended, per second", lambda each: (each.num_ok + each.num_failed) / slice_s),
        _Rate("Output tokens per second", lambda each: each.output_tokens / slice_s),
        _Rate("Requests under way", lambda each: each.running),
    ]
    return [_first_tokens(document), *(_line(document, rate) for rate in rates)]


def has_unmeasured(document: Document) -> bool:
    """Whether the charts have grey parts."""
    return any(_unmeasured(document, _times(document)))


def _first_tokens(document: Document) -> Strip:
    points, failures = document.timeline.first_tokens, document.timeline.failures
    num_failed = document.figures.num_failed
    times = _times(document)
    values = sorted(value for _, value in points)
    scale = fitting(values[len(values) // 2], values[-1], _BOTTOM, _TOP) if values else None
    parts = list(_frame(document, times, scale))
    if scale is None:
        parts.append(words((LEFT + RIGHT) / 2, (_TOP + _BOTTOM) / 2, "no first token came", "tick", "middle"))
    else:
        parts += [dot(times.at(at_s), scale.at(ms), 1.8, "point s0") for at_s, ms in points]
    for at_s, kind in failures:
        parts += _cross(times.at(at_s), _TOP + _CROSS, f"{kind} at {shown(at_s)} s")
    if failures:
        parts.append(words(RIGHT, 9, f"× {num_failed:,} failed", "alert", "end"))
    between = f", {shown(values[0])} to {shown(values[-1])} ms" if values else ""
    told = f"{counted(len(points), 'first token')}{between}; {counted(num_failed, 'failure')}"
    log = ", logarithmic" if scale is not None and scale.is_log else ""
    return Strip(f"TTFT of each request, ms{log}", image("TTFT over time", told, _HEIGHT, parts))


def _cross(x: float, y: float, told: str) -> Iterator[str]:
    yield stroke(x - _CROSS, y - _CROSS, x + _CROSS, y + _CROSS, "cross")
    yield stroke(x - _CROSS, y + _CROSS, x + _CROSS, y - _CROSS, "cross")
    yield box(x - _CROSS, y - _CROSS, 2 * _CROSS, 2 * _CROSS, "clear", told)


def _line(document: Document, rate: _Rate) -> Strip:
    timeline = document.timeline
    values = [rate.value(each) for each in timeline.slices]
    times, scale = _times(document), linear(max(values), _BOTTOM, _TOP)
    parts = list(_frame(document, times, scale))
    parts.append(path(_stairs(times, scale, timeline.slice_s, values), "s0 thin"))
    mean = sum(values) / len(values)
    told = f"mean {shown(mean)}, largest {shown(max(values))}, in slices of {shown(timeline.slice_s)} s"
    return Strip(rate.title, image(f"{rate.title} over time", told, _HEIGHT, parts))


def _stairs(times: Scale, scale: Scale, slice_s: float, values: Sequence[float]) -> list[tuple[float, float]]:
    """A step for each slice."""
    edges = [times.at(index * slice_s) for index in range(len(values) + 1)]
    return [
        (x, scale.at(value))
        for (left, right), value in zip(pairwise(edges), values, strict=True)
        for x in (left, right)
    ]


def _times(document: Document) -> Scale:
    end_s = len(document.timeline.slices) * document.timeline.slice_s
    return Scale(0.0, end_s, LEFT, RIGHT)


def _frame(document: Document, times: Scale, scale: Scale | None) -> Iterator[str]:
    """Axes, and what is not measured in grey. No scale: there is nothing to be read from an axis."""
    yield from _unmeasured(document, times)
    if scale is not None:
        yield from upward(scale, num=3)
    yield from across(times, _TOP, _BOTTOM, "s")


def _unmeasured(document: Document, times: Scale) -> Iterator[str]:
    run = document.run
    until_s = times.high if run.steady_until_s is None else run.steady_until_s
    for from_s, to_s, name in ((0.0, run.steady_from_s, "warm-up"), (until_s, times.high, "drain")):
        x, to_x = times.at(from_s), times.at(to_s)
        if to_x - x >= _MIN_WIDTH:
            yield box(x, _TOP, to_x - x, _BOTTOM - _TOP, "outside", f"{name}: not measured")
