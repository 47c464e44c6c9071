"""What is found in a stream, character by character, and when it is certain.

A match of a keyword is a candidate until nothing that may still come can excuse it; then it stands or falls,
at that very character. A match that blocks ends the text there: what is undecided then is decided as if the
text ended.

Not here: the text itself, holding it and rewriting it (`stream.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from filters.folding import is_word_char
from filters.hit import Hit
from filters.offsets import Offsets
from filters.patterns import Pattern, Patterns
from filters.rules import REWRITES, Rule

Match = tuple[int, int]  # folded end, pattern index


@dataclass(frozen=True, slots=True)
class Candidate:
    """A match that stands unless a phrase excuses it. `hit` has its raw offsets."""

    folded_start: int
    folded_end: int
    rule: Rule
    hit: Hit

    @property
    def blocks(self) -> bool:
        return self.rule.is_active and self.rule.action == "block"

    @property
    def rewrites(self) -> bool:
        return self.rule.is_active and self.rule.action in REWRITES

    def is_excused(self, phrases: Iterable[tuple[int, int, Pattern]]) -> bool:
        return any(
            start <= self.folded_start and self.folded_end <= end and phrase.excuses(self.rule)
            for start, end, phrase in phrases
        )


class Decisions:
    """The candidates of one stream. `state` is the automaton's, `folded_at` a count of folded characters.

    `undecided`: candidates that a phrase may still excuse. `certain`: what stands, in order, for the owner to
    take.
    `block`: the hit that ends the text; nothing more is to be decided after it.
    """

    __slots__ = ("_offsets", "_rules", "block", "certain", "undecided", "words_are_settled")

    def __init__(self, rules: Patterns, offsets: Offsets) -> None:
        self._rules = rules
        self._offsets = offsets
        self.undecided: list[Candidate] = []
        self.certain: list[Candidate] = []
        self.block: Hit | None = None
        self.words_are_settled = False  # the words that end with the last character were decided by `end`

    def step(self, state: int, folded_char: str, folded_at: int) -> int:
        """One more folded character after `folded_at`: the words that it ends, and what it completes."""
        automaton = self._rules.automaton
        ended: list[Match] = []
        seen: list[Match] = []
        awaiting = automaton.awaiting[state]
        if awaiting and not self.words_are_settled and not is_word_char(folded_char):
            ended = [(folded_at, index) for index in awaiting]
            seen = [(folded_at, index) for index in automaton.outputs[state]]
        self.words_are_settled = False
        state = automaton.step(state, folded_char)
        ended += [(folded_at + 1, index) for index in automaton.outputs[state]]
        if ended or self.undecided:
            self._decide(state, folded_at + 1, ended, seen)
        return state

    def arrive(self, state: int, folded_at: int) -> None:
        """The state was reached by regular steps, and patterns end in it."""
        self._decide(state, folded_at, [(folded_at, index) for index in self._rules.automaton.outputs[state]])

    def end(self, state: int, folded_at: int) -> None:
        """Decides everything as if the text ended here."""
        automaton = self._rules.automaton
        awaiting = () if self.words_are_settled else automaton.awaiting[state]
        ended = [(folded_at, index) for index in awaiting]
        seen = [(folded_at, index) for index in automaton.outputs[state]]
        stands = self._unexcused(ended, seen)
        self.words_are_settled = True
        self.undecided = []
        self.certain += stands
        blocking = [candidate.hit for candidate in stands if candidate.blocks]
        self.block = min(blocking, key=lambda hit: hit.start, default=None)

    def _decide(
        self, state: int, folded_at: int, ended: list[Match], seen: list[Match] | None = None
    ) -> None:
        """`ended` came to light with the last character; `seen` did before, but may excuse the former."""
        undecided: list[Candidate] = []
        stands: list[Candidate] = []
        reach: dict[str, int] = {}
        for candidate in self._unexcused(ended, seen or []):
            rule = candidate.rule
            if rule.id not in reach:
                reach[rule.id] = self._rules.phrase_depth(state, rule)
            is_open = folded_at - candidate.folded_start <= reach[rule.id]
            (undecided if is_open else stands).append(candidate)
        if any(candidate.blocks for candidate in stands):
            self.undecided = stands + undecided
            self.end(state, folded_at)
            return
        self.undecided = undecided
        self.certain += stands

    def _unexcused(self, ended: list[Match], seen: list[Match]) -> list[Candidate]:
        """All candidates, the new ones too, without those inside of a phrase that is complete."""
        candidates = list(self.undecided)
        for start, end, rule in self._rules.keywords(ended):
            raw_start, raw_end = self._offsets.span(start, end)
            hit = Hit(rule.id, rule.action, raw_start, raw_end, rule.shadow)
            candidates.append(Candidate(start, end, rule, hit))
        phrases = self._rules.phrases(ended + seen)
        return [candidate for candidate in candidates if not candidate.is_excused(phrases)]
