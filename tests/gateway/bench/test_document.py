"""The JSON document: its shape, and that it can be read again."""

from __future__ import annotations

import json

import pytest

from gateway.bench.document import BENCH, VERSION, document_of, from_json, to_json
from tests.gateway.bench.runs import document, run, sample


def test_document_is_read_as_it_was_written() -> None:
    written = to_json(document())
    assert to_json(from_json(written)) == written


def test_document_has_the_shape_that_scripts_rely_on() -> None:
    plain = json.loads(to_json(document_of([sample(), sample(1, error="truncated", detail="cut")], run())))
    assert (plain["bench"], plain["version"]) == (BENCH, VERSION)
    assert plain["run"]["model"] == "scripted"
    assert plain["figures"]["latencies_ms"]["ttft"]["p99"] == 1000
    assert plain["figures"]["throughput"]["requests_per_s"] == pytest.approx(1 / 1.5)
    assert plain["failures"] == {"truncated": {"count": 1, "example": "cut"}}
    assert plain["timeline"]["slices"]
    assert dict(map(tuple, plain["curves_ms"]["tpot"]))[50] == 150
    assert "samples" not in plain


def test_samples_are_kept_where_they_are_asked_for() -> None:
    plain = json.loads(to_json(document_of([sample(7)], run(), keeps_samples=True)))
    assert [each["number"] for each in plain["samples"]] == [7]


def test_most_frequent_failure_comes_first_with_its_first_example() -> None:
    kinds = ("http_429", "truncated", "truncated")
    samples = [sample(number, error=kind, detail=str(number)) for number, kind in enumerate(kinds)]
    failures = document_of(samples, run()).failures
    assert [(kind, each.count, each.example) for kind, each in failures.items()] == [
        ("truncated", 2, "1"),
        ("http_429", 1, "0"),
    ]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"not json", "old.json is not the JSON of a load test"),
        (b'{"bench": "another"}', "old.json is not the JSON"),
        (
            to_json(document()).replace(b'"version": 1', b'"version": 99'),
            "version 99, not 'headrace bench' 1",
        ),
    ],
)
def test_what_is_no_document_is_refused(data: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        from_json(data, "old.json")
