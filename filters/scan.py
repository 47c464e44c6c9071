"""The whole-text scan, for input: all hits on raw offsets, the verdict, and the rewritten text.

The text is read in slices, so that a caller with an event loop can let others run in between: matching holds
the GIL. Memory is bounded by the text and by `MAX_HITS`, whatever the text is.

Not here: joining a prompt's parts into the text that is scanned, and streams (`stream.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

from filters.folding import fold_and_tell, fold_table
from filters.hit import Hit
from filters.offsets import Offsets
from filters.patterns import Pattern, Patterns
from filters.rules import REWRITES, Rule
from filters.spans import Emitter

SLICE_CHARS: Final = 16_384  # 1 to 3 ms
MAX_HITS: Final = 1_000


@dataclass(frozen=True, slots=True)
class ScanResult:
    """`hits` are in order of their end, at most `MAX_HITS`; `num_hits` counts all.

    `blocked_by` is the id of the rule that blocks. `text` is the rewritten text; None if it is blocked. A
    scan ends with the slice in which a block was found.
    """

    hits: tuple[Hit, ...]
    num_hits: int
    blocked_by: str | None
    text: str | None

    @property
    def blocked(self) -> bool:
        return self.blocked_by is not None


def scan(text: str, rules: Patterns) -> ScanResult:
    """All of it at once."""
    steps = scan_in_slices(text, rules, max(SLICE_CHARS, len(text)))
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: ScanResult = done.value
            return result


def scan_in_slices(
    text: str, rules: Patterns, slice_chars: int = SLICE_CHARS
) -> Generator[None, None, ScanResult]:
    """A generator that pauses after each slice and returns a `ScanResult`."""
    if slice_chars < 1:
        raise ValueError(f"slice_chars is {slice_chars}; it must be at least 1")
    if not rules.patterns:
        return ScanResult((), 0, None, text)
    scanner = _Scanner(text, rules)
    for start in range(0, len(text), slice_chars):
        scanner.read(start, min(start + slice_chars, len(text)))
        if scanner.blocked_by is not None:
            break
        yield
    return scanner.result()


class _Scanner:
    """A scan under way. Folded offsets count from the start of the text.

    Candidates are decided strictly in order of their end, so that the result is the same for every slice
    size.
    """

    def __init__(self, text: str, rules: Patterns) -> None:
        self._text = text
        self._rules = rules
        self._offsets = Offsets()
        self._window = ""  # folded, from `_window_at` on: what a match that ends later can begin in
        self._window_at = 0
        self._done = 0  # every match that ends up to here was found
        self._candidates: deque[tuple[int, int, Rule]] = deque()
        self._phrases: list[tuple[int, int, Pattern]] = []  # in order of their end
        self._emitter: Emitter | None = None  # from the first span on that is to be rewritten
        self._pieces: list[str] = []
        self._hits: list[Hit] = []
        self._num_hits = 0
        self.blocked_by: str | None = None

    def read(self, start: int, end: int) -> None:
        """The slice text[start:end]; slices follow each other."""
        is_last = end == len(self._text)
        self._fold(start, end)
        self._find(is_last)
        self._decide(is_last)
        if self.blocked_by is None:
            self._release(is_last)

    def result(self) -> ScanResult:
        text: str | None = self._text if self._emitter is None else "".join(self._pieces)
        if self.blocked_by is not None:
            text = None
        return ScanResult(tuple(self._hits), self._num_hits, self.blocked_by, text)

    def _fold(self, start: int, end: int) -> None:
        piece = self._text[start:end]
        folded, changed = fold_and_tell(piece)
        self._window += folded
        if any(len(fold_table()[char]) != 1 for char in changed):
            lengths = {char: len(fold_table()[char]) for char in changed}
            for index, char in enumerate(piece):
                if lengths.get(char, 1) != 1:
                    self._offsets.add(start + index, lengths[char])

    def _find(self, is_last: bool) -> None:
        """New matches. A word at the end of the window waits for the character after it."""
        rules, at = self._rules, self._window_at
        limit = at + len(self._window) - (not is_last)
        found = [
            (at + end, index)
            for end, index in rules.automaton.find(self._window)
            if self._done < at + end <= limit
        ]
        self._candidates.extend(rules.keywords(found))
        self._phrases.extend(rules.phrases(found))
        self._done = max(self._done, limit)
        keep_from = max(at, self._done - rules.longest)
        self._window, self._window_at = self._window[keep_from - at :], keep_from

    def _decide(self, is_last: bool) -> None:
        """Takes candidates in order until one waits for a phrase that may still excuse it."""
        candidates = self._candidates
        while candidates and self.blocked_by is None:
            start, end, rule = candidates[0]
            if self._rules.has_phrases and not is_last and start + self._rules.longest > self._done:
                break
            candidates.popleft()
            if not self._is_excused(start, end, rule):
                self._accept(start, end, rule)
        first_end = candidates[0][1] if candidates else self._done + 1
        del self._phrases[: bisect_left(self._phrases, first_end, key=_end_of)]

    def _is_excused(self, start: int, end: int, rule: Rule) -> bool:
        phrases = self._phrases
        for index in range(bisect_left(phrases, end, key=_end_of), len(phrases)):
            phrase_start, phrase_end, phrase = phrases[index]
            if phrase_end > start + self._rules.longest:
                break
            if phrase_start <= start and phrase.excuses(rule):
                return True
        return False

    def _accept(self, start: int, end: int, rule: Rule) -> None:
        raw_start, raw_end = self._offsets.span(start, end)
        self._num_hits += 1
        if len(self._hits) < MAX_HITS:
            self._hits.append(Hit(rule.id, rule.action, raw_start, raw_end, rule.shadow))
        if not rule.is_active:
            return
        if rule.action in REWRITES:
            if self._emitter is None:
                self._emitter = Emitter()
            self._emitter.add(raw_start, raw_end, rule)
        else:
            self.blocked_by = rule.id

    def _release(self, is_last: bool) -> None:
        """Rewrites what no later match can begin in."""
        starts = [start for start, _, _ in self._candidates]
        settled = max(0, min([self._done - self._rules.longest + 1, *starts]))
        border = len(self._text) if is_last else self._offsets.raw_of(settled)
        emitter = self._emitter
        if emitter is not None and border > emitter.released:
            self._pieces.append(emitter.release(self._text[emitter.released : border], border))
        self._offsets.forget_before(settled)


def _end_of(phrase: tuple[int, int, Pattern]) -> int:
    return phrase[1]
