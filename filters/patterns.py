"""Rules compiled for matching: what is looked for under each folding, and what each pattern means.

The same compiled object serves whole texts (`scan.py`) and streams (`stream.py`), so they cannot disagree.

Not here: rules files (`rules.py`), and what is done about a hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from filters.automaton import Automaton
from filters.finder import Finder
from filters.pii import DETECTORS
from filters.prefilter import Prefilter
from filters.rule_folding import DEFAULT, Folding
from filters.rules import Rule, RuleSet


@dataclass(frozen=True, slots=True, eq=False)  # hashing a rule of 5,000 keywords costs 25 us
class Pattern:
    """A keyword of `rule`, or a phrase that excuses matches of `rule` (of every rule if None).

    `repeats`: how often each character must stand in a row at least, where that matters; else empty.
    """

    text: str  # folded
    rule: Rule | None
    is_phrase: bool
    whole: bool
    repeats: tuple[int, ...] = ()

    def excuses(self, rule: Rule) -> bool:
        return self.is_phrase and (self.rule is None or self.rule is rule)


class FoldedPatterns:
    """The keywords and phrases of the rules that share one folding. Immutable."""

    def __init__(self, rules: Iterable[Rule], folding: Folding) -> None:
        self.folding = folding
        self.patterns = tuple(_patterns_of(rules, folding))
        self.longest = max((len(pattern.text) for pattern in self.patterns), default=0)
        self.has_phrases = any(pattern.is_phrase for pattern in self.patterns)
        self.finder = Finder([pattern.text for pattern in self.patterns], self._whole)

    @property
    def _whole(self) -> list[int]:
        return [i for i, pattern in enumerate(self.patterns) if pattern.whole]

    def keywords(self, matches: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, Rule]]:
        """Of (end, pattern index) the keywords, as folded (start, end, rule)."""
        for end, index in matches:
            pattern = self.patterns[index]
            if not pattern.is_phrase and pattern.rule is not None:
                yield end - len(pattern.text), end, pattern.rule

    def phrases(self, matches: Iterable[tuple[int, int]]) -> list[tuple[int, int, Pattern]]:
        """Of (end, pattern index) the phrases, as folded (start, end, pattern)."""
        if not self.has_phrases:
            return []
        patterns = self.patterns
        return [
            (end - len(patterns[index].text), end, patterns[index])
            for end, index in matches
            if patterns[index].is_phrase
        ]


class Patterns(FoldedPatterns):
    """What is looked for: under the default folding, in `others` under foldings that rules ask for, and in
    `pii` the rules for personal data. Immutable; shared by all scans and streams.
    """

    def __init__(self, rules: RuleSet) -> None:
        foldings = dict.fromkeys([DEFAULT, *(rule.folding for rule in rules.rules)])
        rules_of = {
            folding: [rule for rule in rules.rules if rule.folding == folding] for folding in foldings
        }
        super().__init__(rules_of.pop(DEFAULT), DEFAULT)
        self.others = tuple(FoldedPatterns(group, folding) for folding, group in rules_of.items())
        self.pii = tuple(rule for rule in rules.rules if rule.pii)
        self.detectors = tuple(dict.fromkeys(DETECTORS[rule.pii] for rule in self.pii))
        self.prefilter = self._prefilter()
        self.is_active = any(rule.is_active for rule in rules.rules)  # some rule changes what leaves
        self._phrase_states: dict[int, list[Pattern]] = {}

    def __len__(self) -> int:
        return sum(len(folded.patterns) for folded in self.by_folding) + len(self.pii)

    @property
    def by_folding(self) -> Sequence[FoldedPatterns]:
        return (self, *self.others)

    def _prefilter(self) -> Prefilter | None:
        texts = [pattern.text for pattern in self.patterns]
        if self.others or not Prefilter.is_for(texts):
            return None
        return Prefilter(texts, self.finder, self.detectors)

    @cached_property
    def automaton(self) -> Automaton:
        """For streams. Only keywords of active rules hold text back: a flagged word changes nothing, and a
        phrase alone is no match.
        """
        automaton = Automaton(
            [pattern.text for pattern in self.patterns],
            fold=True,
            whole=self._whole,
            silent=[i for i, pattern in enumerate(self.patterns) if not _holds(pattern)],
        )
        self._phrase_states = self._find_phrase_states(automaton)
        return automaton

    def phrase_depth(self, state: int, rule: Rule) -> int:
        """How many folded characters ago the earliest phrase began that may yet excuse `rule`; 0: none."""
        automaton = self.automaton
        while self._phrase_states and automaton.depth[state]:
            if any(phrase.excuses(rule) for phrase in self._phrase_states.get(state, ())):
                return automaton.depth[state]
            state = automaton.fail[state]
        return 0

    def _find_phrase_states(self, automaton: Automaton) -> dict[int, list[Pattern]]:
        """The phrases that are under way in a state: begun, and not yet a match."""
        states: dict[int, list[Pattern]] = {}
        for index, pattern in enumerate(self.patterns):
            if pattern.is_phrase:
                for state in automaton.prefix_states(index):
                    states.setdefault(state, []).append(pattern)
        return states


def _holds(pattern: Pattern) -> bool:
    return not pattern.is_phrase and pattern.rule is not None and pattern.rule.is_active


def _patterns_of(rules: Iterable[Rule], folding: Folding) -> Iterator[Pattern]:
    for rule in rules:
        is_phrase = rule.action == "allow"
        owner = None if is_phrase else rule
        yield from _distinct(rule.match, folding, owner, is_phrase, rule.whole_word)
        yield from _distinct(rule.allow, folding, rule, True, False)


def _distinct(
    texts: Iterable[str], folding: Folding, rule: Rule | None, is_phrase: bool, whole: bool
) -> Iterator[Pattern]:
    folded = dict.fromkeys((folding.fold(text), folding.repeats_of(text)) for text in texts)
    return (Pattern(text, rule, is_phrase, whole, repeats) for text, repeats in folded)
