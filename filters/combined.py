"""The streaming filter for every kind of rule: keywords under several foldings, and personal data.

A track for the keywords of each folding and one for each detector read the text side by side, a piece at a
time; `settling.py` makes hits of what they find, and text leaves from before the earliest place where a track
or a match still waits. Pieces are so short that no bound can be passed within one, so any chunking gives the
same output.

Not here: keywords under the default folding alone, which have a quicker loop (`stream.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from filters.held_text import HeldText, HoldPolicy
from filters.keyword_stream import FoldedStream, RunStream
from filters.patterns import Patterns
from filters.pii_stream import PiiWindow
from filters.rule_folding import DEFAULT, Folding, PieceFolder, Uneven
from filters.settling import Settling


class Folder(NamedTuple):
    """`read` folds a piece, for the keywords of some foldings (by number), and perhaps for personal data."""

    read: Callable[[str], tuple[str, Uneven]]
    numbers: tuple[int, ...]
    reads_pii: bool


class CombinedFilter(HeldText):
    """A `pipeline.ports.TextFilter` for any rules."""

    __slots__ = ("_folders", "_max_hold_chars", "_pii")

    def __init__(self, patterns: Patterns, folders: Sequence[Folder], policy: HoldPolicy) -> None:
        # Detectors read under the default folding, which is the first.
        num_foldings = len(patterns.by_folding)
        settling = Settling([*range(num_foldings), *(0 for _ in patterns.detectors)])
        streams = {
            number: (RunStream if folded.folding.repeats else FoldedStream)(folded, number, settling)
            for number, folded in enumerate(patterns.by_folding)
            if folded.patterns
        }
        settling.phrase_tracks = [stream for stream in streams.values() if stream.has_phrases]
        self._pii = PiiWindow(patterns, num_foldings, settling) if patterns.pii else None
        self._folders = [
            (folder.read, [streams[number] for number in folder.numbers], folder.reads_pii)
            for folder in folders
        ]
        self._max_hold_chars = policy.max_hold_chars
        super().__init__(
            policy,
            patterns.is_active,
            [*streams.values(), *(self._pii.streams if self._pii else ())],
            settling,
        )

    def feed(self, text: str) -> str:
        """More text; returns what may leave now."""
        if self._is_closed:
            return self._refuse()
        if len(text) + self.held <= self._max_hold_chars:
            return self._read(text)
        parts = []
        at = 0
        while at < len(text) and not self.blocked:
            end = at + max(1, self._max_hold_chars - self.held)
            parts.append(self._read(text[at:end]))
            at = end
        return "".join(parts)

    def _read(self, text: str) -> str:
        """A piece in which no bound can be passed but with its only character."""
        start = self.released + self.held
        border = end = start + len(text)
        for read, streams, reads_pii in self._folders:
            folded, uneven = read(text)
            if reads_pii and self._pii is not None:
                border = self._pii.read(folded, uneven, len(text))
            if streams:
                origins = _origins(start, len(text), uneven) if uneven else range(start, end)
                for stream in streams:
                    live_from = stream.read(folded, origins, end)
                    if live_from < border:
                        border = live_from
        text = self._text + text
        if not self._settling.is_empty or self._emitter is not None or border < self._floor:
            return self._read_exactly(text)
        held = end - border
        if held > self._max_hold_chars:
            return self._read_exactly(text)
        cut = len(text) - held
        self._text = text[cut:]
        self.held = held
        self.released = border
        if held > self.peak_held:
            self.peak_held = held
        return text[:cut]

    def _read_exactly(self, text: str) -> str:
        """The held text and a piece that was read, with all that it may decide."""
        self._text = text
        self._settle()
        if self.blocked:
            return self._release(self._floor)
        border = self._border()
        if self._num_read - border > self._max_hold_chars:
            self._force()
            border = self._floor
        return self._release(border)


def folders_of(rules: Patterns) -> list[Folder]:
    """What the filters of these rules read with. Foldings that differ in repeats only read alike."""
    numbers_of: dict[Folding, list[int]] = {DEFAULT: []} if rules.pii else {}
    for number, folded in enumerate(rules.by_folding):
        if folded.patterns:
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
