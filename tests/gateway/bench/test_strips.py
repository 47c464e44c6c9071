"""The run over time, as charts."""

from __future__ import annotations

import re

from gateway.bench.document import Document, document_of
from gateway.bench.strips import has_unmeasured, strips
from tests.gateway.bench.runs import document, run, sample


def ticks(chart: str) -> list[str]:
    """Of the y axis."""
    return re.findall(r'class="tick" text-anchor="end">([^<]*)<', chart)


def failed(number: int) -> Document:
    return document_of([sample(each, error="lost", frames_s=[]) for each in range(number)], run())


def test_a_run_has_four_charts() -> None:
    assert [each.title for each in strips(document())] == [
        "TTFT of each request, ms",
        "Requests that ended, per second",
        "Output tokens per second",
        "Requests under way",
    ]


def test_a_run_without_requests_has_none() -> None:
    assert strips(document_of([], run())) == []


def test_a_run_that_failed_has_no_axis_of_times() -> None:
    first_tokens, _, tokens, _ = strips(failed(1))
    assert ticks(first_tokens.chart) == ["s"]  # the unit of the x axis
    assert "no first token came" in first_tokens.chart
    assert "× 1 failed" in first_tokens.chart
    assert "0 first tokens; 1 failure" in first_tokens.chart
    assert sorted(ticks(tokens.chart)) == ["0", "s"]


def test_failures_are_counted_though_not_all_are_drawn() -> None:
    assert "× 2,000 failed" in strips(failed(2000))[0].chart


def test_what_is_not_measured_is_grey_where_it_can_be_seen() -> None:
    samples = [sample(0), sample(1, sent_s=9.0)]
    for told, names in (
        (run(), []),
        (run(steady_from_s=1e-4), []),
        (run(steady_from_s=2.0, steady_until_s=8.0), ["warm-up", "drain"]),
    ):
        shown = document_of(samples, told)
        assert has_unmeasured(shown) == bool(names)
        for each in strips(shown):
            assert re.findall(r"<title>([\w-]+): not measured", each.chart) == names
