"""Stop strings: where the client wants the text to end. Matched exactly, on one choice's raw text.

The stop is the one that completes first; of several that complete at the same character, the first in the
client's list. That is what vLLM's `check_stop_strings` gives when it is fed token by token, and the chunks
don't matter here; an older vLLM may choose another stop where one step brings several tokens. What is
held back is the longest suffix that some next text would cut off, no more (vLLM holds as many characters as
the longest stop string has, less one, all the time): nothing where the stop string stays in the text, and
nothing for a stop string in which another one completes first.

A token costs 0.25 us (a set is asked for its characters), 0.1 more if a character begins a stop string.

Not here: stop *tokens*, which the engine knows, and channels and filters, which come after.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy


class _Automaton:
    """Aho-Corasick over the stop strings: per state its edges, its fallback, what to hold, what ends there.

    The state is the longest suffix of the text that is a prefix of a stop string. It takes O(total
    characters).

    `hold`: characters of the longest suffix that is a proper prefix of a stop string that can still win: one
    in whose rest no other completes before it. `hold_exempt`: the same as long as those others would not
    count.
    """

    __slots__ = ("edges", "fallback", "hold", "hold_exempt", "stop")

    def __init__(self, stops: Sequence[str]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.fallback = [0]
        self.hold = [0]
        self.hold_exempt = [0]
        self.stop: list[int | None] = [None]  # the first in the list of the stop strings that end here
        paths = [self._add(stop, index) for index, stop in enumerate(stops)]
        order = self._link()
        for index, path in enumerate(paths):
            self._mark(path, index)
        for state in order:
            shorter = self.fallback[state]
            self.hold[state] = self.hold[state] or self.hold[shorter]
            self.hold_exempt[state] = self.hold_exempt[state] or self.hold_exempt[shorter]

    def step(self, state: int, char: str) -> int:
        """The next state."""
        edges, fallback = self.edges, self.fallback
        while state and char not in edges[state]:
            state = fallback[state]
        return edges[state].get(char, 0)

    def _add(self, stop: str, index: int) -> list[int]:
        """The states of its prefixes, the shortest first."""
        state, path = 0, []
        for char in stop:
            following = self.edges[state].get(char)
            if following is None:
                following = self.edges[state][char] = len(self.edges)
                self.edges.append({})
                self.fallback.append(0)
                self.hold.append(0)
                self.hold_exempt.append(0)
                self.stop.append(None)
            state = following
            path.append(state)
        if self.stop[state] is None:
            self.stop[state] = index
        return path

    def _link(self) -> list[int]:
        """Set every state's fallback, and what ends there. Returns the states, breadth first."""
        order = list(self.edges[0].values())
        for state in order:
            shorter = self.fallback[state]
            ends = [index for index in (self.stop[state], self.stop[shorter]) if index is not None]
            self.stop[state] = min(ends, default=None)
            for char, child in self.edges[state].items():
                self.fallback[child] = self.step(shorter, char)
                order.append(child)
        return order

    def _mark(self, path: list[int], index: int) -> None:
        """Set what is held for one stop string. One that ends with an earlier one of the list never wins."""
        if self.stop[path[-1]] != index:
            return
        is_next = True  # no other completes after this prefix
        for depth in range(len(path) - 1, 0, -1):
            state = path[depth - 1]
            self.hold_exempt[state] = depth
            if is_next:
                self.hold[state] = depth
            is_next = is_next and self.stop[state] is None


class StopMatcher:
    """Lets text through up to the first stop string. `matched` is that string; then it refuses more.

    `include` keeps the stop string in the text. A stop string that is complete within the first
    `min_tokens` tokens does not count, one that only begins there does. Raises `ValueError` for an empty stop
    string, and without any: a choice without stops has no matcher.
    """

    __slots__ = (
        "_automaton",
        "_held",
        "_include",
        "_is_ended",
        "_min_tokens",
        "_num_exempt",
        "_starts",
        "_state",
        "_stops",
        "matched",
    )

    def __init__(self, stops: Sequence[str], include: bool = False, min_tokens: int = 0) -> None:
        if not all(stops) or not stops:
            raise ValueError(
                f"{len(stops)} stop strings were given; there must be one, and none may be empty"
            )
        self._stops = tuple(stops)
        self._automaton = _Automaton(stops)
        self._min_tokens = min_tokens
        self._starts = frozenset(stop[0] for stop in stops)
        self._include = include
        self._num_exempt = min_tokens
        self._state = 0
        self._held = ""
        self._is_ended = False
        self.matched: str | None = None

    def fresh(self) -> StopMatcher:
        """One for another choice of the request: the automaton is shared, 2 ms of work for long strings."""
        other = copy(self)
        other._num_exempt = self._min_tokens
        other._state = 0
        other._held = ""
        other._is_ended = False
        other.matched = None
        return other

    @property
    def num_exempt_tokens(self) -> int:
        """Tokens to come whose text may not complete a stop. Feed them apart from those after them."""
        return self._num_exempt

    def feed(self, text: str, num_tokens: int = 1) -> str:
        """The text that can no longer be part of a stop string; `num_tokens` tokens made this text."""
        if self._is_ended:
            raise RuntimeError("the text has ended; a stop matcher takes no more")
        is_exempt = False
        if self._num_exempt:
            is_exempt = num_tokens <= self._num_exempt
            self._num_exempt = max(self._num_exempt - num_tokens, 0)
        if not self._state and self._starts.isdisjoint(text):
            return text
        return self._search(text, is_exempt)

    def flush(self) -> str:
        """The text is over: what was held."""
        held, self._held = self._held, ""
        self._is_ended = True
        return held

    def _search(self, text: str, is_exempt: bool) -> str:
        automaton, state = self._automaton, self._state
        edges, stop = automaton.edges, automaton.stop
        end = 0
        for char in text:
            end += 1
            following = edges[state].get(char)
            if following is not None:
                state = following
                index = stop[state]
            elif state:
                state = automaton.step(state, char)
                index = stop[state]
            else:
                continue
            if index is not None and not is_exempt:
                return self._end(self._held + text[:end], self._stops[index])
        self._state = state
        text = self._held + text
        hold = automaton.hold_exempt if self._num_exempt else automaton.hold
        num_free = len(text) if self._include else len(text) - hold[state]
        self._held = text[num_free:]
        return text[:num_free]

    def _end(self, text: str, stop: str) -> str:
        self.matched = stop
        self._is_ended = True
        self._held = ""
        return text if self._include else text.removesuffix(stop)
