"""Runs side by side: what they were, what differs, and ratios."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.bench.compare import compared, distinct, settings, unlike
from gateway.bench.document import Document, document_of
from gateway.bench.figures import FigureOptions
from gateway.bench.sample import Sample
from tests.gateway.bench.runs import run, sample


def made(
    samples: list[Sample] | None = None, limits_ms: dict[str, float] | None = None, **fields: Any
) -> Document:
    return document_of(
        [sample()] if samples is None else samples, run(**fields), FigureOptions(limits_ms=limits_ms or {})
    )


def cells(first: Document, other: Document) -> dict[str, list[str]]:
    rows = compared([("first", first), ("other", other)])
    return {row.name: [value for _, value in row.cells] for row in rows}


def test_ratios_are_to_the_first() -> None:
    slow = made([sample(frames_s=[2.0, 2.1, 2.3], ended_s=3.0)])
    found = cells(made(), slow)
    assert found["TTFT p50, ms"] == ["1,000", "2,000 (×2.00)"]
    assert found["Requests/s"] == ["0.667", "0.333 (×0.500)"]


def test_there_is_no_ratio_to_0() -> None:
    failed = made([sample(), sample(1, error="lost")])
    assert cells(made(), failed)["Failed, share"] == ["0.0 %", "50.0 %"]
    assert cells(failed, made())["Failed, share"] == ["50.0 %", "0.0 % (×0.00)"]
    none = made([sample(error="lost")])
    assert cells(none, made())["Requests/s"] == ["0.00", "0.667"]
    assert cells(none, made())["TTFT p50, ms"] == ["–", "1,000"]
    assert cells(made(), none)["TTFT p50, ms"] == ["1,000", "–"]


def test_a_huge_ratio_stays_short() -> None:
    quick = made([sample(frames_s=[1e-9], ended_s=1.0)])
    slow = made([sample(frames_s=[1e6], ended_s=1e6)])
    assert cells(quick, slow)["TTFT p50, ms"][1] == "1,000,000,000 (×1e+15)"


def test_settings_of_each_run_are_told() -> None:
    other = made(
        url="http://b",
        model="other",
        mode="open",
        rate=3.0,
        arrivals="poisson",
        concurrency=None,
        versions={"server": "vllm 1"},
    )
    rows = {row.name: dict(row.cells) for row in settings([("first", made()), ("other", other)])}
    assert rows["Server"] == {"first": "http://127.0.0.1:8000", "other": "http://b, vllm 1"}
    assert rows["Model"] == {"first": "scripted", "other": "other"}
    assert rows["Load"] == {"first": "closed loop, 2 at once", "other": "open loop, 3.00 requests/s, poisson"}
    assert rows["Measured"]["first"] == "1 request in 1.50 s"
    assert "Options" not in rows  # none has any


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model": "other"}, "in model."),
        ({"endpoint": "/v1/completions"}, "in endpoint."),
        ({"concurrency": 3}, "in load."),
        ({"mode": "open", "rate": 2.0, "arrivals": "constant"}, "in load."),
        ({"prompt_lengths": "11", "output_lengths": "uniform:1:5"}, "in prompts, answers."),
        ({"options": {"ramp": "5 s"}}, "in options."),
        ({"machine": "a laptop"}, "in client."),
    ],
)
def test_unlike_loads_are_named(fields: dict[str, Any], told: str) -> None:
    (note,) = unlike([("first", made()), ("other", made(**fields))])
    assert note.startswith("Unlike loads: “other” differs from “first” ")
    assert told in note


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "http://elsewhere"},
        {"endpoint": "/prefix/v1/chat/completions"},
        {"seed": 1},
        {"versions": {"server": "another"}},
        {"options": {"tokens per word": "1.3 (measured)"}},
    ],
)
def test_servers_are_what_one_compares(fields: dict[str, Any]) -> None:
    assert unlike([("first", made()), ("other", made(**fields))]) == []


def test_answers_of_other_lengths_than_asked_for_are_named() -> None:
    (note,) = unlike([("first", made()), ("other", made([sample(output_tokens=7)]))])
    assert "in output tokens a request (7.00, not 3.00)." in note
    assert unlike([("first", made([])), ("other", made())]) == []


def test_other_limits_of_goodput_are_named() -> None:
    runs = [made(limits_ms={"ttft": limit}) for limit in (100, 200)]
    (note,) = unlike([("first", runs[0]), ("other", runs[1])])
    assert "in the limits of goodput." in note


def test_each_run_has_a_name_of_its_own() -> None:
    one = made()
    runs = distinct([("run", one), ("run", one), ("run (2)", one), ("run", one)])
    assert [name for name, _ in runs] == ["run", "run (2)", "run (2) (2)", "run (3)"]
    long = [name for name, _ in distinct([("x" * 300, one), ("x" * 301, one)])]
    assert long == ["x" * 39 + "…", "x" * 39 + "… (2)"]
