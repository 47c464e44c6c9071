"""A run over time: what came in each of at most 80 slices, and single points to be drawn.

Of all requests, those of warm-up and drain too; but failures are those that the figures count. Not here: the
figures of the steady window, and what is a failure (`gateway/bench/figures.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf, nextafter
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from gateway.bench.bounds import Amount, Count
from gateway.bench.figures import Measured
from gateway.bench.percentiles import percentile
from gateway.bench.sample import Sample
from gateway.bench.throughput import Window, concurrency, last_s, tokens_in

MAX_SLICES: Final = 80
MAX_POINTS: Final = 1500  # more are not told apart in a picture, and a page has to hold them all
_MIN_SLICE_S: Final = 0.1
_STEPS: Final = (1, 2, 5)
_Point = TypeVar("_Point")


class Slice(msgspec.Struct, frozen=True):
    """Counts of one slice; `running`: the mean of the requests under way."""

    from_s: Amount
    num_sent: Count
    num_ok: Count  # that ended in it
    num_failed: Count  # of those that the figures count
    output_tokens: Amount
    running: Amount
    ttft_p50_ms: Amount | None  # of the first tokens that came in it


class Timeline(msgspec.Struct, frozen=True):
    """`first_tokens`: (when sent, TTFT in ms); `failures`: (when ended, kind). Both evenly thinned out."""

    slice_s: Amount
    slices: Annotated[tuple[Slice, ...], Meta(min_length=1, max_length=MAX_SLICES)]
    first_tokens: Annotated[tuple[tuple[Amount, Amount], ...], Meta(max_length=MAX_POINTS)]
    failures: Annotated[tuple[tuple[Amount, str], ...], Meta(max_length=MAX_POINTS)]


def timeline_of(measured: Measured) -> Timeline:
    """From the run's start to its end in slices of one length: at most 0.1, 0.2, 0.5, 1, 2, ... seconds."""
    samples, end_s = measured.all, measured.end_s or _MIN_SLICE_S
    num_slices = max(1, ceil(end_s / _slice_s(end_s)))
    slice_s = end_s / num_slices
    firsts = [(each.sent_s, (each.frames_s[0] - each.sent_s) * 1e3) for each in samples if each.frames_s]
    failures = [(last_s(each), each.error or "") for each in measured.failed]
    edges_s = [
        *(index * slice_s for index in range(num_slices)),
        max(num_slices * slice_s, nextafter(end_s, inf)),
    ]
    windows = [Window(*edges) for edges in pairwise(edges_s)]
    within: list[list[Sample]] = [[] for _ in windows]
    for sample in samples:  # one slice more on each side: a quotient may round across an edge
        from_index, to_index = int(sample.sent_s / slice_s) - 1, int(last_s(sample) / slice_s) + 1
        for index in range(max(0, from_index), min(num_slices - 1, to_index) + 1):
            within[index].append(sample)
    return Timeline(
        slice_s=slice_s,
        slices=tuple(_slice(measured, each, window) for each, window in zip(within, windows, strict=True)),
        first_tokens=tuple(_thinned(firsts)),
        failures=tuple(_thinned(failures)),
    )


def _slice(measured: Measured, samples: Sequence[Sample], window: Window) -> Slice:
    ended = [each for each in samples if window.holds(last_s(each))]
    ttfts_ms = [
        (each.frames_s[0] - each.sent_s) * 1e3
        for each in samples
        if each.frames_s and window.holds(each.frames_s[0])
    ]
    return Slice(
        from_s=window.from_s,
        num_sent=sum(window.holds(each.sent_s) for each in samples),
        num_ok=sum(each.error is None for each in ended),
        num_failed=sum(map(measured.is_failure, ended)),
        output_tokens=sum(tokens_in(each, window, measured.tokens_per_frame) for each in samples),
        running=concurrency(samples, window, measured.end_s)[0],
        ttft_p50_ms=percentile(ttfts_ms, 50) if ttfts_ms else None,
    )


def _slice_s(end_s: float) -> float:
    """The smallest round length with which the run has at most `MAX_SLICES`."""
    power = _MIN_SLICE_S
    while True:
        for step in _STEPS:
            if end_s / (step * power) < MAX_SLICES:
                return step * power
        power *= 10


def _thinned(points: Sequence[_Point]) -> list[_Point]:
    """At most `MAX_POINTS` of them, at even distances, the first and the last among them."""
    if len(points) <= MAX_POINTS:
        return list(points)
    step = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(index * step)] for index in range(MAX_POINTS)]
