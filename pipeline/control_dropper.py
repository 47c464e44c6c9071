"""Control strings dropped from text that users see, however the text is cut.

A parser works on text with control tokens in it, and a model can spell one out of ordinary tokens; neither
may reach a client that pastes the answer into the next prompt. A control string is dropped as soon as it is
complete, and reading goes on as if it had never been there: one that only its removal puts together
(`<|im_<|im_end|>end|>`) is dropped as well, so what leaves never contains a control string. Because the one
that completes first is dropped, one that contains another can never complete; nothing is held for its sake.

What is held is the shortest possible: the longest suffix that is a proper prefix of a control string, and
what was held before that, for with the suffix gone the text before it would go on.

Not here: which strings are control strings (`controls.py`), and control tokens as ids (`detokenizer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from filters.automaton import Automaton
from pipeline.controls import ControlStrings

# Halves may be nested in halves without end (`<|im_<|im_<|im_`). Past this the oldest leave, and what would
# complete them is dropped without them.
MAX_HELD_CHARS: Final = 256

# A character that may still go, the automaton's state after it, and how many characters could leave if the
# text ended with it.
_Held = tuple[str, int, int]


class ControlAutomaton:
    """The control strings of one model, ready to be dropped. Built once, shared, immutable.

    `controls` may be any strings; empty ones are left out.
    """

    def __init__(self, controls: ControlStrings | Iterable[str]) -> None:
        given = controls.ids if isinstance(controls, ControlStrings) else controls
        texts = sorted(set(given) - {""}, key=len)
        minimal: list[str] = []
        for text in texts:
            if not any(shorter in text for shorter in minimal):
                minimal.append(text)
        self.table = Automaton(minimal)
        self.starts = frozenset(text[0] for text in minimal)
        self.find_start = re.compile("|".join(map(re.escape, sorted(self.starts))) or "(?!)").search
        self.sizes = tuple(map(len, minimal))


class ControlDropper:
    """One text, fed in pieces: what comes out has no control string in it.

    `held`: characters that wait. After `flush`, `feed` raises `RuntimeError`.
    """

    __slots__ = (
        "_automaton",
        "_is_ended",
        "_stack",
        "_start",
        "_state_before",
        "held",
    )

    def __init__(self, automaton: ControlAutomaton) -> None:
        self._automaton = automaton
        self._start = 0  # characters that have left; the stack begins there
        self._state_before = automaton.table.start  # of the automaton after them
        self._stack: list[_Held] = []
        self._is_ended = False
        self.held = 0

    @property
    def starts_now(self) -> frozenset[str] | None:
        """A text with none of these characters passes as it is and changes nothing; None: it must be fed."""
        is_idle = not (self._stack or self._state_before or self._is_ended)
        return self._automaton.starts if is_idle else None

    def feed(self, text: str) -> str:
        """The text that can no longer be part of a control string."""
        if self._is_ended:
            raise RuntimeError("the text has been flushed; a new text needs a new dropper")
        if not self._stack and not self._state_before and self._automaton.starts.isdisjoint(text):
            return text
        return self._read(text)

    def flush(self) -> str:
        """The text has ended: what was held leaves."""
        out: list[str] = []
        self._release(len(self._stack), out)
        self._is_ended = True
        self.held = 0
        return "".join(out)

    def _read(self, text: str) -> str:
        out: list[str] = []
        stack, table = self._stack, self._automaton.table
        step, outputs, depths = table.step, table.outputs, table.depth
        find_start, at = self._automaton.find_start, 0
        while at < len(text):
            if not stack and not self._state_before:
                found = find_start(text, at)
                end = len(text) if found is None else found.start()
                if end > at:
                    out.append(text[at:end])
                    self._start += end - at
                    at = end
                    continue
            char = text[at]
            at += 1
            state = step(stack[-1][1] if stack else self._state_before, char)
            if outputs[state]:
                self._drop(self._automaton.sizes[outputs[state][0]])
            elif depths[state]:
                self._push(char, state, depths[state], out)
            else:  # nothing is under way
                if stack:
                    self._release(len(stack), out)
                out.append(char)
                self._start += 1
                self._state_before = state
        self.held = len(stack)
        return "".join(out)

    def _push(self, char: str, state: int, depth: int, out: list[str]) -> None:
        start, stack = self._start, self._stack
        below = start + len(stack) + 1 - depth
        # With the suffix gone, the text would go on from below it.
        border = stack[below - start - 1][2] if below > start else start
        stack.append((char, state, border))
        border = max(border, start + len(stack) - MAX_HELD_CHARS)
        if border > start:
            self._release(border - start, out)

    def _release(self, num: int, out: list[str]) -> None:
        for char, state, _ in self._stack[:num]:
            out.append(char)
            self._state_before = state
        del self._stack[:num]
        self._start += num

    def _drop(self, size: int) -> None:
        """A control string of `size` characters is complete with a character that was not pushed."""
        num = min(size - 1, len(self._stack))  # fewer where its beginning had to leave
        del self._stack[len(self._stack) - num :]
