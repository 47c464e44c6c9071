"""Where in the raw text a folded character came from.

A raw character may fold to nothing or to several characters, so the two counts drift apart. What is kept is
only where they do: a list of anchors, each valid from its folded offset to the next one. Between irregular
characters the map is a straight line, so regular text costs nothing here.

Not here: what folds to what (`folding.py`).
"""

from __future__ import annotations

from bisect import bisect_right


class Offsets:
    """Folded offset -> raw offset. Fed with the irregular characters, in order."""

    __slots__ = ("_from", "_raw", "_slope")

    def __init__(self) -> None:
        # From this folded offset on, raw = _raw + _slope * (folded - _from). The last slope is always 1.
        self._from = [0]
        self._raw = [0]
        self._slope = [1]

    def folded_at(self, raw: int) -> int:
        """How many folded characters the first `raw` ones gave; not before the last irregular one."""
        return self._from[-1] + raw - self._raw[-1]

    def add(self, raw: int, num_folded: int) -> None:
        """The raw character at this offset folds to `num_folded` (not 1) characters."""
        folded = self.folded_at(raw)
        if num_folded:
            self._anchor(folded, raw, 0)
        self._anchor(folded + num_folded, raw + 1, 1)

    def skip(self, raw: int, num: int) -> None:
        """The `num` raw characters from this offset on fold to nothing."""
        self._anchor(self.folded_at(raw), raw + num, 1)

    def raw_of(self, folded: int) -> int:
        """The offset of the raw character that gave this folded one."""
        if len(self._from) == 1:
            return self._raw[0] + folded - self._from[0]
        i = bisect_right(self._from, folded) - 1
        return self._raw[i] + self._slope[i] * (folded - self._from[i])

    def span(self, folded_start: int, folded_end: int) -> tuple[int, int]:
        """The raw characters [start, end) that gave a non-empty folded span."""
        return self.raw_of(folded_start), self.raw_of(folded_end - 1) + 1

    def forget_before(self, folded: int) -> None:
        """Offsets below this one will not be asked for."""
        i = bisect_right(self._from, folded) - 1
        if i > 0:
            del self._from[:i], self._raw[:i], self._slope[:i]

    def forget_between(self, first: int, last: int) -> None:
        """Offsets between these two will not be asked for."""
        if len(self._from) > 2:
            i, j = bisect_right(self._from, first), bisect_right(self._from, last) - 1
            if i < j:
                del self._from[i:j], self._raw[i:j], self._slope[i:j]

    @property
    def num_anchors(self) -> int:
        """How much is kept."""
        return len(self._from)

    @property
    def is_straight(self) -> bool:
        """Whether no irregular character lies in the part that is still known."""
        return len(self._from) == 1

    def _anchor(self, folded: int, raw: int, slope: int) -> None:
        if self._from[-1] == folded:  # a run of characters that fold to nothing is one anchor
            self._raw[-1], self._slope[-1] = raw, slope
            return
        self._from.append(folded)
        self._raw.append(raw)
        self._slope.append(slope)
