"""The automaton as a graph of dicts, for the loop that runs once per character of every stream.

A node maps a raw character to the next node, so a step is one lookup. What the loop must know besides is
under three longer keys, which no character can equal, so that all keys are strings and lookups stay on
CPython's quickest path. The bare loop at 5,000 mixed keywords, microseconds per token of 5 English and of 2
Chinese characters: 0.52 and 0.48 with nodes, 0.70 and 0.55 with lists of states (`Automaton.goto`).

The loop asks for nothing but edges. Whatever needs a closer look is made to look like a dead end: a node that
lacks the edge and has no fail link although it is not a root. Such are the *stops*, where a pattern ends:
they have no edges at all. Where a whole word waits for the character after it, only letters have edges, for
they change nothing.

Not here: the loop itself (`stream_filter.py`), and the exact step for what it cannot do
(`keyword_stream.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from filters.automaton import Automaton
from filters.folding import fold_table, is_word_char, variants

FAIL: Final = "fail"  # the node of the longest suffix; None for roots and for nodes that need a closer look
LIVE: Final = "live"  # characters that may still become part of a match; or one of the two below
STATE: Final = "state"  # the number of the state in the automaton
ARRIVED: Final = -1  # LIVE of a stop: patterns end with the last character, nothing was done about it yet
PARKED: Final = -2  # LIVE of a node that sends every character the exact way

# Steps that are written out although they are no edges: from the roots and their children, where most English
# text moves, and from words that are complete but perhaps go on.
PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F)))
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"

Node = dict[str, Any]  # mypy cannot express it: a character -> Node, the three keys as above


class Walk:
    """All nodes of an automaton that folds. Not to be changed once built."""

    def __init__(self, automaton: Automaton) -> None:
        self.nodes: list[Node] = [
            {LIVE: live, STATE: state, FAIL: None} for state, live in enumerate(automaton.live)
        ]
        self._automaton = automaton
        self._link()
        self.root = self.nodes[automaton.start]
        self.last_root = 1 if automaton.has_two_roots else 0  # the states of the roots are the first
        self.folds = fold_table()
        self.irregular = _irregular()

    def root_after(self, char: str) -> Node:
        return self.nodes[self._automaton.root_after(char)]

    def parked(self, state: int) -> Node:
        """A node that stands for a state and lets the loop do nothing by itself."""
        return {LIVE: PARKED, STATE: state, FAIL: None}

    def _link(self) -> None:
        automaton, nodes = self._automaton, self.nodes
        targets = [
            {LIVE: ARRIVED, STATE: state, FAIL: None} if outputs else nodes[state]
            for state, outputs in enumerate(automaton.outputs)
        ]
        # After a root, and after a character that fails to it.
        common = {
            root: {char: targets[automaton.step(root, char)] for char in PRINTABLE}
            for root in range(automaton.last_root + 1)
        }
        for state, node in enumerate(nodes):
            awaiting = automaton.awaiting[state]
            fail = automaton.fail[state] if automaton.depth[state] else state
            if fail != state and not awaiting:
                node[FAIL] = nodes[fail]
            if fail in common and not awaiting and automaton.depth[state] <= 1:
                node.update(common[fail])
            for char, target in automaton.goto[state].items():
                if not awaiting or is_word_char(char):
                    for form in (char, *variants(char)):
                        node[form] = targets[target]
            if awaiting:
                for char in LETTERS:
                    if char not in node:
                        node[char] = targets[automaton.step(state, char)]


@cache
def _irregular() -> frozenset[str]:
    """Characters that fold, and whose folding the edges do not know already."""
    return frozenset(
        char for char, folded in fold_table().items() if len(folded) != 1 or char not in variants(folded)
    )
