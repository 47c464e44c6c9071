"""What is looked for in a text while it is read: a track for the patterns of each folding, and one for each
detector of personal data.

A track finds matches in the window of its `Reading`, each once, in order of their end, and says how far it
has got. Folded offsets count from the start of the text.

Not here: which matches stand, and which track goes on when (`scan.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from filters.patterns import FoldedPatterns
from filters.pii import LOOK_AHEAD, LOOK_BACK, Detector
from filters.reading import Reading
from filters.rules import Rule
from filters.settling import Found, Phrase

# A track stops after this many matches and goes on at the next step, so that a text full of matches does not
# hold the event loop: a match costs 3 us all in all.
MAX_FOUND: Final = 250


class Track(Protocol):
    """`is_behind`: there may be more to find in what was read. `keep_from`: what the window must still have.

    Raw offsets, as of the last `find`: every match that ends up to `found_to` was found, and every match that
    begins before `open_from`. Both are the length of the text once all is found.
    """

    reading: Reading
    is_behind: bool
    found_to: int
    open_from: int

    @property
    def keep_from(self) -> int: ...
    def find(self) -> list[Found]: ...


class KeywordTrack:
    """The keywords and phrases of one folding."""

    __slots__ = (
        "_base",
        "_done",
        "_limit",
        "_matches",
        "_num_found",
        "_number",
        "_patterns",
        "found_to",
        "is_behind",
        "open_from",
        "phrases",
        "reading",
    )

    def __init__(self, patterns: FoldedPatterns, reading: Reading, number: int) -> None:
        self._patterns = patterns
        self._number = number
        self._num_found = 0
        self._matches: Iterator[tuple[int, int]] | None = None  # of a window that is not looked through yet
        self._base = 0  # where that window began
        self._limit = 0  # up to where matches in it are certain
        self._done = 0  # every match that ends up to here was found
        self.reading = reading
        self.is_behind = False
        self.found_to = 0
        self.open_from = 0
        self.phrases: list[Phrase] = []  # in order of their end

    @property
    def keep_from(self) -> int:
        return max(0, self._done - self._patterns.longest)

    def find(self) -> list[Found]:
        """New matches, a bounded number of them."""
        if self._matches is None:
            self._begin()
        new = self._take()
        self._num_found += len(new)
        if self._matches is None:
            self._done = self._limit
        reading = self.reading
        end = reading.end
        self.is_behind = self._matches is not None or self._done + (not reading.is_last) < end
        self.found_to = reading.raw_of(self._done)
        if self._done == end and reading.is_last:
            self.open_from = self.found_to
        else:
            self.open_from = reading.raw_of(max(0, self._done - self._patterns.longest + 1))
        return new

    def _begin(self) -> None:
        """Begins to look through the window. A word at its end waits for the character after it."""
        reading = self.reading
        self._base = reading.at
        self._limit = reading.end if reading.is_last else max(self._done, reading.end - 1)
        self._matches = self._patterns.finder.find(reading.window)

    def _take(self) -> list[Found]:
        """The next matches in the window."""
        assert self._matches is not None
        reading, patterns, base = self.reading, self._patterns.patterns, self._base
        done, limit = self._done, self._limit
        new: list[Found] = []
        num_left = MAX_FOUND
        for window_end, index in self._matches:
            end = base + window_end
            if end <= done:
                continue
            if end > limit:
                break
            pattern = patterns[index]
            start = end - len(pattern.text)
            if not pattern.repeats or self._repeats_enough(start, pattern.repeats):
                raw_start, raw_end = reading.span(start, end)
                if pattern.is_phrase:
                    self.phrases.append(Phrase(start, end, pattern, raw_start, raw_end))
                elif pattern.rule is not None:
                    number = self._num_found + len(new)
                    new.append(Found(raw_end, self._number, number, raw_start, start, end, pattern.rule))
            num_left -= 1
            if not num_left:
                self._done = end - 1  # more may end here
                return new
        self._matches = None
        return new

    def excuses(self, found: Found, is_same_reading: bool) -> bool:
        """Whether a phrase of this track contains the match; under another folding raw offsets decide."""
        phrases, longest = self.phrases, self._patterns.longest
        if is_same_reading:
            first = bisect_left(phrases, found.end, key=_end_of)
            last_end = found.start + longest
        else:
            first = bisect_left(phrases, found.raw_end, key=_raw_end_of)
            last_end = phrases[first].end + longest if first < len(phrases) else 0
        for index in range(first, len(phrases)):
            phrase = phrases[index]
            if phrase.end > last_end:
                break
            begins = phrase.start <= found.start if is_same_reading else phrase.raw_start <= found.raw_start
            if begins and phrase.pattern.excuses(found.rule):
                return True
        return False

    def forget_phrases_before(self, raw: int) -> None:
        """Phrases that end before this raw offset are not needed any more."""
        del self.phrases[: bisect_left(self.phrases, raw, key=_raw_end_of)]

    def _repeats_enough(self, start: int, repeats: tuple[int, ...]) -> bool:
        run_length = self.reading.run_length
        return all(run_length(start + i) >= needed for i, needed in enumerate(repeats))


class PiiTrack:
    """The matches of one detector, for each rule that asks for their class."""

    __slots__ = (
        "_detect",
        "_done",
        "_num_found",
        "_number",
        "_rules_of",
        "found_to",
        "is_behind",
        "open_from",
        "reading",
    )

    def __init__(self, detect: Detector, rules: Iterable[Rule], reading: Reading, number: int) -> None:
        self._detect = detect
        self._rules_of: dict[str, list[Rule]] = {}
        for rule in rules:
            self._rules_of.setdefault(rule.pii, []).append(rule)
        self._number = number
        self._num_found = 0
        self._done = 0
        self.reading = reading
        self.is_behind = False
        self.found_to = 0
        self.open_from = 0

    @property
    def keep_from(self) -> int:
        return max(0, self._done - LOOK_BACK)

    def find(self) -> list[Found]:
        """New matches, a bounded number of them."""
        reading = self.reading
        at, is_last = reading.at, reading.is_last
        matches, decided = self._detect(reading.window, self._done - at, is_last)
        self._done = at + decided
        self.is_behind = decided + (0 if is_last else LOOK_AHEAD) < len(reading.window)
        self.found_to = self.open_from = reading.raw_of(self._done)
        new: list[Found] = []
        for start, end, kind in matches:
            raw_start, raw_end = reading.span(at + start, at + end)
            for rule in self._rules_of.get(kind, ()):
                number = self._num_found + len(new)
                new.append(Found(raw_end, self._number, number, raw_start, at + start, at + end, rule))
        self._num_found += len(new)
        return new


def _end_of(phrase: Phrase) -> int:
    return phrase.end


def _raw_end_of(phrase: Phrase) -> int:
    return phrase.raw_end
