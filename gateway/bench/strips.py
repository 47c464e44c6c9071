"""The timeline as strips of charts, one under the other on the same seconds: inline SVG.

Not here: what came when (`gateway/bench/timeline.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gateway.bench.charts import across, box, dot, image, path, stroke, upward, words
from gateway.bench.document import Document
from gateway.bench.rows import shown
from gateway.bench.scale import Scale, fitting, linear
from gateway.bench.timeline import Slice

_WIDTH: Final = 960
_LEFT, _RIGHT = 62, 948
_TOP, _BOTTOM = 26, 126
_CROSS: Final = 3.5


@dataclass(frozen=True, slots=True)
class Strip:
    """A line: its title, and the value of a slice."""

    title: str
    value: Callable[[Slice], float]


def strips(document: Document) -> list[str]:
    """TTFT as points with failures as crosses, then rates and requests under way."""
    timeline = document.timeline
    slice_s = timeline.slice_s
    lines = [
        Strip("Requests that ended, per second", lambda each: (each.num_ok + each.num_failed) / slice_s),
        Strip("Output tokens per second", lambda each: each.output_tokens / slice_s),
        Strip("Requests under way", lambda each: each.running),
    ]
    return [_first_tokens(document), *(_line(document, strip) for strip in lines)]


def _first_tokens(document: Document) -> str:
    points, failures = document.timeline.first_tokens, document.timeline.failures
    times = _times(document)
    values = sorted(value for _, value in points) or [1.0]
    scale = fitting(values[len(values) // 2], values[-1], _BOTTOM, _TOP)
    parts = [*_frame(document, times, scale, f"TTFT of each request, ms{', logarithmic' * scale.is_log}")]
    parts += [dot(times.at(at_s), scale.at(ms), 1.8, "point s0") for at_s, ms in points]
    for at_s, kind in failures:
        parts += _cross(times.at(at_s), _TOP + _CROSS, f"{kind} at {shown(at_s)} s")
    if failures:
        parts.append(words(_RIGHT, 14, f"× {document.figures.num_failed:,} failed", "alert", "end"))
    told = (
        f"{len(points)} first tokens, {shown(values[0])} to {shown(values[-1])} ms; {len(failures)} failures"
    )
    return image("TTFT over time", told, _WIDTH, _BOTTOM + 34, parts, "wide")


def _cross(x: float, y: float, told: str) -> Iterator[str]:
    yield stroke(x - _CROSS, y - _CROSS, x + _CROSS, y + _CROSS, "cross")
    yield stroke(x - _CROSS, y + _CROSS, x + _CROSS, y - _CROSS, "cross")
    yield box(x - _CROSS, y - _CROSS, 2 * _CROSS, 2 * _CROSS, "clear", told)


def _line(document: Document, strip: Strip) -> str:
    timeline = document.timeline
    values = [strip.value(each) for each in timeline.slices]
    times, scale = _times(document), linear(max(values), _BOTTOM, _TOP)
    parts = list(_frame(document, times, scale, strip.title))
    parts.append(path(_stairs(times, scale, timeline.slice_s, values), "s0 thin"))
    mean = sum(values) / len(values)
    told = f"mean {shown(mean)}, largest {shown(max(values))}, in slices of {shown(timeline.slice_s)} s"
    return image(f"{strip.title} over time", told, _WIDTH, _BOTTOM + 34, parts, "wide")


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
    return Scale(0.0, end_s, _LEFT, _RIGHT)


def _frame(document: Document, times: Scale, scale: Scale, title: str) -> Iterator[str]:
    """Title and axes, and what is not measured in grey."""
    run = document.run
    yield words(0, 14, title, "name")
    until_s = times.high if run.steady_until_s is None else run.steady_until_s
    for from_s, to_s, name in ((0.0, run.steady_from_s, "warm-up"), (until_s, times.high, "drain")):
        if to_s > from_s:
            x = times.at(from_s)
            yield box(x, _TOP, times.at(to_s) - x, _BOTTOM - _TOP, "outside", f"{name}: not measured")
    yield from upward(scale, _LEFT, _RIGHT, num=3)
    yield from across(times, _TOP, _BOTTOM, "s")
