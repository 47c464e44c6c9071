"""What is found becomes hits: which matches stand, and in which order they have their turn.

A match stands unless a phrase contains it. Matches that stand are taken in order of their raw end, once
nothing can turn up any more that ends before or with them. The first that blocks ends the text: what ends up
to where it ends still counts, the rest is as if it were not there. So the result says nothing about how the
text arrived, and is the same for a stream and for a whole text.

Not here: finding matches (`tracks.py`, `keyword_stream.py`, `pii_stream.py`), and rewriting (`spans.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from filters.patterns import Pattern
from filters.rules import Rule


class Found(NamedTuple):
    """A match of a keyword or a detector that a phrase may excuse. Sorts in the order of decision."""

    raw_end: int
    track: int
    number: int  # orders the matches of one track
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
    track: int = 0


class Verdicts:
    """Matches that stand and wait for their turn. `block`: the first that blocks; then `cut` is where the
    text ends: the earliest start of those that block there.
    """

    __slots__ = ("block", "cut", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Found] = []
        self.block: Found | None = None
        self.cut = 0

    def take(self, found_to: int) -> list[Found]:
        """Those whose turn has come, in order. All that end up to `found_to` are known."""
        waiting = self.waiting
        if len(waiting) > 1:
            waiting.sort()
        num_taken = 0
        for found in waiting:
            if found.raw_end > found_to or (self.block is not None and found.raw_end > self.block.raw_end):
                break
            num_taken += 1
            if found.rule.blocks:
                self.cut = found.raw_start if self.block is None else min(self.cut, found.raw_start)
                self.block = self.block or found
        taken = waiting[:num_taken]
        del waiting[:num_taken]
        return taken


class StreamTrack(Protocol):
    """Finds matches in a stream. All offsets are raw.

    `found_to`: every match that ends up to here was found. `blocks_from`: no match that blocks and was not
    found ends before this.
    `live_from`: where the earliest match begins that may come and would change what leaves;
    `live_from_closed` counts rules that fail closed only. Both are the length of the text if there is none.
    """

    @property
    def found_to(self) -> int: ...
    @property
    def blocks_from(self) -> int: ...
    @property
    def live_from(self) -> int: ...
    @property
    def live_from_closed(self) -> int: ...
    def finish(self) -> None:
        """Finds what there is if the text ends here. It may go on nevertheless."""


class PhraseTrack(StreamTrack, Protocol):
    """A track that finds phrases too."""

    @property
    def number(self) -> int: ...
    @property
    def has_phrases(self) -> bool: ...

    def phrase_start(self, rule: Rule) -> tuple[int, int] | None:
        """Where the earliest phrase began that is under way and may excuse the rule: folded, raw."""


class Settling:
    """The matches of one stream, from when they are found to when they are taken.

    `readings`: for each track, which folding its folded offsets are of.
    `open`: a phrase may excuse them yet. `unwritten`: they stand and rewrite, but a block that ends before
    them may turn up. `phrases`: those that were found and may excuse a match that is not found yet.
    `written`: what is certain to be rewritten, for the owner to take.
    """

    __slots__ = ("_readings", "open", "phrase_tracks", "phrases", "unwritten", "verdicts", "written")

    def __init__(self, readings: Sequence[int]) -> None:
        self._readings = readings
        self.phrase_tracks: Sequence[PhraseTrack] = ()
        self.open: list[Found] = []
        self.unwritten: list[Found] = []
        self.written: list[Found] = []
        self.phrases: list[Phrase] = []
        self.verdicts = Verdicts()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits."""
        return not (self.open or self.verdicts.waiting)

    @property
    def is_empty(self) -> bool:
        """Whether `settle` would do nothing."""
        return not (self.open or self.phrases or self.verdicts.waiting)

    def settle(self, tracks: Sequence[StreamTrack]) -> list[Found]:
        """The matches whose turn has come, with all that the tracks have found."""
        found_to = min([track.found_to for track in tracks])
        if self.open:
            self._stand()
        if self.phrases:
            self.phrases = [phrase for phrase in self.phrases if phrase.raw_end > found_to]
        verdicts = self.verdicts
        if not verdicts.waiting:
            return []
        if self.open:
            found_to = min([found_to, *(found.raw_end - 1 for found in self.open)])
        taken = verdicts.take(found_to)
        if self.unwritten:
            self._write(tracks)
        return taken

    def break_off(self) -> list[Found]:
        """All matches that stand, in order, up to a block; what is open stays undecided."""
        taken = self.verdicts.take(max([found.raw_end for found in self.verdicts.waiting], default=0))
        block = self.verdicts.block
        self.written += [found for found in self.unwritten if block is None or found.raw_end <= block.raw_end]
        self.unwritten = []
        return taken

    def border(self, border: int, closed_only: bool = False) -> int:
        """Where the earliest match begins that is found but not certain; `border` if none is before it."""
        starts = [found.raw_start for found in self.open if found.rule.holds(closed_only)]
        if not closed_only:
            starts += [found.raw_start for found in self.unwritten]
        starts += [found.raw_start for found in self.verdicts.waiting if found.rule.blocks]
        return min([border, *starts])

    def _stand(self) -> None:
        still_open: list[Found] = []
        starts: dict[str, list[tuple[int, int, int]]] = {}  # asked for once a rule: it costs a walk each time
        has_phrases = bool(self.phrase_tracks)
        for found in self.open:
            if self.phrases and self._is_excused(found):
                continue
            rule = found.rule
            if has_phrases:
                if rule.id not in starts:
                    starts[rule.id] = list(self._phrase_starts(rule))
                if self._may_be_excused(found, starts[rule.id]):
                    still_open.append(found)
                    continue
            self.verdicts.waiting.append(found)
            if found.rule.rewrites:
                self.unwritten.append(found)
        self.open = still_open

    def _is_excused(self, found: Found) -> bool:
        for phrase in self.phrases:
            if self._readings[phrase.track] == self._readings[found.track]:
                is_inside = phrase.start <= found.start and found.end <= phrase.end
            else:
                is_inside = phrase.raw_start <= found.raw_start and found.raw_end <= phrase.raw_end
            if is_inside and phrase.pattern.excuses(found.rule):
                return True
        return False

    def _phrase_starts(self, rule: Rule) -> Iterator[tuple[int, int, int]]:
        """Where the earliest phrase under way began that may excuse the rule: for each folding (its number,
        folded, raw).
        """
        for track in self.phrase_tracks:
            start = track.phrase_start(rule)
            if start is not None:
                yield self._readings[track.number], *start

    def _may_be_excused(self, found: Found, starts: list[tuple[int, int, int]]) -> bool:
        reading = self._readings[found.track]
        return any(
            folded <= found.start if number == reading else raw <= found.raw_start
            for number, folded, raw in starts
        )

    def _write(self, tracks: Sequence[StreamTrack]) -> None:
        """Passes on what no block can precede any more. With a block, what ends after it is dropped."""
        verdicts = self.verdicts
        if verdicts.block is not None:
            certain_to = verdicts.block.raw_end
        else:
            certain_to = min([track.blocks_from for track in tracks])
            if not self.is_idle:
                ends = [found.raw_end for found in self.open if found.rule.blocks]
                ends += [found.raw_end for found in verdicts.waiting if found.rule.blocks]
                certain_to = min([certain_to, *ends])
        self.written += [found for found in self.unwritten if found.raw_end <= certain_to]
        is_over = verdicts.block is not None
        self.unwritten = [] if is_over else [each for each in self.unwritten if each.raw_end > certain_to]
