"""The one emitter: rewrites a text once, over the union of overlapping spans.

Spans that overlap are one: its first span (leftmost, then longest, then redact before mask, then by its rank)
says how all of it is rewritten. Adjacent spans do not overlap. That a span's fate is settled by what starts
before it is what makes incremental output possible: text up to a border can leave as soon as every span that
starts before the border is known.

Not here: finding spans, and deciding the border.
"""

from __future__ import annotations

from filters.rules import Rule

Span = tuple[int, int, Rule, tuple[int, ...]]


class Emitter:
    """Spans in, text out. Raw offsets from the start of the text; `released` only grows."""

    __slots__ = ("_end", "_rule", "_spans", "released")

    def __init__(self, released: int = 0) -> None:
        self.released = released
        self._spans: list[Span] = []
        self._end = 0  # of the union that is under way
        self._rule: Rule | None = None  # how that union is rewritten

    def add(self, start: int, end: int, rule: Rule, rank: tuple[int, ...] = ()) -> None:
        """text[start:end] is to be rewritten by a mask or redact rule. What was released already stays."""
        self._spans.append((start, end, rule, rank))

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to rewrite in what has not been released."""
        return not self._spans and self._end <= self.released

    def release(self, text: str, border: int, base: int | None = None) -> str:
        """The rewritten text from `released` to `border`. `text` begins at `base`, mostly at `released`."""
        if base is None:
            base = self.released
        if self.is_idle:
            out = text[self.released - base : border - base]
            self.released = border
            return out
        self._spans.sort(key=_order)
        pieces: list[str] = []
        num_started = 0
        for start, end, rule, _ in self._spans:
            if start >= border:
                break
            num_started += 1
            if start < self._end:
                self._end = max(self._end, end)
            elif end > self.released:
                self._advance(text, base, start, pieces)
                self._begin(end, rule, pieces)
        del self._spans[:num_started]
        self._advance(text, base, border, pieces)
        return "".join(pieces)

    def _advance(self, text: str, base: int, to: int, pieces: list[str]) -> None:
        """Writes up to `to`: the rest of the union under way, then unchanged text."""
        covered = min(self._end, to) - self.released
        if covered > 0:
            if self._rule is not None and self._rule.action == "mask":
                pieces.append(self._rule.replacement * covered)
            self.released += covered
        if to > self.released:
            pieces.append(text[self.released - base : to - base])
            self.released = to

    def _begin(self, end: int, rule: Rule, pieces: list[str]) -> None:
        self._end, self._rule = end, rule
        if rule.action == "redact":
            pieces.append(rule.replacement)


def _order(span: Span) -> tuple[int, int, bool, tuple[int, ...]]:
    start, end, rule, rank = span
    return start, -end, rule.action != "redact", rank
