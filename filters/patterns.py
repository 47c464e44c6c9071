"""Rules compiled for matching: one automaton over all keywords and phrases, and what each pattern means.

The same compiled object serves whole texts (`scan.py`) and streams (`stream.py`), so they cannot disagree.

Not here: rules files (`rules.py`), and what is done about a hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from filters.automaton import Automaton
from filters.folding import fold
from filters.rules import Rule, RuleSet


@dataclass(frozen=True, slots=True, eq=False)  # hashing a rule of 5,000 keywords costs 25 us
class Pattern:
    """A keyword of `rule`, or a phrase that excuses matches of `rule` (of every rule if None)."""

    text: str  # folded
    rule: Rule | None
    is_phrase: bool
    whole: bool

    def excuses(self, rule: Rule) -> bool:
        return self.is_phrase and (self.rule is None or self.rule is rule)


class Patterns:
    """What is looked for. Immutable; shared by all scans and streams.

    Only keywords of active rules hold text back: a flagged word changes nothing, and a phrase alone is no
    match.
    """

    def __init__(self, rules: RuleSet) -> None:
        self.patterns = tuple(_patterns_of(rules))
        self.automaton = Automaton(
            [pattern.text for pattern in self.patterns],
            fold=True,
            whole=[i for i, pattern in enumerate(self.patterns) if pattern.whole],
            silent=[i for i, pattern in enumerate(self.patterns) if not _holds(pattern)],
        )
        self.longest = max((len(pattern.text) for pattern in self.patterns), default=0)
        self.is_active = any(_holds(pattern) for pattern in self.patterns)  # some rule changes what leaves
        self.has_phrases = any(pattern.is_phrase for pattern in self.patterns)

        self._phrase_states = self._find_phrase_states()

    def __len__(self) -> int:
        return len(self.patterns)

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

    def phrase_depth(self, state: int, rule: Rule) -> int:
        """How many folded characters ago the earliest phrase began that may yet excuse `rule`; 0: none."""
        automaton = self.automaton
        while self._phrase_states and automaton.depth[state]:
            if any(phrase.excuses(rule) for phrase in self._phrase_states.get(state, ())):
                return automaton.depth[state]
            state = automaton.fail[state]
        return 0

    def _find_phrase_states(self) -> dict[int, list[Pattern]]:
        """The phrases that are under way in a state: begun, and not yet a match."""
        states: dict[int, list[Pattern]] = {}
        for index, pattern in enumerate(self.patterns):
            if pattern.is_phrase:
                for state in self.automaton.prefix_states(index):
                    states.setdefault(state, []).append(pattern)
        return states


def _holds(pattern: Pattern) -> bool:
    return not pattern.is_phrase and pattern.rule is not None and pattern.rule.is_active


def _patterns_of(rules: RuleSet) -> Iterator[Pattern]:
    for rule in rules.rules:
        is_phrase = rule.action == "allow"
        for keyword in dict.fromkeys(map(fold, rule.match)):
            yield Pattern(keyword, None if is_phrase else rule, is_phrase, rule.whole_word)
        for phrase in dict.fromkeys(map(fold, rule.allow)):
            yield Pattern(phrase, rule, is_phrase=True, whole=False)
