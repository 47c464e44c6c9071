"""One version of the rules, compiled."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from filters.rules import load_rules
from gateway.rules_version import RuleOptions, compile_rules, unnoticed


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def rules(*directions: str) -> str:
    return "".join(
        f"- {{id: r{i}, match: badword{i}, action: mask, direction: {direction}}}\n"
        for i, direction in enumerate(directions)
    )


def test_rules_for_both_directions_are_compiled_once() -> None:
    version = compile_rules(load_rules(rules("both", "both"), "r.yaml"), RuleOptions(), 7)
    assert version.input is version.output
    assert (version.number, version.num_rules, version.num_keywords) == (7, 2, 2)
    assert version.seen is not None
    assert version.seen.rules is version.input


def test_rules_of_each_direction_are_their_own() -> None:
    loaded = load_rules(rules("input", "output", "both"), "r.yaml")
    version = compile_rules(loaded, RuleOptions(max_hold_chars=9, hold_policy="release"), 1)
    assert version.input is not version.output
    assert version.input is not None
    assert [len(version.input), len(version.output)] == [2, 2]
    assert (version.output.max_hold_chars, version.output.on_max_hold) == (9, "release")
    assert version.fingerprint == loaded.fingerprint


def test_work_that_goes_unnoticed_leaves_the_interpreter_as_it_was() -> None:
    interval_s = sys.getswitchinterval()
    num_frozen = gc.get_freeze_count()

    def fail() -> None:
        with unnoticed():
            assert not gc.isenabled()
            assert sys.getswitchinterval() < interval_s
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()
    assert sys.getswitchinterval() == interval_s
    assert gc.get_freeze_count() > num_frozen
    gc.disable()
    try:
        with unnoticed():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
