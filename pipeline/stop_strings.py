"""Stop strings: where the client wants the text to end. Matched exactly, on one choice's raw text.

The stop is the one that completes first; of several that complete at the same character, the first in the
client's list. That is what vLLM's `check_stop_strings` gives when it is fed token by token, and the chunks
don't matter here; an older vLLM may choose another stop where one step brings several tokens. What is
held back is the longest suffix that is a proper prefix of a stop string, no more (vLLM holds as many
characters as the longest one has, less one, all the time).

Not here: stop *tokens*, which the engine knows, and channels and filters, which come after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class _Automaton:
    """Aho-Corasick over the stop strings: per state its edges, its fallback, what to hold, what ends there.

    The state is the longest suffix of the text that is a prefix of a stop string. It takes O(total
    characters).
    """

    __slots__ = ("edges", "fallback", "hold", "stop")

    def __init__(self, stops: Sequence[str]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.fallback = [0]
        self.hold = [0]  # characters of the longest suffix that is a *proper* prefix of a stop string
        self.stop: list[int | None] = [None]  # the first in the list of the stop strings that end here
        for index, stop in enumerate(stops):
            self._add(stop, index)
        self._link()

    def _add(self, stop: str, index: int) -> None:
        state = 0
        for depth, char in enumerate(stop, 1):
            following = self.edges[state].get(char)
            if following is None:
                following = self.edges[state][char] = len(self.edges)
                self.edges.append({})
                self.fallback.append(0)
                self.hold.append(depth)
                self.stop.append(None)
            state = following
        if self.stop[state] is None:
            self.stop[state] = index

    def _link(self) -> None:
        """Set every state's fallback, breadth first, and what follows from it."""
        queue = deque(self.edges[0].values())
        while queue:
            state = queue.popleft()
            shorter = self.fallback[state]
            if not self.edges[state]:
                self.hold[state] = self.hold[shorter]  # a whole stop string that begins no longer one
            ends = [index for index in (self.stop[state], self.stop[shorter]) if index is not None]
            self.stop[state] = min(ends, default=None)
            for char, child in self.edges[state].items():
                self.fallback[child] = self.step(shorter, char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The next state."""
        edges, fallback = self.edges, self.fallback
        while state and char not in edges[state]:
            state = fallback[state]
        return edges[state].get(char, 0)


class StopMatcher:
    """Lets text through up to the first stop string. `matched` is that string; then it refuses more.

    `include` keeps the stop string in the text. A stop string that is complete within the first
    `min_tokens` tokens does not count, one that only begins there does. `released` counts the characters
    whose fate is settled. Raises `ValueError` for an empty stop string, and without any: a choice without
    stops has no matcher.
    """

    __slots__ = (
        "_automaton",
        "_held",
        "_include",
        "_is_ended",
        "_num_exempt",
        "_starts",
        "_state",
        "_stops",
        "matched",
        "released",
    )

    def __init__(self, stops: Sequence[str], include: bool = False, min_tokens: int = 0) -> None:
        if not all(stops) or not stops:
            raise ValueError(
                f"{len(stops)} stop strings were given; there must be one, and none may be empty"
            )
        self._stops = tuple(stops)
        self._automaton = _Automaton(stops)
        self._starts = frozenset(stop[0] for stop in stops)
        self._include = include
        self._num_exempt = min_tokens
        self._state = 0
        self._held = ""
        self._is_ended = False
        self.matched: str | None = None
        self.released = 0

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
            self.released += len(text)
            return text
        return self._search(text, is_exempt)

    def flush(self) -> str:
        """The text is over: what was held."""
        held, self._held = self._held, ""
        self._is_ended = True
        self.released += len(held)
        return held

    def _search(self, text: str, is_exempt: bool) -> str:
        automaton, state = self._automaton, self._state
        for end, char in enumerate(text, 1):
            state = automaton.step(state, char)
            index = automaton.stop[state]
            if index is not None and not is_exempt:
                return self._end(self._held + text[:end], self._stops[index])
        self._state = state
        text = self._held + text
        num_free = len(text) - automaton.hold[state]
        self._held = text[num_free:]
        self.released += num_free
        return text[:num_free]

    def _end(self, text: str, stop: str) -> str:
        self.matched = stop
        self._is_ended = True
        self._held = ""
        text = text if self._include else text.removesuffix(stop)
        self.released += len(text)
        return text
