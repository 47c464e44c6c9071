from __future__ import annotations

import random

from filters.patterns import Pattern
from filters.rules import Rule
from filters.settling import Found, Phrase, Settling, Verdicts

MASK = Rule("m", ("x",), "mask", replacement="*")
FLAG = Rule("f", ("x",), "flag")
BLOCK = Rule("b", ("x",), "block")
OPEN_BLOCK = Rule("o", ("x",), "block", fail="open")


def found(start: int, end: int, rule: Rule, track: int = 0) -> Found:
    return Found(end, track, end, start, start, end, rule)


class Track:
    """Says what it is told."""

    def __init__(self, found_to: int, number: int = 0) -> None:
        self.found_to = self.blocks_from = self.live_from = self.live_from_closed = found_to
        self.number = number
        self.phrases: dict[str, tuple[int, int]] = {}  # folded and raw starts by rule

    def phrase_start(self, rule: Rule) -> tuple[int, int] | None:
        return self.phrases.get(rule.id)

    def finish(self) -> None:
        raise AssertionError


def settling_of(*matches: Found) -> Settling:
    settling = Settling([0, 1])
    settling.open += matches
    return settling


def test_take_gives_matches_in_order_of_their_end() -> None:
    matches = [found(0, 4, MASK, 1), found(2, 4, FLAG), found(1, 3, FLAG), found(5, 6, FLAG)]
    random.Random(0).shuffle(matches)
    verdicts = Verdicts()
    verdicts.waiting += matches
    assert [match[:2] for match in verdicts.take(5)] == [(3, 0), (4, 0), (4, 1)]
    assert (verdicts.take(5), verdicts.block) == ([], None)
    assert [match[:2] for match in verdicts.take(6)] == [(6, 0)]


def test_take_ends_with_all_that_ends_where_the_first_block_does() -> None:
    verdicts = Verdicts()
    first = found(2, 4, BLOCK)
    verdicts.waiting += [first, found(1, 4, BLOCK, 1), found(0, 4, FLAG, 2), found(0, 5, MASK)]
    assert [match.raw_end for match in verdicts.take(9)] == [4, 4, 4]
    assert (verdicts.block, verdicts.cut) == (first, 1)
    assert verdicts.take(9) == []


def test_settle_drops_what_a_phrase_contains_by_folded_offsets_of_the_same_folding() -> None:
    pattern = Pattern("p", None, is_phrase=True, whole=False)
    phrase = Phrase(0, 3, pattern, raw_start=5, raw_end=9, track=1)
    inside_folded = Found(8, 1, 0, 6, 1, 2, MASK)
    for match, is_excused in (
        (inside_folded, True),
        (inside_folded._replace(end=4), False),
        (inside_folded._replace(track=0, end=4), True),  # another folding: raw offsets count
        (inside_folded._replace(track=0, raw_start=4), False),
    ):
        settling = settling_of(match)
        settling.phrases.append(phrase)
        assert settling.settle([Track(20)]) == ([] if is_excused else [match])
        assert (settling.phrases, settling.is_empty) == ([], True)


def test_settle_keeps_a_match_open_while_a_phrase_is_under_way() -> None:
    track = Track(20, number=1)
    track.phrases["m"] = (3, 7)
    for match, is_open in (
        (Found(9, 1, 0, 8, 3, 4, MASK), True),
        (Found(9, 1, 0, 8, 2, 4, MASK), False),
        (Found(9, 0, 0, 7, 0, 1, MASK), True),
        (Found(9, 0, 0, 6, 9, 9, MASK), False),
        (Found(9, 0, 0, 8, 3, 4, FLAG), False),  # no phrase of that rule
    ):
        settling = settling_of(match)
        settling.phrase_tracks = [track]
        assert bool(settling.settle([track])) != is_open
        assert settling.open == ([match] if is_open else [])


def test_settle_writes_what_no_block_can_precede_and_waits_for_the_rest() -> None:
    match, blocking = found(0, 6, MASK), found(2, 4, BLOCK)
    track = Track(20)
    track.phrases["b"] = (1, 1)
    settling = settling_of(match, blocking)
    settling.phrase_tracks = [track]
    assert (settling.settle([track]), settling.written) == ([], [])
    assert (settling.border(9), settling.border(9, closed_only=True)) == (0, 2)
    track.phrases.clear()
    assert settling.settle([track]) == [blocking]
    assert (settling.written, settling.unwritten) == ([], [])  # it ends after the block


def test_settle_writes_what_ends_with_an_undecided_block() -> None:
    match, blocking = found(0, 4, MASK), found(2, 4, BLOCK)
    track = Track(20)
    track.phrases["b"] = (1, 1)
    settling = settling_of(match, blocking)
    settling.phrase_tracks = [track]
    assert (settling.settle([track]), settling.written) == ([], [match])
    assert settling.border(9) == 2


def test_settle_writes_before_a_track_that_cannot_block_has_found_all() -> None:
    match = found(0, 6, MASK)
    settling = settling_of(match)
    late = Track(3)
    late.blocks_from = 20
    assert (settling.settle([Track(20), late]), settling.written) == ([], [match])
    assert (settling.border(9), settling.is_idle) == (9, False)
    late.found_to = 6
    assert settling.settle([Track(20), late]) == [match]


def test_break_off_takes_what_stands_and_leaves_what_is_open() -> None:
    track = Track(20)
    track.phrases["o"] = (0, 0)
    match = found(1, 6, MASK)
    settling = settling_of(match, found(2, 4, OPEN_BLOCK))
    settling.phrase_tracks = [track]
    assert settling.settle([track]) == []
    assert settling.border(9, closed_only=True) == 9
    assert (settling.break_off(), settling.written, settling.verdicts.block) == ([match], [match], None)
