"""A text while it is read slice by slice under one folding: the folded part that still matters, and the way
back from it to raw offsets.

Folded offsets count from the start of the text.

Not here: what folds to what, and what is looked for.
"""

from __future__ import annotations

import re
from typing import Final

from filters.offsets import Offsets
from filters.rule_folding import Folding, Uneven

_RUNS: Final = re.compile(r"(.)\1+", re.DOTALL)
# Characters that fold to several cost memory. In a longer run only its ends do: it may be all of the text.
_LONG_RUN: Final = 64


class Reading:
    """`window` is the folded text from `at` on, up to `end`. So far text[:raw_end] was read.

    `max_piece_chars`: what can be read at once in 2 ms, whatever it is.
    """

    max_piece_chars = 2_048

    __slots__ = ("_folding", "_offsets", "at", "end", "is_last", "raw_end", "window")

    def __init__(self, folding: Folding) -> None:
        self._folding = folding
        self._offsets = Offsets()
        self.window = ""
        self.at = 0
        self.end = 0
        self.raw_end = 0
        self.is_last = False  # there is no more to read

    def read(self, piece: str, is_last: bool = False) -> int:
        """The next characters of the text. Returns how many were uneven."""
        folded, uneven = self._folding.read(piece)
        return self.take(folded, uneven, len(piece), is_last)

    def take(self, folded: str, uneven: Uneven, num_raw: int, is_last: bool = False) -> int:
        """The same for characters that were folded already."""
        start = self.raw_end
        self.raw_end, self.is_last = start + num_raw, is_last
        for offset, num_folded in uneven:
            self._offsets.add(start + offset, num_folded)
        return len(uneven) + self._extend(folded)

    def pass_over(self, folded: str, num_chars: int) -> None:
        """So many characters that fold to one each; `folded` is all of them, or the last that matter."""
        self.raw_end += num_chars
        self.end += num_chars
        if len(folded) < num_chars:
            self.window = folded
            self.at = self.end - len(folded)
            self._offsets.forget_before(self.at)
        else:
            self.window += folded

    def raw_of(self, folded: int) -> int:
        """The offset of the raw character that gave this folded one; for `end` the one after all read."""
        return self._offsets.raw_of(folded)

    def span(self, folded_start: int, folded_end: int) -> tuple[int, int]:
        """The raw characters [start, end) that gave a non-empty folded span."""
        return self._offsets.span(folded_start, folded_end)

    def run_length(self, folded: int) -> int:
        """How often the character stood in a row; only where repeats are folded."""
        return 1

    def forget_before(self, folded: int) -> None:
        """What begins before this offset will not be asked for."""
        if folded > self.at:
            self.window, self.at = self.window[folded - self.at :], folded
            self._offsets.forget_before(folded)

    def _extend(self, folded: str) -> int:
        """Appends to the window; returns how many characters of a run went into one."""
        self.window += folded
        self.end += len(folded)
        return 0


class RunReading(Reading):
    """A reading in which a run of equal characters counts as one. The last run may go on with the next slice.

    Two steps back: from a run to the first of its characters, and from there to the raw text.
    """

    max_piece_chars = 1_024

    __slots__ = ("_last", "_num_chars", "_runs")

    def __init__(self, folding: Folding) -> None:
        super().__init__(folding)
        self._runs = Offsets()
        self._num_chars = 0
        self._last = ""

    def raw_of(self, folded: int) -> int:
        return self._offsets.raw_of(self._runs.raw_of(folded))

    def span(self, folded_start: int, folded_end: int) -> tuple[int, int]:
        return self._offsets.span(self._runs.raw_of(folded_start), self._runs.raw_of(folded_end))

    def run_length(self, folded: int) -> int:
        return self._runs.raw_of(folded + 1) - self._runs.raw_of(folded)

    def forget_before(self, folded: int) -> None:
        if folded > self.at:
            self.window, self.at = self.window[folded - self.at :], folded
            self._offsets.forget_before(self._runs.raw_of(folded))
            self._runs.forget_before(folded)

    def _extend(self, folded: str) -> int:
        joined = self._last + folded
        base = self._num_chars - len(self._last)
        parts = []
        at = 0
        for run in _RUNS.finditer(joined):
            start, end = run.span()
            parts.append(joined[at : start + 1])
            at = end
            self._runs.skip(base + start + 1, end - start - 1)
            if end - start > _LONG_RUN:
                self._offsets.forget_between(base + start, base + end - 1)
        parts.append(joined[at:])
        self._num_chars += len(folded)
        collapsed = "".join(parts)
        super()._extend(collapsed[len(self._last) :])
        self._last = joined[-1:]
        return len(joined) - len(collapsed)


def reading_of(folding: Folding) -> Reading:
    return RunReading(folding) if folding.repeats else Reading(folding)
