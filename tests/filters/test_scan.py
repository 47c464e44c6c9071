from __future__ import annotations

import random
from typing import Any

import pytest

from filters import pii, spans, tracks
from filters.hit import Hit
from filters.patterns import Patterns
from filters.rules import Rule, RuleSet
from filters.scan import MAX_HITS, PIECE_CHARS, SLICE_CHARS, ScanResult, _Scanner, scan, scan_in_slices
from filters.spans import Span
from filters.stream import CompiledRules
from filters.tracks import Found
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


FLOODS = [
    ("ab" * 10_000, Rule("r", ("ab", "abab", "b"), "mask", replacement="*")),
    ("傻@" * 5_000 + "傻帽", Rule("r", ("傻帽",), "mask", replacement="*", skip_symbols=True)),
    ("a" * 9_000 + "ss", Rule("r", ("as",), "mask", replacement="*", repeats=True)),
    ("13812345678," * 900, Rule("r", (), "mask", replacement="*", pii="phone_cn")),
    ("a@b.com," * 900, Rule("r", (), "redact", replacement="[EMAIL]", pii="email")),
    ("敏\u200b" * 4_000 + "感", Rule("r", ("敏感",), "block")),
    ("敏" + "\u200b" * 9_000 + "感…", Rule("r", ("敏感",), "flag")),
]


@pytest.mark.parametrize(("text", "rule"), FLOODS, ids=lambda value: str(value)[:5])
def test_scan_of_a_flood_is_the_same_in_slices_and_pauses_within_them(text: str, rule: Rule) -> None:
    rules = patterns(rule)
    num_pauses, result = scan_sliced(text, rules, len(text))
    assert num_pauses > 2  # a quiet text of one slice has one
    assert result == scan(text, rules)
    assert result.num_hits > 0
    for size in (100, 999, 5_000):
        assert scan_sliced(text, rules, size)[1] == result


MASK = Rule("a", ("敏敏", "@!"), "mask", replacement="*")
REDACT = Rule("a", ("敏敏", "@!"), "redact", replacement="[A]")
# A track waits for long, and matches of another one might wait for it.
WAITING = [
    ("敏" * 16_000, [MASK, Rule("b", ("傻帽",), "mask", replacement="*", repeats=True)]),
    ("敏" * 16_000, [MASK, Rule("b", ("敏敏x",), "allow", repeats=True)]),
    ("敏" * 16_000, [REDACT, Rule("b", ("傻帽",), "flag", repeats=True)]),
    ("敏敏人" * 6_000, [MASK, Rule("b", ("傻帽",), "flag", allow=("敏" * 90,))]),
    ("傻" + "@!" * 8_000 + "帽", [MASK, Rule("b", ("傻帽",), "mask", replacement="*", skip_symbols=True)]),
    ("傻" + "@!" * 8_000 + "帽", [REDACT, Rule("b", ("傻帽",), "allow", skip_symbols=True)]),
    ("12" + "@!" * 8_000, [MASK, Rule("b", ("12",), "flag", skip_symbols=True, whole_word=True)]),
    ("1\u200b" + "@!" * 8_000 + "\u200b" * 9_000, [MASK, Rule("b", (), "mask", replacement="*", pii="card")]),
]


class Work:
    """Counts what a scan does: comparisons of matches, and spans put in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        work = self

        class CountedFound(Found):
            def __lt__(self, other: tuple[Any, ...]) -> bool:
                work.num += 1
                return super().__lt__(other)

            @property
            def raw_start(self) -> int:
                work.num += 1
                return self[3]

        def counted_order(span: Span) -> object:
            work.num += 1
            return order(span)

        order = spans._order
        monkeypatch.setattr(tracks, "Found", CountedFound)
        monkeypatch.setattr(spans, "_order", counted_order)


@pytest.mark.parametrize(("text", "rules"), WAITING)
def test_scan_of_a_flood_while_one_track_waits_is_linear_and_in_small_steps(
    text: str, rules: list[Rule], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(monkeypatch)
    in_steps: list[int] = []
    for _ in scan_in_slices(text, patterns(*rules)):
        in_steps.append(work.num - sum(in_steps))
    assert 0 < work.num < 8 * len(text)
    assert max(in_steps) < 4_000


def test_scan_of_a_flood_of_phrases_forgets_them() -> None:
    rules = patterns(MASK, Rule("b", ("好的",), "allow"), Rule("c", ("傻帽",), "flag", repeats=True))
    scanner = _Scanner("好的" * 20_000, rules, PIECE_CHARS)
    most = 0
    while scanner.step():
        most = max(most, *(len(track.phrases) for track in scanner._keywords))
    assert 0 < most < 1_000


def test_scan_in_tiny_steps_equals_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracks stop after every few matches, so that they are apart from each other all the time."""
    monkeypatch.setattr(pii, "MAX_TRIES", 1)
    for max_found in (1, 2, 5):
        monkeypatch.setattr(tracks, "MAX_FOUND", max_found)
        check_everything(seed=10 + max_found, num_cases=200)
        check_random(seed=20 + max_found, num_cases=100)


