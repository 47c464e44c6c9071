"""One version of the rules, compiled."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from filters.rules import CHANNELS, load_rules
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
    assert all(version.output_for(channel) is version.input for channel in CHANNELS)
    assert (version.number, version.num_rules, version.num_keywords) == (7, 2, 2)
    assert version.seen is not None
    assert version.seen.rules is version.input


def test_rules_of_each_direction_are_their_own() -> None:
    loaded = load_rules(rules("input", "output", "both"), "r.yaml")
    version = compile_rules(loaded, RuleOptions(max_hold_chars=9, hold_policy="release"), 1)
    output = version.output_for("content")
    assert version.input is not output
    assert version.input is not None
    assert [len(version.input), len(output)] == [2, 2]
    assert (output.policy.max_hold_chars, output.policy.on_max_hold) == (9, "release")
    assert version.fingerprint == loaded.fingerprint


def test_channels_with_equal_rules_share_what_is_compiled() -> None:
    loaded = load_rules(
        "- {id: all, match: badword, action: mask}\n"
        "- {id: said, match: other, action: block, channels: [content, tool_arguments]}\n"
        "- {id: mail, pii: email, action: redact, direction: output, channels: reasoning}\n",
        "r.yaml",
    )
    version = compile_rules(loaded, RuleOptions(), 1)
    assert version.output_for("content") is version.output_for("tool_arguments") is version.input
    assert version.output_for("tool_name") is version.output_for("refusal")
    assert [len(version.output_for(channel)) for channel in CHANNELS] == [2, 2, 1, 2, 1]
    assert len(set(map(id, version.output.values()))) == 3


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
