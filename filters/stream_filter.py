"""The streaming filter for keywords: a character leaves as soon as it can no longer be part of a match.

`StreamFilter.feed` runs once per token. Its loop follows edges and fail links and does nothing else; every
character that may end a match, folds to nothing or to several characters, or is read while something is
undecided goes through `_exactly`, which is the whole truth and about ten times slower. Text comes out by one
rule: the held part begins where the longest suffix begins that is a proper prefix of an active keyword, or
where a match begins that is not certain yet, whichever is earlier. In one case that is more than must be: a
whole word at the end of a phrase that excuses it waits for the character after it all the same.

Everything is decided at a character, never at the end of a chunk, so any chunking gives the same output, and
it is that of `scan.py`: the same hits in the same order (`settling.py`).

Not here: rules other than keywords under the default folding (`combined.py`), the ends and bounds of a stream
(`held_text.py`), time (`expire` is called by the owner), and what a blocked stream tells its client.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import length_hint

from filters.held_text import HeldText, HoldPolicy
from filters.keyword_stream import KeywordStream
from filters.offsets import Offsets
from filters.patterns import Patterns
from filters.settling import Settling
from filters.walk import ARRIVED, FAIL, LIVE, STATE, Node, Walk


class KeywordSteps(KeywordStream):
    """The exact steps of the quick loop: folded offsets are counted only where they differ from raw ones."""

    __slots__ = ("offsets",)

    def __init__(self, rules: Patterns, settling: Settling) -> None:
        super().__init__(rules, 0, settling)
        self.offsets = Offsets()

    def raw_of(self, folded: int) -> int:
        return self.offsets.raw_of(folded)

    def span(self, folded_start: int, folded_end: int) -> tuple[int, int]:
        return self.offsets.span(folded_start, folded_end)

    @property
    def live_from(self) -> int:
        return self.raw_before(self.automaton.live[self.state])

    @property
    def live_from_closed(self) -> int:
        return self.raw_before(self._patterns.live_closed[self.state])

    def move_to(self, state: int, num_raw: int) -> None:
        """Where regular steps have led."""
        if num_raw != self.num_raw:
            self.is_settled = False
        self.state = state
        self.num_raw = num_raw
        self.num_folded = self.offsets.folded_at(num_raw)

    def take(self, folded: str) -> None:
        """The next raw character, and what it folds to."""
        if len(folded) != 1:
            self.offsets.add(self.num_raw, len(folded))
        self.num_raw += 1
        for char in folded:
            self.step(char)

    def forget(self) -> int:
        """Forgets the offsets of what is decided; returns the folded offset where the rest begins."""
        under_way = self.num_folded - self.automaton.depth[self.state]
        self.offsets.forget_before(under_way)
        return under_way


class StreamFilter(HeldText):
    """Keywords under the default folding. A `filters.text_filter.TextFilter`.

    `readings`: for `Settling`, where there are more tracks.
    """

    __slots__ = ("_always_exact", "_ends_plainly", "_node", "_steps", "_walk")

    def __init__(
        self, rules: Patterns, walk: Walk, policy: HoldPolicy, readings: Sequence[int] = (0,)
    ) -> None:
        settling = Settling(readings)
        self._steps = KeywordSteps(rules, settling)
        if rules.has_phrases:
            settling.phrase_tracks = [self._steps]
        super().__init__(policy, rules.is_active, [self._steps], settling)
        self._walk = walk
        # With keywords that alone can pass the bound, every character is counted the exact way.
        self._always_exact = rules.longest > policy.max_hold_chars
        # Between chunks never a stop that nothing was done about.
        self._node = self._resting_node()

    def feed(self, text: str) -> str:
        """More text; returns what may leave now."""
        if self._is_closed:
            return self._refuse()
        walk = self._walk
        node = self._node
        irregular = walk.irregular
        last_root = walk.last_root
        chars = iter(text)
        for char in chars:
            if char in node:
                node = node[char]
            elif char in irregular:
                node = self._exactly(node, char, len(text) - length_hint(chars) - 1)
            else:
                fail = node[FAIL]
                while fail is not None:
                    node = fail
                    if char in node:
                        node = node[char]
                        break
                    fail = node[FAIL]
                else:  # at a root that has no edge for it, or where a closer look is needed
                    if node[STATE] > last_root or node[LIVE] < 0:
                        node = self._exactly(node, char, len(text) - length_hint(chars) - 1)
                    elif last_root:
                        node = walk.root_after(char)
        live: int = node[LIVE]
        if live < 0 or not self._ends_plainly:
            return self._end_chunk(node, text)
        self._node = node
        text = self._text + text
        cut = len(text) - live
        self._text = text[cut:]
        self.held = live
        self.released += cut
        if live > self.peak_held:
            self.peak_held = live
        return text[:cut]

    def expire(self) -> str:
        if self._is_closed or not self.held:
            return ""
        text = super().expire()
        self._node = self._resting_node()
        return text

    def pause(self) -> str:
        if self._is_closed or not self.held:
            return ""
        text = super().pause()
        self._node = self._resting_node()
        return text

    def _catch_up(self) -> None:
        self._steps.move_to(self._node[STATE], self.released + self.held)

    def _exactly(self, node: Node, char: str, offset: int) -> Node:
        """One character, `offset` into the chunk, with all that it may decide; returns the node after it."""
        if self.blocked:
            return node
        steps = self._steps
        steps.move_to(node[STATE], self.released + self.held + offset)
        if node[LIVE] == ARRIVED:
            steps.arrive()
        steps.take(self._walk.folds.get(char, char))
        self._decide()
        return self._resting_node()

    def _decide(self) -> None:
        """Acts on what a character has made certain."""
        self._settle()
        if not self.blocked and self._steps.num_raw - self._border() > self._policy.max_hold_chars:
            self._force()

    def _border(self, closed_only: bool = False) -> int:
        steps = self._steps
        border = steps.live_from_closed if closed_only else steps.live_from
        if not self._settling.is_idle:
            border = self._settling.border(border, closed_only)
        return max(border, self._floor)

    @property
    def _num_read(self) -> int:
        return self._steps.num_raw

    def _resting_node(self) -> Node:
        """Where to go on from: in the quick loop, if what is under way is ordinary.

        Every change that matters to the loop is followed by this.
        """
        steps = self._steps
        self._ends_plainly = self._emitter is None
        under_way = steps.forget()
        is_ordinary = (
            not self.blocked
            and self._settling.is_idle
            and steps.offsets.is_straight
            and self._floor <= steps.raw_of(under_way)  # nothing under way was forced
            and not self._always_exact
        )
        return self._walk.nodes[steps.state] if is_ordinary else self._walk.parked(steps.state)

    def _end_chunk(self, node: Node, text: str) -> str:
        """What may leave at the end of a chunk that was not plain."""
        self._text += text
        if not self.blocked:
            self._steps.move_to(node[STATE], self.released + len(self._text))
            if node[LIVE] == ARRIVED:
                self._steps.arrive()
                self._settle()
        out = self._release(self._floor if self.blocked else self._border())
        self._node = self._resting_node()
        return out
