from __future__ import annotations

import random

import pytest

from filters.hit import Hit
from filters.patterns import Patterns
from filters.rules import Rule, RuleSet
from filters.scan import MAX_HITS, ScanResult, scan, scan_in_slices
from filters.stream import CompiledRules
from tests.filters import oracle, whole_text_oracle


def patterns(*rules: Rule) -> Patterns:
    return Patterns(RuleSet(rules))


def scan_sliced(text: str, rules: Patterns, slice_chars: int) -> tuple[int, ScanResult]:
    """The result, and after how many pauses it came."""
    steps = scan_in_slices(text, rules, slice_chars)
    num_pauses = 0
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return num_pauses, done.value
        num_pauses += 1


def test_scan_finds_hits_on_raw_offsets_and_rewrites() -> None:
    rules = patterns(
        Rule("m", ("敏感",), "mask", replacement="*"),
        Rule("r", ("foo",), "redact", replacement="[X]"),
        Rule("f", ("kg",), "flag"),
        Rule("s", ("bar",), "block", shadow=True),
    )
    result = scan("敏\u200b感, 5㎏ ＦＯＯ bar", rules)
    assert result == ScanResult(
        hits=(
            Hit("m", "mask", 0, 3),
            Hit("f", "flag", 6, 7),
            Hit("r", "redact", 8, 11),
            Hit("s", "block", 12, 15, shadow=True),
        ),
        num_hits=4,
        blocked_by=None,
        text="***, 5㎏ [X] bar",
    )
    assert not result.blocked


def test_scan_of_a_blocked_text_names_the_first_rule() -> None:
    rules = patterns(Rule("a", ("foo",), "block"), Rule("b", ("bar",), "block"), Rule("f", ("baz",), "flag"))
    result = scan("baz bar foo baz", rules)
    assert (result.blocked, result.blocked_by, result.text) == (True, "b", None)
    assert [hit.rule_id for hit in result.hits] == ["f", "b"]


def test_scan_without_rules_or_text_changes_nothing() -> None:
    assert scan("foo", patterns()) == ScanResult((), 0, None, "foo")
    assert scan("", patterns(Rule("a", ("foo",), "block"))) == ScanResult((), 0, None, "")


def test_scan_takes_compiled_rules_too() -> None:
    assert scan("a foo", CompiledRules(RuleSet((Rule("a", ("foo",), "block"),)))).blocked_by == "a"


def test_scan_in_slices_pauses_and_ends_with_a_block() -> None:
    rules = patterns(Rule("a", ("foo",), "block"))
    assert scan_sliced("x" * 100, rules, 10)[0] == 10
    num_pauses, result = scan_sliced("x" * 18 + "foo" + "x" * 1_000, rules, 10)
    assert (num_pauses, result.blocked_by) == (2, "a")
    with pytest.raises(ValueError, match="slice_chars is 0"):
        scan_sliced("x", rules, 0)


def test_scan_of_a_flood_of_hits_keeps_a_bounded_list() -> None:
    result = scan("ab" * 3_000, patterns(Rule("m", ("ab",), "mask", replacement="*")))
    assert (len(result.hits), result.num_hits, result.text) == (MAX_HITS, 3_000, "*" * 6_000)


def check_random(seed: int, num_cases: int) -> None:
    """Every slice size gives the same; without a block it is what brute force gives."""
    rng = random.Random(seed)
    for _ in range(num_cases):
        rules, text = oracle.random_case(rng, ("allow", "flag", "mask", "redact", "redact", "block"))
        shared = CompiledRules(rules)
        result = scan(text, shared)
        for size in (1, 2, 3, 5):
            assert scan_sliced(text, shared, size)[1] == result, (rules.rules, text, size)
        expected = oracle.expect(text, rules.rules)
        assert result.blocked == expected.blocked, (rules.rules, text)
        if not result.blocked:
            assert set(result.hits) == expected.hits, (rules.rules, text)
            assert result.text == expected.output, (rules.rules, text)


def test_scan_of_random_rules_equals_brute_force() -> None:
    check_random(seed=1, num_cases=600)


@pytest.mark.long
def test_scan_of_many_random_rules_equals_brute_force() -> None:
    check_random(seed=2, num_cases=30_000)


def test_scan_of_a_long_text_equals_the_stream() -> None:
    rng = random.Random(5)
    words = ["foo", "敏感", "敏感词", "bar baz", "㎏x", "ss"]
    rules = CompiledRules(
        RuleSet(
            (
                Rule("w", ("foo", "ss"), "mask", whole_word=True, replacement="*"),
                Rule("r", ("敏感", "敏感词", "bar baz"), "redact", allow=("不敏感",), replacement="[X]"),
                Rule("k", ("gx",), "mask", replacement="#"),
            )
        )
    )
    pieces = [*words, "ß", "\u200b", " ", ".", "x", "不", "ＦＯＯ", "长", "😀\ufe0f"]
    text = "".join(rng.choices(pieces, k=20_000))
    stream = rules.stream()
    assert stream is not None
    streamed = stream.feed(text) + stream.flush()
    num_pauses, result = scan_sliced(text, rules, 1_000)
    assert result.text == streamed
    assert result.num_hits == len(stream.hits) > 1_000
    assert num_pauses > 20


def check_everything(seed: int, num_cases: int, num_pieces: int = 12) -> None:
    """With personal data, foldings and phrases brute force agrees, and so does every slice size."""
    rng = random.Random(seed)
    for _ in range(num_cases):
        rules, text = whole_text_oracle.random_case(rng, num_pieces)
        shared = patterns(*rules)
        result = scan(text, shared)
        hits, rewritten, is_blocked = whole_text_oracle.expected(text, rules)
        assert result.blocked == is_blocked, (rules, text)
        assert result.text == rewritten, (rules, text)
        if is_blocked:
            assert set(result.hits) <= hits, (rules, text)
            assert {hit for hit in hits if hit.end < result.hits[-1].end} <= set(result.hits), (rules, text)
        else:
            assert set(result.hits) == hits, (rules, text)
        for size in (1, 2, 3, 5, rng.randint(6, 90)):
            assert scan_sliced(text, shared, size)[1] == result, (rules, text, size)


def test_scan_for_everything_equals_brute_force() -> None:
    check_everything(seed=1, num_cases=700)


def test_scan_for_everything_in_longer_texts_equals_brute_force() -> None:
    check_everything(seed=2, num_cases=15, num_pieces=300)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_scan_for_everything_in_many_texts_equals_brute_force() -> None:
    check_everything(seed=3, num_cases=30_000)
    check_everything(seed=4, num_cases=300, num_pieces=500)
