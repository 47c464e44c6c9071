"""The whole-text scan, for input: all hits on raw offsets, the verdict, and the rewritten text.

The text is read piece by piece, so that a caller with an event loop can let others run in between: matching
holds the GIL. Memory is bounded by the text and by `MAX_HITS`, whatever the text is.

Microseconds for 1,000 characters, folding included: Chinese 13 with 200 rules (`prefilter.py`; 40 where it
does not help), 60 with 5,000 and 90 with 50,000; English 10 to 35. A hit costs 2 to 3 more, a text at least
2.

Not here: joining a prompt's parts into the text that is scanned, and streams (`stream.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Final

from filters.folding import fold_and_tell
from filters.hit import Hit
from filters.patterns import Patterns
from filters.pii import DETECTORS
from filters.reading import Reading, reading_of
from filters.rules import REWRITES
from filters.spans import Emitter
from filters.tracks import Found, KeywordTrack, PiiTrack, Track

SLICE_CHARS: Final = 16_384  # about 1 ms
PIECE_CHARS: Final = 2_048  # what is read at once: below 5 ms even where every character needs attention
MAX_HITS: Final = 1_000
_SHORT_CHARS: Final = 256  # below this a clean text is found out faster than a scan is set up
_BUSY: Final = 300  # matches and uneven characters in a piece after which others must run


@dataclass(frozen=True, slots=True)
class ScanResult:
    """`hits` are in order of their end, at most `MAX_HITS`; `num_hits` counts all.

    `blocked_by` is the id of the rule that blocks. `text` is the rewritten text; None if it is blocked. A
    scan ends with the block that ends first.
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
    if len(text) <= _SHORT_CHARS and rules.prefilter is None and _is_clean(text, rules):
        return ScanResult((), 0, None, text)
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
    """A generator that pauses after each slice, oftener where there is much to do; returns a `ScanResult`.

    The result does not depend on `slice_chars`. No step takes over 5 ms.
    """
    if slice_chars < 1:
        raise ValueError(f"slice_chars is {slice_chars}; it must be at least 1")
    if not len(rules) or (yield from _is_seen_to_be_clean(text, rules, slice_chars)):
        return ScanResult((), 0, None, text)
    scanner = _Scanner(text, rules)
    pause_at = slice_chars
    for start, end in _pieces(text, slice_chars):
        scanner.read(start, end)
        while scanner.is_behind:
            scanner.step()
            if scanner.blocked_by is not None:
                return scanner.result()
            if scanner.is_behind or scanner.num_done > _BUSY or end >= pause_at or end == len(text):
                scanner.num_done = 0
                pause_at = end + slice_chars
                yield
    return scanner.result()


def _pieces(text: str, slice_chars: int) -> Iterator[tuple[int, int]]:
    piece_chars = min(slice_chars, PIECE_CHARS)
    return ((start, min(start + piece_chars, len(text))) for start in range(0, len(text), piece_chars))


def _is_seen_to_be_clean(text: str, rules: Patterns, slice_chars: int) -> Generator[None, None, bool]:
    """Whether the prefilter finds that nothing is in the text. Pauses like the scan."""
    prefilter = rules.prefilter
    if prefilter is None or (len(text) > _SHORT_CHARS and text.isascii()):
        return False
    pause_at = slice_chars
    for start, end in _pieces(text, slice_chars):
        if not prefilter.is_clean(text, start, end):
            return False
        if end >= pause_at or end == len(text):
            pause_at = end + slice_chars
            yield
    return True


def _is_clean(text: str, rules: Patterns) -> bool:
    """Whether nothing is in a short text, found out without the bookkeeping of a scan: it saves 5 us of 7."""
    if rules.others:
        return False
    folded = fold_and_tell(text)[0]
    if any(True for _ in rules.finder.find(folded)):
        return False
    answers = (detect(folded, 0, True) for detect in rules.detectors)
    return all(not matches and decided == len(folded) for matches, decided in answers)


