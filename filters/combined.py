"""The streaming filter for every kind of rule: keywords under several foldings, and personal data.

Keywords under the default folding go the way of `StreamFilter`. At the end of a piece the others read it too:
a track for the keywords of each further folding, and one for each detector; `settling.py` makes hits of what
they find, and text leaves from before the earliest place where a track or a match still waits. Pieces are so
short that no bound can be passed within one, so any chunking gives the same output.

With all classes of personal data and no further folding, a token of prose costs 1 us more than without them:
mostly nothing waits, no keyword ends, no detector must look. All else is bookkeeping, about ten times slower.

Not here: the quick loop and the steps of keywords (`stream_filter.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from filters.held_text import HeldText, HoldPolicy
from filters.keyword_stream import FoldedStream, RunStream
from filters.patterns import Patterns
from filters.pii_stream import MAX_RUN, PiiWindow, Tails
from filters.rule_folding import DEFAULT, Folding, PieceFolder, Uneven
from filters.settling import PhraseTrack
from filters.stream_filter import StreamFilter
from filters.walk import ARRIVED, LIVE, STATE, Node, Walk


class Folder(NamedTuple):
    """`read` folds a piece, for the keywords of some foldings (by number), and perhaps for personal data."""

    read: Callable[[str], tuple[str, Uneven]]
    numbers: tuple[int, ...]
    reads_pii: bool


class CombinedFilter(StreamFilter):
    """A `filters.text_filter.TextFilter` for any rules."""

    __slots__ = ("_folders", "_has_keywords", "_is_quiet", "_max_hold_chars", "_pii", "_quick_pii")

    def __init__(
        self, rules: Patterns, walk: Walk, folders: Sequence[Folder], tails: Tails | None, policy: HoldPolicy
    ) -> None:
        # Detectors read under the default folding, which is the first.
        num_foldings = len(rules.by_folding)
        super().__init__(rules, walk, policy, [*range(num_foldings), *(0 for _ in rules.detectors)])
        settling = self._settling
        streams = {
            number: (RunStream if folded.folding.repeats else FoldedStream)(folded, number, settling)
            for number, folded in enumerate(rules.others, 1)
        }
        self._pii = PiiWindow(rules, tails, num_foldings, settling) if tails else None
        keywords: list[PhraseTrack] = [self._steps, *streams.values()]
        self._tracks = [*keywords, *(self._pii.streams if self._pii else ())]
        settling.phrase_tracks = [track for track in keywords if track.has_phrases]
        self._folders = [
            (folder.read, [streams[number] for number in folder.numbers], folder.reads_pii)
            for folder in folders
        ]
        self._max_hold_chars = policy.max_hold_chars
        self._has_keywords = bool(rules.patterns)
        self._is_quiet = True  # nothing waits, and what is held is straight
        # For ordinary pieces, where there is nothing else to do.
        is_quick = not rules.others and max(rules.longest, MAX_RUN) <= policy.max_hold_chars
        self._quick_pii = self._pii if is_quick else None

    def feed(self, text: str) -> str:
        """More text; returns what may leave now."""
        if len(text) + self.held <= self._max_hold_chars:
            if self._has_keywords:
                return StreamFilter.feed(self, text)
            return self._refuse() if self._is_closed else self._end_chunk(self._node, text)
        if self._is_closed:
            return self._refuse()
        parts = []
        at = 0
        while at < len(text) and not self.blocked:
            end = at + max(1, self._max_hold_chars - self.held)
            piece = text[at:end]
            has_keywords = self._has_keywords
            parts.append(
                StreamFilter.feed(self, piece) if has_keywords else self._end_chunk(self._node, piece)
            )
            at = end
        return "".join(parts)

    _border = HeldText._border  # of all tracks

    def _catch_up(self) -> None:
        end = self.released + len(self._text)
        self._steps.move_to(self._node[STATE], end)
        if self._pii is not None:
            self._pii.catch_up(end)
        self._is_quiet = False

    def _decide(self) -> None:
        """Not before the others have read the piece."""
        self._is_quiet = False

    def _resting_node(self) -> Node:
        """What waits does not matter to the loop here: `_read_exactly` comes after it."""
        self._ends_plainly = False
        self._steps.forget()
        return self._walk.nodes[self._steps.state]

    def _end_chunk(self, node: Node, text: str) -> str:
        """A piece in which no bound can be passed but with its only character."""
        live: int = node[LIVE]
        pii = self._quick_pii
        if live >= 0 and self._is_quiet and pii is not None:
            held = pii.pass_over(text)
            if held >= 0:
                if live > held:
                    held = live
                self._node = node
                text = self._text + text
                cut = len(text) - held
                self._text = text[cut:]
                self.held = held
                self.released += cut
                if held > self.peak_held:
                    self.peak_held = held
                return text[:cut]
        return self._read_exactly(node, text)

    def _read_exactly(self, node: Node, text: str) -> str:
        """The piece under all foldings, with all that it may decide."""
        steps, start = self._steps, self.released + self.held
        end = start + len(text)
        live: int = node[LIVE]
        is_regular = live >= 0 and self._is_quiet
        if is_regular:
            self._node = node
            border = end - live
        else:
            steps.move_to(node[STATE], end)
            if live == ARRIVED:
                steps.arrive()
            self._node = self._resting_node()
            border = steps.live_from
        border = min(border, self._read_others(text, start, end))
        self._text += text
        if not self._settling.is_empty or border < self._floor or end - border > self._max_hold_chars:
            return self._decide_all(end)
        out = self._release(border)
        self._is_quiet = is_regular or (self._emitter is None and steps.offsets.is_straight)
        return out

    def _read_others(self, text: str, start: int, end: int) -> int:
        """What is not the default folding's keywords; returns from where on it is held."""
        border = end
        pii = self._pii
        if pii is not None:
            held = pii.pass_over(text)
            if held >= 0:
                border, pii = end - held, None
        for read, streams, reads_pii in self._folders:
            if not streams and pii is None:
                continue
            folded, uneven = read(text)
            if reads_pii and pii is not None:
                border = pii.read(folded, uneven, start, end)
            if streams:
                origins = _origins(start, len(text), uneven) if uneven else range(start, end)
                for stream in streams:
                    border = min(border, stream.read(folded, origins, end))
        return border

    def _decide_all(self, end: int) -> str:
        """Decides what can be decided, now that all have read up to `end`."""
        self._catch_up()
        self._settle()
        if self.blocked:
            return self._release(self._floor)
        border = self._border()
        if end - border > self._max_hold_chars:
            self._force()
            border = self._floor
        out = self._release(border)
        self._is_quiet = (
            border > self._floor  # else what is under way may have been forced
            and self._settling.is_empty
            and self._emitter is None
            and self._steps.offsets.is_straight
        )
        return out


def folders_of(rules: Patterns) -> list[Folder]:
    """What the filters of these rules read with, besides the walk. Foldings that differ in repeats only read
    alike.
    """
    numbers_of: dict[Folding, list[int]] = {DEFAULT: []} if rules.pii else {}
    for number, folded in enumerate(rules.others, 1):
        numbers_of.setdefault(replace(folded.folding, repeats=False), []).append(number)
    return [
        Folder(PieceFolder(folding).read, tuple(numbers), bool(rules.pii) and folding == DEFAULT)
        for folding, numbers in numbers_of.items()
    ]


def _origins(start: int, num_raw: int, uneven: Uneven) -> Sequence[int]:
    """The raw offset of each folded character of a piece that begins at `start`."""
    origins: list[int] = []
    at = start
    for offset, num_folded in uneven:
        origins += range(at, start + offset)
        origins += [start + offset] * num_folded
        at = start + offset + 1
    origins += range(at, start + num_raw)
    return origins
