"""The streaming filter: a character leaves as soon as it can no longer be part of a match.

`StreamFilter.feed` runs once per token. Its loop follows edges and fail links and does nothing else; every character
that may end a match, folds to nothing or to several characters, or is read while something is undecided goes through
`_exactly`, which is the whole truth and about ten times slower. Text comes out by one rule: the held part
begins where the longest suffix begins that is a proper prefix of an active keyword, or where a match begins
that a phrase may still excuse, whichever is earlier.

A match is decided at the character that decides it, never at the end of a chunk, so any chunking gives the same
output. A block ends the text at the start of its match, and what is undecided then is decided as if the text ended.

Not here: time (`expire` is called by the owner), what a blocked stream tells its client, and whole texts (`scan.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import length_hint
from typing import Final, Literal

from filters.folding import is_word_char
from filters.hit import Hit
from filters.offsets import Offsets
from filters.patterns import Pattern, Patterns
from filters.rules import MAX_HOLD_ID, REWRITES, Rule, RuleSet
from filters.spans import Emitter
from filters.walk import ARRIVED, FAIL, LIVE, STATE, Node, Walk

MAX_HOLD_CHARS: Final = 256

Match = tuple[int, int]  # folded end, pattern index
OnMaxHold = Literal["block", "release"]


class CompiledRules(Patterns):
    """Rules ready for streams and scans. Built once (about 0.1 s for 5,000 keywords), shared, immutable.

    `max_hold_chars`: raw characters that a stream may hold; `on_max_hold`: what happens to them past that.
    """

    def __init__(
        self, rules: RuleSet, max_hold_chars: int = MAX_HOLD_CHARS, on_max_hold: OnMaxHold = "block"
    ) -> None:
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
        self.phrase_states = self._phrase_states()

    def stream(self) -> StreamFilter | None:
        """A filter for one channel of one choice; None where there is no rule, for then there is nothing to do."""
        return StreamFilter(self) if self.patterns else None

    def may_excuse(self, state: int, num_chars: int, rule: Rule) -> bool:
        """Whether a phrase that began `num_chars` folded characters ago, or earlier, may yet excuse a match of `rule`."""
        automaton = self.automaton
        while automaton.depth[state] >= num_chars:
            if any(phrase.excuses(rule) for phrase in self.phrase_states.get(state, ())):
                return True
            state = automaton.fail[state]
        return False

    def _phrase_states(self) -> dict[int, list[Pattern]]:
        """The phrases that are under way in a state: it is a proper prefix of them, or they wait for a word to end."""
        states: dict[int, list[Pattern]] = {}
        automaton = self.automaton
        for index, pattern in enumerate(self.patterns):
            if pattern.is_phrase:
                for state in automaton.prefix_states(index):
                    states.setdefault(state, []).append(pattern)
        return states


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A match that stands unless a phrase excuses it."""

    folded_start: int
    folded_end: int
    rule: Rule
    hit: Hit

    @property
    def blocks(self) -> bool:
        return self.rule.is_active and self.rule.action == "block"

    @property
    def rewrites(self) -> bool:
        return self.rule.is_active and self.rule.action in REWRITES

    def is_excused(self, phrases: Iterable[tuple[int, int, Pattern]]) -> bool:
        return any(
            start <= self.folded_start and self.folded_end <= end and phrase.excuses(self.rule)
            for start, end, phrase in phrases
        )


