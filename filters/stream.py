"""The streaming filter: a character leaves as soon as it can no longer be part of a match.

`StreamFilter.feed` runs once per token. Its loop follows edges and fail links and does nothing else; every
character that may end a match, folds to nothing or to several characters, or is read while something is
undecided goes through `_exactly`, which is the whole truth and about ten times slower. Text comes out by one
rule: the held part begins where the longest suffix begins that is a proper prefix of an active keyword, or
where a match begins that a phrase may still excuse, whichever is earlier.

Everything is decided at a character (`decisions.py`), never at the end of a chunk, so any chunking gives the
same output. A block ends the text at the start of its match.

Not here: time (`expire` is called by the owner), what a blocked stream tells its client, and whole texts
(`scan.py`).
"""

from __future__ import annotations

from operator import length_hint
from typing import Final, Literal

from filters.decisions import Decisions
from filters.hit import Hit
from filters.offsets import Offsets
from filters.patterns import Patterns
from filters.rules import MAX_HOLD_ID, RuleSet
from filters.spans import Emitter
from filters.walk import ARRIVED, FAIL, LIVE, STATE, Node, Walk

MAX_HOLD_CHARS: Final = 256

OnMaxHold = Literal["block", "release"]


class CompiledRules(Patterns):
    """Rules ready for streams and scans. Built once (about 0.1 s for 5,000 keywords), shared, immutable.

    `max_hold_chars`: raw characters that a stream may hold; `on_max_hold`: what happens to them past that.
    """

    def __init__(
        self, rules: RuleSet, max_hold_chars: int = MAX_HOLD_CHARS, on_max_hold: OnMaxHold = "block"
    ) -> None:
        for rule in rules.rules:
            if rule.whole_text_field is not None:
                raise ValueError(
                    f"the rule {rule.id!r} has {rule.whole_text_field}: it is for whole texts only"
                )
        super().__init__(rules)
        if max_hold_chars < 1:
            raise ValueError(f"max_hold_chars is {max_hold_chars}; it must be at least 1")
        if on_max_hold not in ("block", "release"):
            raise ValueError(f"on_max_hold is {on_max_hold!r}; it must be 'block' or 'release'")
        self.max_hold_chars = max_hold_chars
        self.on_max_hold = on_max_hold
        self.walk = Walk(self.automaton)
        # With keywords that alone can pass the bound, every character is counted the exact way.
        self.always_exact = self.longest > max_hold_chars
        self.first_node = self.walk.parked(self.automaton.start) if self.always_exact else self.walk.root

    def stream(self) -> StreamFilter | None:
        """A filter for one channel of one choice; None without rules, for then there is nothing to do."""
        return StreamFilter(self) if self.patterns else None


