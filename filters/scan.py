"""The whole-text scan, for input: all hits on raw offsets, the verdict, and the rewritten text.

The text is read piece by piece, so that a caller with an event loop can let others run in between: matching
holds the GIL. Every folding reads at its own pace, and it is always the turn of the track that is furthest
behind: a run of a million equal characters, which is one for a rule with `repeats`, keeps nothing waiting but
that track. So the matches that wait to be decided are as few as a window holds, and time is linear in the
text. Memory is bounded by the text and by `MAX_HITS`, whatever the text is.

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
from filters.reading import Reading, reading_of
from filters.settling import Found, Verdicts
from filters.spans import Emitter
from filters.tracks import KeywordTrack, PiiTrack, Track

SLICE_CHARS: Final = 16_384  # about 1 ms
PIECE_CHARS: Final = 2_048  # what is read at once: below 5 ms even where every character needs attention
MAX_HITS: Final = 1_000
_SHORT_CHARS: Final = 256  # below this a clean text is found out faster than a scan is set up
_BUSY: Final = 300  # matches and uneven characters in a piece after which others must run


@dataclass(frozen=True, slots=True)
class ScanResult:
    """`hits` are in order of their end, at most `MAX_HITS`; `num_hits` counts all.

    `blocked_by` is the id of the rule that blocks. `text` is the rewritten text; None if it is blocked. A
    scan ends with the block that ends first; what ends where it does still counts.
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
    if not text or not len(rules) or (yield from _is_seen_to_be_clean(text, rules, slice_chars)):
        return ScanResult((), 0, None, text)
    scanner = _Scanner(text, rules, min(slice_chars, PIECE_CHARS))
    while scanner.step():
        if scanner.must_pause or scanner.num_read >= slice_chars:
            scanner.num_done = scanner.num_read = 0
            yield
    if scanner.blocked_by is None and scanner.num_read:
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

    def __init__(self, text: str, rules: Patterns, piece_chars: int) -> None:
        self._text = text
        self._piece_chars = piece_chars
        self._keywords = [
            KeywordTrack(patterns, reading_of(patterns.folding), number)
            for number, patterns in enumerate(rules.by_folding)
        ]
        self._tracks: list[Track] = [
            *self._keywords,
            *_pii_tracks(rules, self._keywords[0].reading, len(self._keywords)),
        ]
        self._has_phrases = any(patterns.has_phrases for patterns in rules.by_folding)
        self._open: list[Found] = []  # a phrase may excuse them yet
        self._verdicts = Verdicts()
        self._emitter: Emitter | None = None  # from the first span on that is to be rewritten
        self._pieces: list[str] = []
        self._hits: list[Hit] = []
        self._num_hits = 0
        self.num_done = 0  # matches and uneven characters since the last pause
        self.num_read = 0  # characters since the last pause, under every folding
        self.must_pause = False
        self.blocked_by: str | None = None

    def step(self) -> bool:
        """Lets the track go on that is furthest behind, and decides; False once there is no more to do."""
        track = min(self._tracks, key=_open_from) if len(self._tracks) > 1 else self._tracks[0]
        if not track.is_behind:
            if track.reading.is_last:
                return False
            self._read(track.reading)
        found = track.find()
        self.num_done += len(found)
        self.must_pause = track.is_behind or self.num_done > _BUSY
        if found or self._has_phrases or self._verdicts.waiting:
            self._settle(found)
            self._decide()
        if self.blocked_by is not None:
            return False
        if self._emitter is not None:
            self._release(self._emitter)
        return True

    def _read(self, reading: Reading) -> None:
        """The next piece under one folding."""
        tracks = [track for track in self._tracks if track.reading is reading]
        reading.forget_before(min([track.keep_from for track in tracks]))
        start = reading.raw_end
        piece = self._text[start : start + min(self._piece_chars, reading.max_piece_chars)]
        self.num_done += reading.read(piece, start + len(piece) == len(self._text))
        self.num_read += len(piece)
        for track in tracks:
            track.is_behind = True

    def result(self) -> ScanResult:
        text: str | None = self._text if self._emitter is None else "".join(self._pieces)
        if self.blocked_by is not None:
            text = None
        return ScanResult(tuple(self._hits), self._num_hits, self.blocked_by, text)

    def _settle(self, found: list[Found]) -> None:
        """Takes the matches that no phrase excuses any more. What they rewrite does not depend on order: if a
        block turns up before them, there is no text.
        """
        if self._has_phrases:
            open_from = min([track.open_from for track in self._keywords])
            self._open += found
            found = [each for each in self._open if each.raw_start < open_from and not self._is_excused(each)]
            self._open = [each for each in self._open if each.raw_start >= open_from]
            kept_from = min(
                [track.found_to for track in self._tracks] + [each.raw_end for each in self._open]
            )
            for track in self._keywords:
                track.forget_phrases_before(kept_from)
        self._verdicts.waiting += found
        for each in found:
            if each.rule.rewrites:
                if self._emitter is None:
                    self._emitter = Emitter()
                self._emitter.add(each.raw_start, each.raw_end, each.rule, (each.track, each.number))

    def _decide(self) -> None:
        """Takes matches until one may be preceded by another that is not known yet, or open."""
        found_to = min([track.found_to for track in self._tracks])
        if self._open:
            found_to = min(found_to, min(self._open).raw_end - 1)
        for found in self._verdicts.take(found_to):
            self._accept(found)
        if self._verdicts.block is not None:
            self.blocked_by = self._verdicts.block.rule.id

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

    def _release(self, emitter: Emitter) -> None:
        """Rewrites what no later match can begin in."""
        border = min([track.open_from for track in self._tracks])
        if border > emitter.released:
            self._pieces.append(emitter.release(self._text, border, 0))


def _open_from(track: Track) -> int:
    return track.open_from


def _pii_tracks(rules: Patterns, reading: Reading, number: int) -> Iterator[PiiTrack]:
    for position, detect in enumerate(rules.detectors):
        yield PiiTrack(detect, rules.pii_of(detect), reading, number + position)
