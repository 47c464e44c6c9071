"""The JSON document: its shape, and that it can be read again."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from gateway.bench.document import BENCH, CURVE_PERCENTS, VERSION, document_of, from_json, to_json
from gateway.bench.page import page
from gateway.bench.table import table
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


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_finds_the_same_samples_in_the_window(seed: int) -> None:
    rng = random.Random(seed)
    samples = [sample(number, sent_s=number + rng.random()) for number in range(20)]
    edges_s = samples[3].sent_s, math.nextafter(samples[17].sent_s, math.inf)
    told = run(steady_from_s=edges_s[0], steady_until_s=edges_s[1])
    plain = json.loads(to_json(document_of(samples, told, keeps_samples=True)))
    from_s, until_s = plain["run"]["steady_from_s"], plain["run"]["steady_until_s"]
    inside = [each["number"] for each in plain["samples"] if from_s <= each["sent_s"] < until_s]
    assert inside == list(range(3, 18))
    assert plain["figures"]["num_requests"] == len(inside)


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
        (b"[" * 100_000, "old.json is not the JSON"),
        (b'{"bench": "\\ud83d", "version": 1}', "old.json is not the JSON"),
        (b'{"bench": "headrace bench", "version": 2, "all": "else"}', "version 2, not 'headrace bench' 1"),
        (
            to_json(document()).replace(b'"version": 1', b'"version": 99'),
            "version 99, not 'headrace bench' 1",
        ),
    ],
)
def test_what_is_no_document_is_refused(data: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        from_json(data, "old.json")


def test_a_name_that_is_no_text_is_written_all_the_same() -> None:
    told = run(
        prompt_lengths="of \udcff.jsonl", options={"\ud83d": "\ud83d"}
    )  # a file's name may be any bytes
    document = document_of([sample()], told)
    assert from_json(to_json(document)).run.prompt_lengths == "of ?.jsonl"
    table(document).encode()
    page([("\udcff", document)]).encode()


def edited(path: str, value: Any) -> bytes:
    """A document in which one field is another: "figures.window_s"."""
    plain = json.loads(to_json(document()))
    *above, last = path.split(".")
    place = plain
    for name in above:
        place = place[name]
    place[last] = value
    return json.dumps(plain).encode()


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("curves_ms.ttft", [], r"Expected 104 points, .* - at `\$.curves_ms\['ttft'\]`"),
        ("curves_ms.tbt", [[50, 1.0]], r"Expected 104 points, .* - at `\$.curves_ms\['tbt'\]`"),
        ("curves_ms.e2e", [[each, -each] for each in CURVE_PERCENTS], r">= 0.0 - at `\$.curves_ms"),
        ("curves_ms.e2e", [[each, 1e308] for each in CURVE_PERCENTS], r"<= 1e\+18 - at `\$.curves_ms"),
        (
            "curves_ms.e2e",
            [[each, 100 - each] for each in CURVE_PERCENTS],
            r"ascend - at `\$.curves_ms\['e2e'\]`",
        ),
        ("timeline.slices", [], r"length >= 1 - at `\$.timeline.slices`"),
        ("figures.num_failed", 10**400, r"- at `\$.figures.num_failed`"),
        ("figures.concurrency_mean", float("nan"), "malformed"),
        ("figures.throughput.requests_per_s", -1, r">= 0.0 - at `\$.figures.throughput.requests_per_s`"),
        ("figures.stalls", 5, r"- at `\$.figures.stalls`"),
        ("figures.goodput.share", 7.5, r"<= 1.0 - at `\$.figures.goodput.share`"),
    ],
)
def test_an_edited_document_is_refused_with_its_name_and_field(path: str, value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=rf"^old\.json is not .*{told}"):
        from_json(edited(path, value), "old.json")


def somewhere(rng: random.Random, plain: Any) -> tuple[Any, Any]:
    """(holder, key) of a field, however deep."""
    key = rng.choice(list(plain) if isinstance(plain, dict) else range(len(plain)))
    inner = plain[key]
    if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:
        return plain, key
    return somewhere(rng, inner)


@pytest.mark.parametrize("seed", range(4))
def test_any_edited_document_is_refused_or_makes_a_page(seed: int) -> None:
    rng = random.Random(seed)
    own = document(seed, num=20)
    odd: tuple[Any, ...] = (None, -1, 0, 1e308, 10**400, "<b>", [], {}, [[]], True, {"": -5})
    num_read = 0
    for _ in range(60):
        plain = json.loads(to_json(own))
        holder, key = somewhere(rng, plain)
        holder[key] = rng.choice(odd)
        try:
            read = from_json(json.dumps(plain).encode(), "old.json")
        except ValueError:
            continue
        num_read += 1
        page([("this run", own), ("old", read)])
    assert num_read


@pytest.mark.parametrize("seed", range(20))
def test_each_document_that_is_written_can_be_read(seed: int) -> None:
    from_json(to_json(document(seed, num=seed)))