def test_scan_rewrites_equal_spans_as_the_first_folding_says() -> None:
    rules = patterns(
        Rule("b", ("傻帽",), "redact", replacement="[B]", skip_symbols=True, allow=("傻帽子",)),
        Rule("a", ("傻帽",), "redact", replacement="[A]"),
        Rule("c", ("傻帽",), "redact", replacement="[C]", repeats=True),
    )
    text = "傻帽，" * 50
    for size in (1, 2, 7, 1_000):
        assert scan_sliced(text, rules, size)[1].text == "[A]，" * 50


def test_scan_of_a_long_clean_text_pauses_once_a_slice() -> None:
    rules = patterns(Rule("r", ("敏感",), "mask", replacement="*"), Rule("p", (), "flag", pii="card"))
    assert scan_sliced("清白的话，" * 10_000, rules, SLICE_CHARS)[0] == 4


def test_scan_for_personal_data_tells_classes_apart() -> None:
    rules = [
        Rule(kind, (), "redact", replacement=f"[{kind}]", pii=kind) for kind in ("phone_cn", "card", "ip")
    ]
    assert scan("tel 138 1234 5678 .", patterns(*rules)).text == "tel [phone_cn] ."
    result = scan("卡４１１１１１１１１１１１１１１１，ip 10.0.0.1", patterns(*rules))
    assert result.text == "卡[card]，ip [ip]"
    assert result.hits == (Hit("card", "redact", 1, 17), Hit("ip", "redact", 21, 29))


def test_scan_with_allow_phrases_and_shadow_of_personal_data() -> None:
    mail = Rule("mail", (), "block", pii="email", allow=("help@example.com",))
    seen = Rule("seen", (), "mask", pii="email", shadow=True)
    assert scan("ask Help@Example.com", patterns(mail, seen)).hits == (
        Hit("seen", "mask", 4, 20, shadow=True),
    )
    assert scan("ask bob@example.com", patterns(mail)).blocked_by == "mail"
    fine = Rule("fine", ("bob@example.com",), "allow", repeats=True)
    assert not scan("ask bob@example.com", patterns(mail, fine)).blocked


def test_scan_rewrites_overlapping_hits_of_all_kinds_once() -> None:
    rules = patterns(
        Rule("p", (), "mask", replacement="*", pii="phone_cn"),
        Rule("m", (), "redact", replacement="[EMAIL]", pii="email"),
        Rule("k", ("com 傻",), "redact", replacement="[K]"),
        Rule("s", ("傻帽",), "mask", replacement="#", skip_symbols=True),
    )
    assert scan("to 13812345678@163.com 傻@帽!", rules).text == "to [EMAIL]!"


def test_scan_of_repeats_needs_as_many_as_written() -> None:
    rules = patterns(Rule("r", ("ass",), "mask", whole_word=True, replacement="*", repeats=True))
    assert scan("as a aaasss class ass", rules).text == "as a ****** class ***"


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
    check_random(seed=1, num_cases=300)


@pytest.mark.long
@pytest.mark.timeout(1800)
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
    check_everything(seed=1, num_cases=350)


def test_scan_for_everything_in_longer_texts_equals_brute_force() -> None:
    check_everything(seed=2, num_cases=15, num_pieces=300)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_scan_for_everything_in_many_texts_equals_brute_force() -> None:
    check_everything(seed=3, num_cases=30_000)
    check_everything(seed=4, num_cases=300, num_pieces=500)
