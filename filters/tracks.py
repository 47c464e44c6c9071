"""What is looked for in a text while it is read: a track for the patterns of each folding, and one for each
detector of personal data.

A track finds matches in the window of its `Reading`, each once, in order of their end, and says how far it
has got. Folded offsets count from the start of the text.

Not here: which matches stand, and in what order matches of several tracks are decided (`scan.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol

from filters.patterns import FoldedPatterns, Pattern
from filters.pii import LOOK_AHEAD, LOOK_BACK, Detector
from filters.reading import Reading
from filters.rules import Rule

# A track stops after this many matches and goes on at the next step, so that a text full of matches does not
# hold the event loop: a match costs 3 us all in all.
MAX_FOUND: Final = 250


class Found(NamedTuple):
    """A match of a keyword or a detector that a phrase may excuse. Sorts in the order of decision."""

    raw_end: int
    track: int
    number: int  # among the matches of its track
    raw_start: int
    start: int  # folded
    end: int
    rule: Rule


class Phrase(NamedTuple):
    start: int  # folded
    end: int
    pattern: Pattern
    raw_start: int
    raw_end: int


class Track(Protocol):
    """`done`: every match that ends up to here was found. `settled`: every match that begins before here was.
    `keep_from`: what the window must still have. `is_behind`: there may be more to find before reading on.
    """

    reading: Reading
    done: int
    is_behind: bool

    @property
    def settled(self) -> int: ...
    @property
    def keep_from(self) -> int: ...
    def find(self, is_last: bool) -> list[Found]: ...


class KeywordTrack:
    """The keywords and phrases of one folding."""

    __slots__ = ("_is_last", "_num_found", "_number", "_patterns", "done", "is_behind", "phrases", "reading")

    def __init__(self, patterns: FoldedPatterns, reading: Reading, number: int) -> None:
        self._patterns = patterns
        self._number = number
        self._num_found = 0
        self._is_last = False
        self.reading = reading
        self.done = 0
        self.is_behind = False
        self.phrases: list[Phrase] = []  # in order of their end

    @property
    def settled(self) -> int:
        if self._is_last and not self.is_behind:
            return self.done
        return max(0, self.done - self._patterns.longest + 1)

    @property
    def keep_from(self) -> int:
        return max(0, self.done - self._patterns.longest)

    def find(self, is_last: bool) -> list[Found]:
        """New matches. A word at the end of the window waits for the character after it."""
        reading, patterns = self.reading, self._patterns.patterns
        at, done = reading.at, self.done
        limit = reading.end if is_last else max(done, reading.end - 1)
        self._is_last, self.is_behind = is_last, False
        new: list[Found] = []
        num_new, last_end = 0, 0
        for window_end, index in self._patterns.finder.find(reading.window):
            end = at + window_end
            if end <= done:
                continue
            if end > limit:
                break
            if num_new >= MAX_FOUND and end > last_end:
                limit, self.is_behind = last_end, True
                break
            num_new, last_end = num_new + 1, end
            pattern = patterns[index]
            start = end - len(pattern.text)
            if pattern.repeats and not self._repeats_enough(start, pattern.repeats):
                continue
            raw_start, raw_end = reading.span(start, end)
            if pattern.is_phrase:
                self.phrases.append(Phrase(start, end, pattern, raw_start, raw_end))
            elif pattern.rule is not None:
                new.append(
                    Found(
                        raw_end, self._number, self._num_found + len(new), raw_start, start, end, pattern.rule
                    )
                )
        self.done = limit
        self._num_found += len(new)
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

    __slots__ = ("_detect", "_num_found", "_number", "_rules_of", "done", "is_behind", "reading")

    def __init__(self, detect: Detector, rules: Iterable[Rule], reading: Reading, number: int) -> None:
        self._detect = detect
        self._rules_of: dict[str, list[Rule]] = {}
        for rule in rules:
            self._rules_of.setdefault(rule.pii, []).append(rule)
        self._number = number
        self._num_found = 0
        self.reading = reading
        self.done = 0
        self.is_behind = False

    @property
    def settled(self) -> int:
        return self.done

    @property
    def keep_from(self) -> int:
        return max(0, self.done - LOOK_BACK)

    def find(self, is_last: bool) -> list[Found]:
        reading = self.reading
        at = reading.at
        matches, decided = self._detect(reading.window, self.done - at, is_last)
        self.done = at + decided
        self.is_behind = decided + (0 if is_last else LOOK_AHEAD) < len(reading.window)
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
