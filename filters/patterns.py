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
from filters.pii import DETECTORS, Detector
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

    def holds(self, closed_only: bool = False) -> bool:
        """Whether text waits for it. A flagged word changes nothing, and a phrase alone is no match."""
        return not self.is_phrase and self.rule is not None and self.rule.holds(closed_only)

    @property
    def blocks(self) -> bool:
        return not self.is_phrase and self.rule is not None and self.rule.blocks


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

    @cached_property
    def automaton(self) -> Automaton:
        """For streams: only what holds text counts as live."""
        return Automaton(
            [pattern.text for pattern in self.patterns],
            fold=self.folding == DEFAULT,
            whole=self._whole,
            silent=[i for i, pattern in enumerate(self.patterns) if not pattern.holds()],
            late=self.folding.repeats,
        )

    @cached_property
    def live_closed(self) -> list[int]:
        """The automaton's `live` of rules that fail closed."""
        if all(pattern.rule is None or pattern.rule.fail == "closed" for pattern in self.patterns):
            return self.automaton.live
        return self.automaton.live_of(
            [index for index, pattern in enumerate(self.patterns) if pattern.holds(closed_only=True)]
        )

    @cached_property
    def has_counts(self) -> bool:
        """Whether it matters how often a character stands in a row."""
        return any(pattern.repeats for pattern in self.patterns)

    @cached_property
    def phrases_under_way(self) -> dict[str | None, dict[int, tuple[Pattern, ...]]]:
        """For the id of each rule (None: for all rules): state of the automaton -> the phrases that excuse it
        and are under way there, begun and not yet a match.
        """
        phrases: dict[str | None, dict[int, tuple[Pattern, ...]]] = {}
        for index, pattern in enumerate(self.patterns):
            if pattern.is_phrase:
                rule_id = None if pattern.rule is None else pattern.rule.id
                self._note_states(index, phrases.setdefault(rule_id, {}))
        return phrases

    @cached_property
    def keywords_under_way(self) -> dict[int, tuple[Pattern, ...]]:
        """State of the automaton -> the keywords under way there, which may be impossible all the same, by
        how often a character stood in a row. Empty where that does not matter.
        """
        keywords: dict[int, tuple[Pattern, ...]] = {}
        for index, pattern in enumerate(self.patterns):
            if self.has_counts and not pattern.is_phrase:
                self._note_states(index, keywords)
        return keywords

    def make_ready(self) -> None:
        """Builds what streams need, so that none of them has to."""
        _ = self.automaton, self.live_closed, self.phrases_under_way, self.keywords_under_way

    def _note_states(self, index: int, noted: dict[int, tuple[Pattern, ...]]) -> None:
        alone = (self.patterns[index],)
        for state in self.automaton.prefix_states(index):
            noted[state] = noted[state] + alone if state in noted else alone


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

    def __len__(self) -> int:
        return sum(len(folded.patterns) for folded in self.by_folding) + len(self.pii)

    @property
    def by_folding(self) -> Sequence[FoldedPatterns]:
        return (self, *self.others)

    def pii_of(self, detect: Detector) -> list[Rule]:
        """The rules that ask for what a detector finds."""
        return [rule for rule in self.pii if DETECTORS[rule.pii] is detect]

    def _prefilter(self) -> Prefilter | None:
        texts = [pattern.text for pattern in self.patterns]
        if self.others or not Prefilter.is_for(texts):
            return None
        return Prefilter(texts, self.finder, self.detectors)


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
