"""One set of patterns as an Aho-Corasick automaton, walked a character at a time.

The walk is a table in plain Python, so that a stream keeps its state as one int and knows the exact depth:

    state = automaton.start
    for char in text:
        state = automaton.step(state, char)
        automaton.outputs[state]    # indexes of the patterns that end with this character, longest first
        automaton.live[state]       # how many of the last characters may still become part of a pattern

With `fold=True` patterns are folded, and `step` folds the character it gets (which must fold to exactly one).
For whole texts there is `finder.py`, with the same matches.

Words. A pattern listed in `whole` matches only where no word character touches its own word characters. The
left side needs no look back: there are two roots, one after a word character (without the patterns that may
not begin there) and one after anything else. The right side needs one character more: such a pattern is in
`awaiting` of its state, and matches if the next character is no word character or the text ends.

Not here: what a match means (rules), raw offsets, and holding text back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from filters.folding import fold as fold_text
from filters.folding import fold_table, is_word_char


class Automaton:
    """Patterns to find. Immutable once built; shared by all streams.

    `patterns` must not be empty strings (after folding): `ValueError`. No patterns at all is fine: nothing
    matches.

    `whole`: indexes of patterns that match as whole words only. `silent`: indexes of patterns that match but
    never count in `live`. `late`: every pattern is in `awaiting`, for texts in which a character is known to
    be over only when the next one comes.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        fold: bool = False,
        *,
        whole: Collection[int] = (),
        silent: Collection[int] = (),
        late: bool = False,
    ) -> None:
        self.patterns = tuple(map(fold_text, patterns)) if fold else tuple(patterns)
        if "" in self.patterns:
            raise ValueError(f"pattern {self.patterns.index('')} is empty")
        self._folds = fold_table() if fold else {}
        self._left_bound = {i for i in whole if is_word_char(self.patterns[i][0])}
        self.right_bound = {i for i in whole if is_word_char(self.patterns[i][-1])}
        self._awaited = range(len(self.patterns)) if late else self.right_bound
        self.start = 0
        self.goto: list[dict[str, int]] = []
        self.fail: list[int] = []
        self.depth: list[int] = []
        self.live: list[int] = []
        self.outputs: list[tuple[int, ...]] = []
        self.awaiting: list[tuple[int, ...]] = []
        self._add_state(0)
        self._word_root = self._add_state(0) if self._left_bound else 0
        self._insert_all(frozenset(silent))
        self._link()
        # Where something ends, or waits to.
        self.is_notable = [
            bool(ended or awaited) for ended, awaited in zip(self.outputs, self.awaiting, strict=True)
        ]

    @property
    def has_two_roots(self) -> bool:
        return self._word_root != 0

    @property
    def last_root(self) -> int:
        """The roots are the first states: 0, and 1 if there are two."""
        return self._word_root

    def root_after(self, char: str) -> int:
        """The state in which nothing is under way and `char` came last."""
        return self._word_root if self._word_root and is_word_char(char) else 0

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        char = self._folds.get(char, char)
        while True:
            target = self.goto[state].get(char)
            if target is not None:
                return target
            if not self.depth[state]:
                return self.root_after(char)
            state = self.fail[state]

    def prefix_states(self, index: int) -> set[int]:
        """The states in which this pattern is under way: begun, and not yet a match."""
        pattern = self.patterns[index]
        if index not in self._awaited:
            pattern = pattern[:-1]
        states = set()
        for root in (0,) if index in self._left_bound else (0, self._word_root):
            state = root
            for char in pattern:
                state = self.goto[state][char]
                states.add(state)
        return states

    def live_of(self, indexes: Collection[int]) -> list[int]:
        """`live` for some of the patterns."""
        under_way = set().union(*map(self.prefix_states, indexes))
        live = [0] * len(self.depth)
        for state in sorted(range(len(live)), key=self.depth.__getitem__):
            live[state] = self.depth[state] if state in under_way else live[self.fail[state]]
        return live

    def _add_state(self, depth: int) -> int:
        self.goto.append({})
        self.fail.append(0)
        self.depth.append(depth)
        self.live.append(0)
        self.outputs.append(())
        self.awaiting.append(())
        return len(self.goto) - 1

    def _insert_all(self, silent: frozenset[int]) -> None:
        """The trie below both roots; a subtree without left-bound patterns is the same below both."""
        bound_states: set[int] = set()
        for index in sorted(self._left_bound):
            bound_states.update(self._insert(0, index, index in silent))
        unbound = [index for index in range(len(self.patterns)) if index not in self._left_bound]
        for index in unbound:
            self._insert(0, index, index in silent)
        if self._word_root:
            for index in unbound:
                self._insert_after_word(index, index in silent, bound_states)

    def _insert(self, root: int, index: int, silent: bool) -> list[int]:
        """Adds a pattern's path; returns its states without the root."""
        path = [root]
        for char in self.patterns[index]:
            edges = self.goto[path[-1]]
            if char not in edges:
                edges[char] = self._add_state(len(path))
            path.append(edges[char])
        self._mark(path, index, silent)
        return path[1:]

    def _insert_after_word(self, index: int, silent: bool, bound_states: set[int]) -> None:
        """Adds a pattern below the word root, joining the other trie where nothing left-bound follows."""
        path = [self._word_root]
        twin = 0
        for char in self.patterns[index]:
            twin = self.goto[twin][char]
            edges = self.goto[path[-1]]
            if twin not in bound_states:
                edges[char] = twin
                break
            if char not in edges:
                edges[char] = self._add_state(len(path))
            path.append(edges[char])
        self._mark(path, index, silent)

    def _mark(self, path: list[int], index: int, silent: bool) -> None:
        """Notes on the states of a path (proper prefixes, perhaps the whole) what the pattern means."""
        size = len(self.patterns[index])
        awaited = index in self._awaited
        if len(path) > size:
            ends = self.awaiting if awaited else self.outputs
            ends[path[size]] += (index,)
        if not silent:
            for depth, state in enumerate(path[: size + awaited]):
                self.live[state] = depth

    def _link(self) -> None:
        """Fail links, breadth first; live depth and outputs come down along them."""
        queue: dict[int, None] = {}  # an ordered set
        for root in (0, self._word_root):
            for char, state in self.goto[root].items():
                self.fail[state] = self.root_after(char)
                queue[state] = None
        waiting = list(queue)
        for state in waiting:
            fail = self.fail[state]
            self.live[state] = self.live[state] or self.live[fail]
            self.outputs[state] += self.outputs[fail]
            self.awaiting[state] += self.awaiting[fail]
            for char, target in self.goto[state].items():
                self.fail[target] = self.step(fail, char)
                if target not in queue:
                    queue[target] = None
                    waiting.append(target)
