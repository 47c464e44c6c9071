"""The streaming filter: a character leaves as soon as it can no longer be part of a match.

`StreamFilter.feed` runs once per token. Its loop follows edges and fail links and does nothing else; every
character that may end a match, folds to nothing or to several characters, or is read while something is
undecided goes through `_exactly`, which is the whole truth and about ten times slower. Text comes out by one
rule: the held part begins where the longest suffix begins that is a proper prefix of an active keyword, or
where a match begins that is not certain yet, whichever is earlier.

Everything is decided at a character, never at the end of a chunk, so any chunking gives the same output, and
it is that of `scan.py`: the same hits in the same order (`settling.py`).

Not here: rules other than keywords under the default folding (`combined.py`), the ends and bounds of a stream
(`held_text.py`), time (`expire` is called by the owner), what a blocked stream tells its client, and whole
texts (`scan.py`).
"""

from __future__ import annotations

from operator import length_hint

from filters.combined import CombinedFilter, folders_of
from filters.held_text import MAX_HOLD_CHARS, HeldText, HoldPolicy, OnMaxHold
from filters.keyword_stream import KeywordStream
from filters.offsets import Offsets
from filters.patterns import Patterns
from filters.rules import REWRITES, RuleSet
from filters.scan import scan
from filters.settling import Settling
from filters.walk import ARRIVED, FAIL, LIVE, STATE, Node, Walk

__all__ = ["MAX_HOLD_CHARS", "CompiledRules", "OnMaxHold", "StreamFilter"]


class CompiledRules(Patterns):
    """Rules ready for streams and scans. Built once (about 0.1 s for 5,000 keywords), shared, immutable.

    `max_hold_chars`: raw characters that a stream may hold; `on_max_hold`: what happens to them past that.
    """

    def __init__(
        self, rules: RuleSet, max_hold_chars: int = MAX_HOLD_CHARS, on_max_hold: OnMaxHold = "block"
    ) -> None:
        super().__init__(rules)
        self.policy = HoldPolicy(max_hold_chars, on_max_hold)
        for folded in self.by_folding:
            folded.make_ready()
        # With keywords that alone can pass the bound, every character is counted the exact way.
        self.always_exact = self.longest > max_hold_chars
        is_plain = not self.others and not self.pii  # `StreamFilter` can do it, and needs the walk
        self.walk = Walk(self.automaton) if is_plain else None
        self._folders = folders_of(self)

    def stream(self) -> StreamFilter | CombinedFilter | None:
        """A filter for one channel of one choice; None without rules, for then there is nothing to do."""
        if not len(self):
            return None
        return (
            CombinedFilter(self, self._folders, self.policy)
            if self.walk is None
            else StreamFilter(self, self.walk)
        )

    def completes(self, context: str, text: str) -> bool:
        """Whether `text` after `context` completes something that an active rule denies, if it ends there.

        `context`: the end of what was said, at least what a stream holds and the character before.
        """
        result = scan(context + text, self)
        is_cut = result.num_hits > len(result.hits)
        return is_cut or any(
            hit.end > len(context) and not hit.shadow and hit.action in (*REWRITES, "block")
            for hit in result.hits
        )


class _Steps(KeywordStream):
    """The exact steps of the quick loop: folded offsets are counted only where they differ from raw ones."""

    __slots__ = ("offsets",)

    def __init__(self, rules: CompiledRules, settling: Settling) -> None:
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
        self.state = state
        self.num_raw = num_raw
        self.num_folded = self.offsets.folded_at(num_raw)


class StreamFilter(HeldText):
    """Keywords under the default folding. A `pipeline.ports.TextFilter`."""

    __slots__ = ("_node", "_rules", "_steps", "_walk")

    def __init__(self, rules: CompiledRules, walk: Walk) -> None:
        settling = Settling([0])
        self._steps = _Steps(rules, settling)
        if rules.has_phrases:
            settling.phrase_tracks = [self._steps]
        super().__init__(rules.policy, rules.is_active, [self._steps], settling)
        self._rules = rules
        self._walk = walk
        # Between chunks never a stop that nothing was done about.
        self._node = walk.parked(rules.automaton.start) if rules.always_exact else walk.root

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
        if live < 0 or self._emitter is not None:
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
        start = self.released + self.held + offset
        steps.move_to(node[STATE], start)
        if node[LIVE] == ARRIVED:
            steps.arrive()
        folded = self._walk.folds.get(char, char)
        if len(folded) != 1:
            steps.offsets.add(start, len(folded))
        steps.num_raw = start + 1
        for folded_char in folded:
            steps.step(folded_char)
        self._settle()
        if not self.blocked and start + 1 - self._border() > self._policy.max_hold_chars:
            self._force()
        return self._resting_node()

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
        """Where to go on from: in the quick loop, if what is under way is ordinary."""
        steps = self._steps
        state, offsets = steps.state, steps.offsets
        under_way = steps.num_folded - steps.automaton.depth[state]
        offsets.forget_before(under_way)
        is_ordinary = (
            not self.blocked
            and self._settling.is_idle
            and offsets.is_straight
            and self._floor <= offsets.raw_of(under_way)  # nothing under way was forced
            and not self._rules.always_exact
        )
        return self._walk.nodes[state] if is_ordinary else self._walk.parked(state)

    def _end_chunk(self, node: Node, text: str) -> str:
        """What may leave at the end of a chunk that was not plain."""
        self._text += text
        if not self.blocked:
            self._steps.move_to(node[STATE], self.released + len(self._text))
            if node[LIVE] == ARRIVED:
                self._steps.arrive()
                self._settle()
        self._node = self._resting_node()
        return self._release(self._floor if self.blocked else self._border())
