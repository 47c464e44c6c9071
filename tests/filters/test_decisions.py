from __future__ import annotations

from filters.decisions import Decisions
from filters.hit import Hit
from filters.offsets import Offsets
from filters.patterns import Patterns
from filters.rules import Rule, RuleSet

WORD = Rule("w", ("ass",), "mask", whole_word=True, replacement="*")
FILM = Rule("f", ("cd",), "block", allow=("bcde",))


class Reader:
    """Steps through regular characters."""

    def __init__(self, *rules: Rule) -> None:
        patterns = Patterns(RuleSet(rules))
        self.decisions = Decisions(patterns, Offsets())
        self.state = patterns.automaton.start
        self.num_read = 0

    def read(self, text: str) -> list[Hit]:
        """What is certain so far."""
        for char in text:
            self.state = self.decisions.step(self.state, char, self.num_read)
            self.num_read += 1
        return [candidate.hit for candidate in self.decisions.certain]


def test_step_makes_a_word_certain_at_the_character_after_it() -> None:
    reader = Reader(WORD)
    assert reader.read("ass") == []
    assert reader.read(".") == [Hit("w", "mask", 0, 3)]
    assert reader.read("class asst ") == [Hit("w", "mask", 0, 3)]


def test_step_waits_while_a_phrase_may_excuse_a_match() -> None:
    reader = Reader(FILM)
    assert reader.read("abcd") == []
    assert [candidate.hit for candidate in reader.decisions.undecided] == [Hit("f", "block", 2, 4)]
    assert reader.read("e") == []
    assert (reader.decisions.undecided, reader.decisions.block) == ([], None)
    assert reader.read("bcdx") == [Hit("f", "block", 6, 8)]
    assert reader.decisions.block == Hit("f", "block", 6, 8)


def test_step_of_a_block_decides_the_rest_as_if_the_text_ended() -> None:
    reader = Reader(
        Rule("open", ("cd",), "block", allow=("cdefg",)),
        Rule("now", ("ef",), "block"),
        Rule("word", ("cdef",), "mask", whole_word=True),
    )
    assert reader.read("cde") == []
    assert set(reader.read("f")) == {
        Hit("open", "block", 0, 2),
        Hit("now", "block", 2, 4),
        Hit("word", "mask", 0, 4),
    }
    assert reader.decisions.block == Hit("open", "block", 0, 2)


def test_end_decides_words_once() -> None:
    reader = Reader(WORD)
    reader.read("ass")
    reader.decisions.end(reader.state, 3)
    assert reader.read(" ass ") == [Hit("w", "mask", 0, 3), Hit("w", "mask", 4, 7)]


def test_arrive_reports_what_ends_in_the_state() -> None:
    reader = Reader(Rule("m", ("ab",), "mask"))
    automaton = Patterns(RuleSet((Rule("m", ("ab",), "mask"),))).automaton
    state = automaton.step(automaton.step(automaton.start, "a"), "b")
    reader.decisions.arrive(state, 2)
    assert [candidate.hit for candidate in reader.decisions.certain] == [Hit("m", "mask", 0, 2)]