class StreamFilter:
    """One text, fed in pieces. `pipeline.ports.TextFilter`.

    After `flush`, `feed` raises `RuntimeError`; after a block it returns nothing. Offsets are raw characters
    from the start of the text.
    """

    __slots__ = (
        "_decisions",
        "_emitter",
        "_floor",
        "_is_closed",
        "_node",
        "_offsets",
        "_rules",
        "_text",
        "_walk",
        "blocked",
        "blocked_by",
        "held",
        "hits",
        "is_active",
        "num_leaked",
        "peak_held",
        "released",
    )

    def __init__(self, rules: CompiledRules) -> None:
        self._rules = rules
        self._walk = rules.walk
        self._node = rules.first_node  # between chunks never a stop that nothing was done about
        self._text = ""  # what is held, raw
        self._offsets = Offsets()
        self._decisions = Decisions(rules, self._offsets)
        self._emitter: Emitter | None = None  # while something is to be rewritten
        self._floor = 0  # what was released or cut by force up to here
        self._is_closed = False
        self.held = 0
        self.peak_held = 0
        self.released = 0
        self.hits: list[Hit] = []
        self.blocked = False
        self.blocked_by: str | None = None
        self.is_active = rules.is_active
        self.num_leaked = 0  # characters that left undecided at a bound

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

    def flush(self) -> str:
        """The text has ended: nothing is under way any more."""
        if self._is_closed:
            return self._refuse()
        self._is_closed = True
        end = self.released + self.held
        self._decisions.end(self._node[STATE], self._offsets.folded_at(end))
        self._take_certain()
        return self._release(self._floor if self.blocked else end)

    def expire(self) -> str:
        """Text has been held for too long: it is blocked or leaves, as the rules say."""
        if self._is_closed or not self.held:
            return ""
        self._force(self._node[STATE], self.released + self.held)
        return self._end_chunk(self._walk.parked(self._node[STATE]), "")

    def abandon(self) -> str:
        """The text breaks off: what is held stays undecided."""
        self._is_closed = True
        return ""

    def _refuse(self) -> str:
        if not self.blocked:
            raise RuntimeError("the text has been flushed; a new text needs a new filter")
        return ""

    def _exactly(self, node: Node, char: str, offset: int) -> Node:
        """One character, `offset` into the chunk, with all that it may decide; returns the node after it."""
        if self.blocked:
            return node
        state: int = node[STATE]
        start = self.released + self.held + offset
        folded_at = self._offsets.folded_at(start)
        if node[LIVE] == ARRIVED:
            self._decisions.arrive(state, folded_at)
        folded = self._walk.folds.get(char, char)
        if len(folded) != 1:
            self._offsets.add(start, len(folded))
        for folded_char in folded:
            if self._decisions.block is not None:
                break
            state = self._decisions.step(state, folded_char, folded_at)
            folded_at += 1
        self._take_certain()
        if not self.blocked and start + 1 - self._border(state, start + 1) > self._rules.max_hold_chars:
            self._force(state, start + 1)
        return self._resting_node(state, start + 1)

    def _take_certain(self) -> None:
        """Acts on what has become certain."""
        decisions = self._decisions
        for candidate in decisions.certain:
            self.hits.append(candidate.hit)
            start, end = max(candidate.hit.start, self._floor), candidate.hit.end
            if candidate.rewrites and start < end:
                if self._emitter is None:
                    self._emitter = Emitter(self.released)
                self._emitter.add(start, end, candidate.rule)
        decisions.certain.clear()
        if decisions.block is not None:
            self._block(decisions.block.rule_id, decisions.block.start)

    def _block(self, rule_id: str, start: int) -> None:
        self.blocked = self._is_closed = True
        self.blocked_by = rule_id
        self._floor = max(self._floor, self.released, start)

    def _force(self, state: int, end: int) -> None:
        """A bound is reached with the text up to `end` read."""
        border = self._border(state, end)
        if self._rules.on_max_hold == "block":
            self.hits.append(Hit(MAX_HOLD_ID, "block", border, end))
            self._block(MAX_HOLD_ID, border)
            return
        self._decisions.end(state, self._offsets.folded_at(end))
        self._take_certain()
        if not self.blocked:
            self.num_leaked += end - border
            self._floor = end

    def _border(self, state: int, end: int) -> int:
        """Where the held part of the text read up to `end` begins."""
        live = self._rules.automaton.live[state]
        border = self._offsets.raw_of(self._offsets.folded_at(end) - live) if live else end
        for candidate in self._decisions.undecided:
            if candidate.rule.is_active:
                border = min(border, candidate.hit.start)
        return max(border, self._floor)

    def _resting_node(self, state: int, end: int) -> Node:
        """Where to go on from: in the quick loop, if what is under way is ordinary."""
        automaton, offsets = self._rules.automaton, self._offsets
        under_way = offsets.folded_at(end) - automaton.depth[state]
        offsets.forget_before(
            min([under_way, *(candidate.folded_start for candidate in self._decisions.undecided)])
        )
        is_ordinary = (
            not self.blocked
            and not self._decisions.undecided
            and offsets.is_straight
            and self._floor <= offsets.raw_of(under_way)  # nothing under way was forced
            and not self._rules.always_exact
        )
        return self._walk.nodes[state] if is_ordinary else self._walk.parked(state)

    def _end_chunk(self, node: Node, text: str) -> str:
        """What may leave at the end of a chunk that was not plain."""
        self._text += text
        end = self.released + len(self._text)
        state: int = node[STATE]
        if node[LIVE] == ARRIVED:
            self._decisions.arrive(state, self._offsets.folded_at(end))
            self._take_certain()
        self._node = self._resting_node(state, end)
        return self._release(self._floor if self.blocked else self._border(state, end))

    def _release(self, border: int) -> str:
        """Lets the held text go up to `border`; after a block the rest is dropped."""
        cut = border - self.released
        if self._emitter is not None:
            out = self._emitter.release(self._text, border)
            if self._emitter.is_idle:
                self._emitter = None
        else:
            out = self._text[:cut]
        self._text = "" if self.blocked else self._text[cut:]
        self.released = border
        self.held = len(self._text)
        self.peak_held = max(self.peak_held, self.held)
        return out
