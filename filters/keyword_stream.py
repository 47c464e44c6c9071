"""The keywords and phrases of one folding in a stream: found with their last character, and what may come.

`KeywordStream` takes folded characters one at a time. `FoldedStream` takes whole pieces and knows where each
folded character came from; in a `RunStream` a run of equal characters counts as one, so that a match is over
only when the next character comes.

Not here: folding, and which matches stand (`settling.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from filters.folding import is_word_char
from filters.patterns import FoldedPatterns, Pattern
from filters.rules import Rule
from filters.settling import Found, Phrase, Settling

_RUN: Final = re.compile(r"(.)\1", re.DOTALL)
_MAX_KEPT: Final = 1_024  # characters beyond those that a match needs, before they are cut away


class KeywordStream:
    """A `settling.PhraseTrack`. `state` is the automaton's, after `num_folded` characters.

    The owner sets `num_raw`, the length of the text so far, and says where folded characters came from.
    """

    __slots__ = (
        "_patterns",
        "_settling",
        "automaton",
        "is_settled",
        "num_folded",
        "num_raw",
        "number",
        "state",
    )

    def __init__(self, patterns: FoldedPatterns, number: int, settling: Settling) -> None:
        self._patterns = patterns
        self.number = number
        self._settling = settling
        self.automaton = patterns.automaton
        self.state = self.automaton.start
        self.num_folded = 0
        self.num_raw = 0
        self.is_settled = False  # what ends with the last character was decided by `finish`

    @property
    def has_phrases(self) -> bool:
        return self._patterns.has_phrases

    def raw_of(self, folded: int) -> int:
        """The offset of the raw character that gave this folded one."""
        raise NotImplementedError

    def span(self, folded_start: int, folded_end: int) -> tuple[int, int]:
        """The raw characters [start, end) that gave a folded span."""
        raise NotImplementedError

    def step(self, folded_char: str) -> None:
        """One more character: the words that it ends, and what it completes."""
        automaton = self.automaton
        if automaton.awaiting[self.state] and not self.is_settled:
            self._resolve(is_word_char(folded_char))
        self.is_settled = False
        self.state = automaton.step(self.state, folded_char)
        self.num_folded += 1
        if automaton.outputs[self.state]:
            self.arrive()

    def arrive(self) -> None:
        """What ends in the state is found."""
        self._find(self.automaton.outputs[self.state])

    def finish(self) -> None:
        """Finds what there is if the text ends here."""
        if not self.is_settled:
            self._resolve(before_word=False)
            self.is_settled = True

    @property
    def found_to(self) -> int:
        """Every match that ends up to here was found."""
        if self.is_settled or not self.automaton.awaiting[self.state]:
            return self.num_raw
        return self.raw_of(self.num_folded - 1)

    @property
    def blocks_from(self) -> int:
        """No match that blocks and was not found ends before this."""
        patterns = self._patterns.patterns
        if any(patterns[index].blocks for index in self.automaton.awaiting[self.state]):
            return self.found_to + 1
        return self.num_raw

    def raw_before(self, depth: int) -> int:
        """Where the last folded characters began."""
        return self.raw_of(self.num_folded - depth) if depth else self.num_raw

    def phrase_start(self, rule: Rule) -> tuple[int, int] | None:
        """Where the earliest phrase began that is under way and may excuse the rule: folded, raw."""
        phrases = self._patterns.phrases_under_way
        under_way = [phrases[rule_id] for rule_id in (rule.id, None) if rule_id in phrases]
        if not under_way or self.is_settled:
            return None
        depths, fail, state = self.automaton.depth, self.automaton.fail, self.state
        while depth := depths[state]:
            for patterns in under_way:
                if state in patterns and any(self._is_possible(each, depth) for each in patterns[state]):
                    return self.num_folded - depth, self.raw_of(self.num_folded - depth)
            state = fail[state]
        return None

    def _is_possible(self, pattern: Pattern, depth: int) -> bool:
        """Whether a pattern that is under way can still match, `depth` characters of it being read."""
        return True

    def _is_enough(self, start: int, pattern: Pattern) -> bool:
        """Whether characters from `start` on stood in a row as often as the pattern asks."""
        return True

    def _resolve(self, before_word: bool) -> None:
        """Finds what waited for the next character: it is one of a word, or not."""
        awaiting = self.automaton.awaiting[self.state]
        if awaiting:
            right_bound = self.automaton.right_bound
            self._find([index for index in awaiting if not (before_word and index in right_bound)])

    def _find(self, indexes: Iterable[int]) -> None:
        """Patterns end with the last character."""
        patterns, settling = self._patterns, self._settling
        end = self.num_folded
        for index in indexes:
            pattern = patterns.patterns[index]
            size = len(pattern.text)
            if not self._is_enough(end - size, pattern):
                continue
            raw_start, raw_end = self.span(end - size, end)
            if pattern.is_phrase:
                phrase = Phrase(end - size, end, pattern, raw_start, raw_end, self.number)
                settling.phrases.append(phrase)
            elif pattern.rule is not None:
                # In order of their end, the longest first.
                number = (end * (patterns.longest + 1) - size) * len(patterns.patterns) + index
                found = Found(raw_end, self.number, number, raw_start, end - size, end, pattern.rule)
                settling.open.append(found)


class FoldedStream(KeywordStream):
    """Reads pieces under one folding."""

    __slots__ = ("_kept_from", "_max_kept", "_origins", "live_from")

    def __init__(self, patterns: FoldedPatterns, number: int, settling: Settling) -> None:
        super().__init__(patterns, number, settling)
        self._origins: list[int] = []  # the raw offset of each folded character from `_kept_from` on
        self._kept_from = 0
        self._max_kept = patterns.longest + _MAX_KEPT
        self.live_from = 0

    @property
    def live_from_closed(self) -> int:
        return self.raw_before(self._patterns.live_closed[self.state])

    def raw_of(self, folded: int) -> int:
        return self._origins[folded - self._kept_from]

    def span(self, folded_start: int, folded_end: int) -> tuple[int, int]:
        origins, kept_from = self._origins, self._kept_from
        return origins[folded_start - kept_from], origins[folded_end - 1 - kept_from] + 1

    def read(self, folded: str, origins: Sequence[int], num_raw: int) -> int:
        """More characters, the raw offset of each, and the length of the text with them.

        Returns where the longest suffix begins that may become a match and holds text.
        """
        automaton = self.automaton
        goto, fail, is_notable = automaton.goto, automaton.fail, automaton.is_notable
        last_root = automaton.last_root
        state, before = self.state, self.num_folded
        waits = is_notable[state] and not self.is_settled
        self.num_raw = num_raw
        self._origins += origins
        for position, char in enumerate(folded):
            if waits:
                self.state, self.num_folded = state, before + position
                self._resolve(is_word_char(char))
                waits = False
            edges = goto[state]
            while char not in edges and state > last_root:
                state = fail[state]
                edges = goto[state]
            if char in edges:
                state = edges[char]
                if is_notable[state]:
                    waits = True
                    self.state, self.num_folded = state, before + position + 1
                    self.arrive()
            else:
                state = 1 if last_root and is_word_char(char) else 0
        if folded:
            self.is_settled = False
            self.state, self.num_folded = state, before + len(folded)
            if len(self._origins) > self._max_kept:
                self._forget()
        live = automaton.live[state]
        self.live_from = self._origins[-live] if live else num_raw
        return self.live_from

    def _forget(self) -> None:
        num_kept = self._patterns.longest + 1
        self._kept_from += len(self._origins) - num_kept
        del self._origins[:-num_kept]


class RunStream(FoldedStream):
    """A run of equal characters counts as one. What ends with the last run waits: the run may go on."""

    __slots__ = ("_counts", "_ends", "_last")

    def __init__(self, patterns: FoldedPatterns, number: int, settling: Settling) -> None:
        super().__init__(patterns, number, settling)
        self._counts: list[int] = []  # how often the character stood in a row, and the raw end of the run
        self._ends: list[int] = []
        self._last = ""

    def span(self, folded_start: int, folded_end: int) -> tuple[int, int]:
        kept_from = self._kept_from
        return self._origins[folded_start - kept_from], self._ends[folded_end - 1 - kept_from]

    def read(self, folded: str, origins: Sequence[int], num_raw: int) -> int:
        if folded and folded[0] == self._last:
            num_more = len(folded) - len(folded.lstrip(self._last))
            self._counts[-1] += num_more
            self._ends[-1] = origins[num_more - 1] + 1
            folded, origins = folded[num_more:], origins[num_more:]
        if folded:
            self._last = folded[-1]
            folded, origins = self._collapsed(folded, origins)
        super().read(folded, origins, num_raw)
        if self._patterns.has_counts:
            depth = self._live_depth(closed_only=False)
            self.live_from = self._origins[-depth] if depth else num_raw
        return self.live_from

    @property
    def found_to(self) -> int:
        if self.is_settled or not self.automaton.awaiting[self.state]:
            return self.num_raw
        return self._ends[-1] - 1

    @property
    def live_from_closed(self) -> int:
        return self.raw_before(self._live_depth(closed_only=True))

    def _collapsed(self, folded: str, origins: Sequence[int]) -> tuple[str, Sequence[int]]:
        """One character for each run, and where it begins; notes where it ends and how long it is."""
        if _RUN.search(folded) is None:
            self._counts += [1] * len(folded)
            self._ends += [origin + 1 for origin in origins]
            return folded, origins
        starts = [0, *(at for at in range(1, len(folded)) if folded[at] != folded[at - 1])]
        stops = [*starts[1:], len(folded)]
        self._counts += [stop - start for start, stop in zip(starts, stops, strict=True)]
        self._ends += [origins[stop - 1] + 1 for stop in stops]
        return "".join([folded[start] for start in starts]), [origins[start] for start in starts]

    def _forget(self) -> None:
        super()._forget()
        num_kept = len(self._origins)
        del self._ends[:-num_kept], self._counts[:-num_kept]

    def _live_depth(self, closed_only: bool) -> int:
        if not self._patterns.has_counts:
            return (self._patterns.live_closed if closed_only else self.automaton.live)[self.state]
        automaton, under_way, state = self.automaton, self._patterns.keywords_under_way, self.state
        while automaton.depth[state]:
            depth = automaton.depth[state]
            for pattern in under_way.get(state, ()):
                if pattern.holds(closed_only) and self._is_possible(pattern, depth):
                    return depth
            state = automaton.fail[state]
        return 0

    def _is_possible(self, pattern: Pattern, depth: int) -> bool:
        """The last run may go on; those before it may not."""
        return self._is_long_enough(pattern.repeats[: depth - 1], self.num_folded - depth)

    def _is_enough(self, start: int, pattern: Pattern) -> bool:
        return self._is_long_enough(pattern.repeats, start)

    def _is_long_enough(self, repeats: Sequence[int], start: int) -> bool:
        if not repeats:
            return True
        first = start - self._kept_from
        return all(
            count >= needed
            for count, needed in zip(self._counts[first : first + len(repeats)], repeats, strict=True)
        )