class StreamFilter:
    """One text, fed in pieces. `pipeline.ports.TextFilter`.

    After `flush`, `feed` raises `RuntimeError`; after a block it returns nothing. Offsets are raw characters from the
    start of the text.
    """

    __slots__ = (
        "_emitter",
        "_floor",
        "_is_awaiting_settled",
        "_is_closed",
        "_node",
        "_offsets",
        "_open",
        "_rules",
        "_text",
        "_walk",
        "blocked",
        "blocked_by",
        "held",
        "hits",
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
        self._open: list[_Candidate] = []
        self._emitter: Emitter | None = None  # while something is to be rewritten
        self._floor = 0  # what was released or cut by force up to here
        self._is_awaiting_settled = False  # the words that end here were decided by force
        self._is_closed = False
        self.held = 0
        self.peak_held = 0
        self.released = 0
        self.hits: list[Hit] = []
        self.blocked = False
        self.blocked_by: str | None = None
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
        if self._text:
            text = self._text + text
        cut = len(text) - live
        self.held = live
        self.released += cut
        if not live:
            self._text = ""
            return text
        self._text = text[cut:]
        if live > self.peak_held:
            self.peak_held = live
        return text[:cut]

    def flush(self) -> str:
        """The text has ended: nothing is under way any more."""
        if self._is_closed:
            return self._refuse()
        self._is_closed = True
        end = self.released + self.held
        self._decide_all(self._node[STATE], self._offsets.folded_at(end))
        return self._release(self._floor if self.blocked else end)

    def expire(self) -> str:
        """Text has been held for too long: it is blocked or leaves, as the rules say."""
        if self._is_closed or not self.held:
            return ""
        self._force(self._node[STATE], self.released + self.held)
        return self._end_chunk(self._walk.parked(self._node[STATE]), "")

    def _refuse(self) -> str:
        if not self.blocked:
            raise RuntimeError("the text has been flushed; a new text needs a new filter")
        return ""

    def _exactly(self, node: Node, char: str, offset: int) -> Node:
        """One character, `offset` after the start of the chunk, with all that it may decide; returns where it leads."""
        state: int = node[STATE]
        if self.blocked:
            return node
        start = self.released + self.held + offset
        folded_at = self._offsets.folded_at(start)
        if node[LIVE] == ARRIVED:
            self._decide(state, folded_at, [(folded_at, index) for index in self._outputs(state)], [])
        folded = self._walk.folds.get(char, char)
        if len(folded) != 1:
            self._offsets.add(start, len(folded))
        for folded_char in folded:
            if not self.blocked:
                state = self._step(state, folded_char, folded_at)
                folded_at += 1
        if not self.blocked and start + 1 - self._border(state, start + 1) > self._rules.max_hold_chars:
            self._force(state, start + 1)
        return self._resting_node(state, start + 1)

    def _step(self, state: int, folded_char: str, folded_at: int) -> int:
        """One folded character: what it completes, and the words that it ends."""
        automaton = self._rules.automaton
        ended: list[Match] = []
        before: list[Match] = []
        awaiting = automaton.awaiting[state]
        if awaiting and not self._is_awaiting_settled and not is_word_char(folded_char):
            ended = [(folded_at, index) for index in awaiting]
            before = [(folded_at, index) for index in automaton.outputs[state]]
        self._is_awaiting_settled = False
        state = automaton.step(state, folded_char)
        ended += [(folded_at + 1, index) for index in automaton.outputs[state]]
        if ended or self._open:
            self._decide(state, folded_at + 1, ended, before)
        return state

    def _outputs(self, state: int) -> tuple[int, ...]:
        return self._rules.automaton.outputs[state]

    def _decide(self, state: int, folded_at: int, ended: list[Match], before: list[Match]) -> None:
        """Decides what can be decided now.

        `ended`: matches of patterns that came to light with the last character; `before`: those that were seen earlier but
        may excuse one that came to light only now.
        """
        still_open = []
        stands = []
        for candidate in self._unexcused(ended, before):
            num_chars = folded_at - candidate.folded_start
            if self._rules.may_excuse(state, num_chars, candidate.rule):
                still_open.append(candidate)
            else:
                stands.append(candidate)
        self._open = still_open
        if any(candidate.blocks for candidate in stands):
            self._open = still_open + stands
            self._decide_all(state, folded_at)
        else:
            self._accept(stands)

    def _decide_all(self, state: int, folded_at: int) -> None:
        """Decides everything as if the text ended here."""
        automaton = self._rules.automaton
        awaiting = () if self._is_awaiting_settled else automaton.awaiting[state]
        ended = [(folded_at, index) for index in awaiting]
        before = [(folded_at, index) for index in automaton.outputs[state]]
        stands = self._unexcused(ended, before)
        self._is_awaiting_settled = True
        self._open = []
        self._accept(stands)
        blocking = [candidate.hit for candidate in stands if candidate.blocks]
        if blocking and not self.blocked:
            first = min(blocking, key=lambda hit: hit.start)
            self._block(first.rule_id, first.start)

    def _unexcused(self, ended: list[Match], before: list[Match]) -> list[_Candidate]:
        """All open candidates and the new ones, without those inside of a phrase that is complete."""
        candidates = self._open
        for start, end, rule in self._rules.keywords(ended):
            raw_start, raw_end = self._offsets.span(start, end)
            hit = Hit(rule.id, rule.action, raw_start, raw_end, rule.shadow)
            candidates = [*candidates, _Candidate(start, end, rule, hit)]
        phrases = self._rules.phrases(ended + before)
        if phrases:
            candidates = [candidate for candidate in candidates if not candidate.is_excused(phrases)]
        return candidates

    def _accept(self, candidates: list[_Candidate]) -> None:
        for candidate in candidates:
            self.hits.append(candidate.hit)
            start, end = max(candidate.hit.start, self._floor), candidate.hit.end
            if candidate.rewrites and start < end:
                if self._emitter is None:
                    self._emitter = Emitter(self.released)
                self._emitter.add(start, end, candidate.rule)

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
        self._decide_all(state, self._offsets.folded_at(end))
        if not self.blocked:
            self.num_leaked += end - border
            self._floor = end

    def _border(self, state: int, end: int) -> int:
        """Where the held part of the text read up to `end` begins."""
        live = self._rules.automaton.live[state]
        border = self._offsets.raw_of(self._offsets.folded_at(end) - live) if live else end
        for candidate in self._open:
            if candidate.rule.is_active:
                border = min(border, candidate.hit.start)
        return max(border, self._floor)

    def _resting_node(self, state: int, end: int) -> Node:
        """Where to go on from: in the quick loop if no character of what is under way is out of the ordinary."""
        automaton, offsets = self._rules.automaton, self._offsets
        under_way = offsets.folded_at(end) - automaton.depth[state]
        offsets.forget_before(min([under_way, *(candidate.folded_start for candidate in self._open)]))
        is_ordinary = (
            not self.blocked
            and not self._open
            and not self._is_awaiting_settled
            and offsets.is_straight
            and self._floor <= offsets.raw_of(under_way)
            and not self._rules.always_exact
        )
        return self._walk.nodes[state] if is_ordinary else self._walk.parked(state)

    def _end_chunk(self, node: Node, text: str) -> str:
        """What may leave at the end of a chunk that was not plain."""
        self._text += text
        end = self.released + len(self._text)
        state: int = node[STATE]
        if node[LIVE] == ARRIVED:
            folded_at = self._offsets.folded_at(end)
            self._decide(state, folded_at, [(folded_at, index) for index in self._outputs(state)], [])
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
