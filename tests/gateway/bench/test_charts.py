"""Charts: labels that can be read, axes that invent nothing."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from typing import Final

import pytest

from gateway.bench.bars import bars
from gateway.bench.charts import WIDTH, Line, curves, short
from gateway.bench.document import CURVE_PERCENTS
from gateway.bench.percentiles import Distribution

CHARACTER, ABOVE = 5.6, 9.0  # the size of a label's letters, seen in a browser
Box = tuple[float, float, float, float]


def line(values: list[float], index: int = 0) -> Line:
    return Line(index, f"run {index}", Distribution.of(values).curve(CURVE_PERCENTS))


def labels(svg: str) -> list[Box]:
    """(left, top, right, bottom) of each label at a point."""
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="told" text-anchor="(\w+)">([^<]*)<', svg)
    boxes = []
    for x, y, anchor, told in found:
        width, bottom = len(told) * CHARACTER, float(y)
        left = float(x) - (width if anchor == "end" else 0)
        boxes.append((left, bottom - ABOVE, left + width, bottom))
    return boxes


def places(svg: str) -> list[tuple[float, float]]:
    """Points all along a curve, closer than a label is high."""
    (points,) = re.findall(r'<polyline points="([^"]*)"', svg)
    corners = [tuple(map(float, each.split(","))) for each in points.split()]
    return [
        (x + (to_x - x) * step / 99, y + (to_y - y) * step / 99)
        for (x, y), (to_x, to_y) in pairwise(corners)
        for step in range(100)
    ]


def spread_out(rng: random.Random) -> list[float]:
    kind = rng.choice((rng.random, lambda: rng.expovariate(1), lambda: rng.lognormvariate(0, 3), lambda: 1.0))
    scale = 10 ** rng.uniform(-2, 5)
    return [scale * (0.0 if rng.random() < 0.2 else kind()) for _ in range(rng.choice((1, 2, 9, 99)))]


@pytest.mark.parametrize("seed", range(60))
def test_labels_are_clear_of_the_curve_and_of_each_other(seed: int) -> None:
    svg = curves("TTFT", [line(spread_out(random.Random(seed)))])
    boxes = labels(svg)
    assert len(boxes) == 3
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= WIDTH
        assert top >= 0
        assert not [1 for x, y in places(svg) if left <= x <= right and top <= y <= bottom]
    for first in boxes:
        for other in boxes:
            is_apart = (
                first[2] <= other[0] or other[2] <= first[0] or first[3] <= other[1] or other[3] <= first[1]
            )
            assert is_apart or first is other


def test_curves_of_several_runs_have_no_labels_and_their_own_colours() -> None:
    svg = curves("TTFT", [line([1.0, 2.0], 0), line([3.0], 3)])
    assert labels(svg) == []
    assert re.findall(r'class="line (s\d)"', svg) == ["s3", "s0"]
    assert "run 3: p50 3.00 ms" in svg


def test_what_a_logarithmic_axis_cannot_show_is_said() -> None:
    told: Final = "shorter ones stand at the left edge"
    assert told in curves("TBT", [line([0.0] * 6 + [10.0] * 5 + [900.0])])
    assert told not in curves("TBT", [line([9.0] * 6 + [10.0] * 5 + [900.0])])
    assert told not in curves("TBT", [line([0.0] * 6 + [10.0] * 5)])  # linear: 0 has its place


def test_gaps_of_0_do_not_press_the_others_against_the_axis() -> None:
    assert "ms, logarithmic" in curves("TBT", [line([0.0] * 60 + [10.0] * 39 + [900.0])])


def test_an_axis_of_zeros_has_no_other_number() -> None:
    svg = curves("TBT", [line([0.0, 0.0])])
    assert re.findall(r'class="tick" text-anchor="middle">([^<]*)<', svg) == ["0"]


@pytest.mark.parametrize(
    ("tick", "told"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (2000, "2,000"),
        (10_000, "10 k"),
        (250_000, "250 k"),
        (3e6, "3 M"),
        (2e10, "20 G"),
    ],
)
def test_ticks_are_short(tick: float, told: str) -> None:
    assert short(tick) == told


def test_bars_are_shares_of_the_longest() -> None:
    html = bars(
        "Stages", {"queue": {"p50": 1.0, "p99": 4.0}, "added": {"p50": -0.5, "p99": 1.0}}, "p50", "p99"
    )
    assert re.findall(r"width:([\d.]+)%", html) == ["100.00", "25.00", "25.00", "0.00"]
    assert "1.00 / 4.00" in html
    assert re.findall(r"width:([\d.]+)%", bars("Stages", {"queue": {"p50": 0.0}}, "p50", "p50")) == [
        "0.00",
        "0.00",
    ]