class _Scanner:
    """A scan under way.

    Matches of all tracks are decided strictly in order of their raw end, so that the result is the same for
    every slice size.
    """

    def __init__(self, text: str, rules: Patterns) -> None:
        self._text = text
        self._keywords = [
            KeywordTrack(patterns, reading_of(patterns.folding), number)
            for number, patterns in enumerate(rules.by_folding)
        ]
        self._readings = [track.reading for track in self._keywords]
        self._tracks: list[Track] = [
            *self._keywords,
            *_pii_tracks(rules, self._readings[0], len(self._keywords)),
        ]
        self._has_phrases = any(patterns.has_phrases for patterns in rules.by_folding)
        self._is_last = False
        self._undecided: list[Found] = []  # in order
        self._emitter: Emitter | None = None  # from the first span on that is to be rewritten
        self._pieces: list[str] = []
        self._hits: list[Hit] = []
        self._num_hits = 0
        self.is_behind = False  # there is more to do before reading on
        self.num_done = 0  # matches and uneven characters since the last pause
        self.blocked_by: str | None = None

    def read(self, start: int, end: int) -> None:
        """The slice text[start:end]; slices follow each other."""
        self._is_last = end == len(self._text)
        piece = self._text[start:end]
        for reading in self._readings:
            self.num_done += reading.read(piece, start)
        self.is_behind = True

    def step(self) -> None:
        """Finds and decides in what was read, a bounded number of matches."""
        for track in self._tracks:
            found = track.find(self._is_last)
            if found:
                self._undecided += found
                self.num_done += len(found)
        self.is_behind = any(track.is_behind for track in self._tracks)
        is_all = self._is_last and not self.is_behind
        if self._undecided:
            self._decide(is_all)
        if self.blocked_by is None and not (is_all and self._emitter is None):
            self._release(is_all)

    def result(self) -> ScanResult:
        text: str | None = self._text if self._emitter is None else "".join(self._pieces)
        if self.blocked_by is not None:
            text = None
        return ScanResult(tuple(self._hits), self._num_hits, self.blocked_by, text)

    def _decide(self, is_all: bool) -> None:
        """Takes matches in order until one waits for a phrase, or for a track that is not so far yet."""
        undecided = self._undecided
        if len(self._tracks) > 1:
            undecided.sort()
        num_decided = len(undecided)
        if not is_all:
            num_decided = self._num_ready()
        for found in undecided[:num_decided]:
            if not self._has_phrases or not self._is_excused(found):
                self._accept(found)
                if self.blocked_by is not None:
                    return
        del undecided[:num_decided]

    def _num_ready(self) -> int:
        """How many of the undecided matches cannot be preceded or excused any more."""
        found_to = min([track.reading.raw_of(track.done) for track in self._tracks])
        open_from = min([track.reading.raw_of(track.settled) for track in self._keywords])
        for index, found in enumerate(self._undecided):
            if found.raw_end > found_to or (self._has_phrases and found.raw_start >= open_from):
                return index
        return len(self._undecided)

    def _is_excused(self, found: Found) -> bool:
        reading = self._tracks[found.track].reading
        return any(
            track.excuses(found, track.reading is reading) for track in self._keywords if track.phrases
        )

    def _accept(self, found: Found) -> None:
        rule = found.rule
        self._num_hits += 1
        if len(self._hits) < MAX_HITS:
            self._hits.append(Hit(rule.id, rule.action, found.raw_start, found.raw_end, rule.shadow))
        if not rule.is_active:
            return
        if rule.action in REWRITES:
            if self._emitter is None:
                self._emitter = Emitter()
            self._emitter.add(found.raw_start, found.raw_end, rule)
        else:
            self.blocked_by = rule.id

    def _release(self, is_all: bool) -> None:
        """Rewrites what no later match can begin in, and forgets what was needed for it."""
        if is_all:
            border = len(self._text)
        else:
            borders = [track.reading.raw_of(track.settled) for track in self._tracks]
            border = min([*borders, *[found.raw_start for found in self._undecided]])
        emitter = self._emitter
        if emitter is not None and border > emitter.released:
            self._pieces.append(emitter.release(self._text[emitter.released : border], border))
        for reading in self._readings:
            reading.forget_before(min([t.keep_from for t in self._tracks if t.reading is reading]))
        found_to = min([track.reading.raw_of(track.done) for track in self._tracks])
        for track in self._keywords:
            if track.phrases:
                ends = [found.raw_end for found in self._undecided[:1]]
                track.forget_phrases_before(min([found_to, *ends]))


def _pii_tracks(rules: Patterns, reading: Reading, number: int) -> Iterator[PiiTrack]:
    for position, detect in enumerate(rules.detectors):
        asking = [rule for rule in rules.pii if DETECTORS[rule.pii] is detect]
        yield PiiTrack(detect, asking, reading, number + position)
