from __future__ import annotations

from filters.keyword_stream import FoldedStream, RunStream
from filters.patterns import Patterns
from filters.rules import Rule, RuleSet
from filters.settling import Settling


def stream_of(*rules: Rule) -> FoldedStream:
    """A stream of the last folding that the rules ask for."""
    patterns = Patterns(RuleSet(rules)).by_folding[-1]
    return (RunStream if patterns.folding.repeats else FoldedStream)(patterns, 3, Settling([0] * 4))


def found(stream: FoldedStream) -> list[tuple[int, int, str]]:
    """What was found since the last time, by raw offsets."""
    matches = [(match.raw_start, match.raw_end, match.rule.id) for match in stream._settling.open]
    stream._settling.open.clear()
    return matches


def mask(*keywords: str, **options: object) -> Rule:
    return Rule("m", keywords, "mask", replacement="*", **options)  # type: ignore[arg-type]


def test_read_finds_matches_on_raw_offsets_and_says_what_is_live() -> None:
    stream = stream_of(mask("abc", "bc"))
    assert stream.read("xab", [0, 3, 4], 5) == 3
    assert (found(stream), stream.found_to, stream.num_folded) == ([], 5, 3)
    assert stream.read("c", [7], 9) == 9
    assert found(stream) == [(3, 8, "m"), (4, 8, "m")]


def test_read_of_nothing_folded_moves_the_raw_end_only() -> None:
    stream = stream_of(mask("abc"))
    assert stream.read("ab", [0, 1], 2) == 0
    assert (stream.read("", [], 9), stream.num_raw, stream.num_folded) == (0, 9, 2)


def test_read_finds_a_word_with_the_character_after_it() -> None:
    stream = stream_of(mask("ass", whole_word=True))
    assert stream.read("ass", range(3), 3) == 0
    assert (found(stream), stream.found_to, stream.blocks_from) == ([], 2, 3)
    assert stream.read(".", [3], 4) == 4
    assert found(stream) == [(0, 3, "m")]
    stream.read("classassess", range(4, 15), 15)
    assert found(stream) == []


def test_finish_finds_words_once_and_the_text_may_go_on() -> None:
    stream = stream_of(mask("ass", whole_word=True))
    stream.read("ass", range(3), 3)
    stream.finish()
    assert (found(stream), stream.found_to) == ([(0, 3, "m")], 3)
    stream.read(" ass ", range(3, 8), 8)
    assert found(stream) == [(4, 7, "m")]


def test_read_remembers_a_bounded_number_of_offsets() -> None:
    stream = stream_of(mask("abc", repeats=True), Rule("p", ("x",), "mask", digits=True))
    runs = RunStream(Patterns(RuleSet((mask("abca", repeats=True),))).by_folding[-1], 0, Settling([0]))
    for at in range(0, 30_000, 3):
        for each in (stream, runs):
            each.read("abc", range(at, at + 3), at + 3)
    assert len(stream._origins) < 2_000
    assert len(runs._origins) == len(runs._ends) == len(runs._counts) < 2_000
    assert len(found(runs)) == 9_999
    assert found(runs) == []


def test_read_of_runs_waits_for_the_end_of_the_last() -> None:
    stream = stream_of(mask("ass", repeats=True))
    assert stream.read("aaas", range(4), 4) == 0
    assert stream.read("s", [5], 6) == 0
    assert (found(stream), stream.found_to) == ([], 5)
    assert stream.read("sx", [6, 7], 8) == 8
    assert found(stream) == [(0, 7, "m")]


def test_read_of_runs_holds_nothing_that_was_too_short() -> None:
    stream = stream_of(mask("aasx", "sxyy", repeats=True))
    assert stream.read("a", [0], 1) == 0
    assert stream.read("s", [1], 2) == 1  # only `sxyy` may begin here
    assert stream.read("x", [2], 3) == 1
    assert (stream.read(".", [3], 4), found(stream)) == (4, [])
    assert stream.read("aas", range(4, 7), 7) == 4


def test_read_of_one_run_is_one_character() -> None:
    stream = stream_of(mask("as", repeats=True))
    for at in range(0, 10_000, 100):
        assert stream.read("a" * 100, range(at, at + 100), at + 100) == 0
    assert (stream.num_folded, len(stream._origins)) == (1, 1)


def test_phrase_start_is_that_of_the_earliest_phrase_under_way() -> None:
    rule = mask("bc", allow=("abcd",))
    stream = stream_of(rule, Rule("fine", ("bcx",), "allow"))
    stream.read(".abc", [0, 2, 4, 6], 7)
    assert stream.phrase_start(rule) == (1, 2)
    assert stream.phrase_start(Rule("other", ("bc",), "mask")) == (2, 4)
    stream.read("!", [7], 8)
    assert stream.phrase_start(rule) is None


def test_live_from_closed_counts_rules_that_fail_closed() -> None:
    stream = stream_of(mask("abcd", fail="open"), Rule("c", ("cx",), "block"))
    assert (stream.read("abc", range(3), 3), stream.live_from_closed) == (0, 2)
    runs = stream_of(mask("aabcd", repeats=True, fail="open"), Rule("c", ("ccx",), "block", repeats=True))
    assert (runs.read("aabc", range(4), 4), runs.live_from_closed) == (0, 3)
