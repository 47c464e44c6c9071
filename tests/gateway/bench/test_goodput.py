"""Goodput's limits: as they are written, and who meets them."""

from __future__ import annotations

import pytest

from gateway.bench.goodput import met, parse_limits


def test_limits_take_their_names_and_those_of_vllm() -> None:
    assert parse_limits(["ttft:200", "itl:50.5", "e2el:0"]) == {"ttft": 200, "tbt": 50.5, "e2e": 0}
    assert parse_limits([]) == {}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tfft:200"], "'tfft' is not one of ttft, tpot, tbt, e2e"),
        (["ttft"], "'' is not a number"),
        (["ttft:fast"], "'fast' is not a number"),
        (["ttft:-1"], "at least 0 ms"),
        (["ttft:nan"], "finite"),
        (["ttft:inf"], "finite"),
        (["tbt:1", "itl:2"], "tbt is given twice"),
    ],
)
def test_limits_that_make_no_sense_are_named(words: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_limits(words)


def test_a_limit_is_met_at_the_limit() -> None:
    assert met({"ttft": 200, "e2e": 900}, {"ttft": 200.0, "e2e": 900.1}) == {"ttft"}


def test_what_a_request_lacks_cannot_miss() -> None:
    assert met({"tpot": 1, "tbt": 1}, {"ttft": 5.0}) == {"tpot", "tbt"}
