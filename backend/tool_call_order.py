"""Tool calls as servers stream them, put in order: one after the other, numbered from 0, each name whole.

OpenAI's deltas say by `index` which call they go on with. Servers differ in the rest:

* vLLM, SGLang, llama.cpp: name and id once, then arguments alone.
* A named `tool_choice` in TensorRT-LLM (`postprocess_handlers.py`) and older vLLM: the name in every delta.
* TGI (`router/src/chat.rs`): index 0 and the same id for every call; a name begins the next one.
* Ollama (`openai/openai.go`): whole calls, in older versions all with index 0, each with an id of its own.
* OpenAI's own library joins what it gets, so that a name may come in pieces.

Not here: chunks and their other fields (`openai_chunk.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from pipeline.events import TOOL_ARGUMENTS, TOOL_NAME, Fragment
from pipeline.json_span import JSON_WHITESPACE, OPENS_SPAN, JsonSpan

MAX_NAME_CHARS: Final = 1024  # OpenAI's limit is 64
MAX_WAITING_CHARS: Final = 8 << 20


class CallDelta(NamedTuple):
    """A piece of one call. What is empty or None was not in it."""

    place: int | None  # the field `index`
    call_id: str | None
    name: str | None
    arguments: str


class _Call:
    """One call: what has come of it. `is_whole`: its arguments are one JSON value, as far as they go."""

    __slots__ = (
        "_span",
        "call_id",
        "has_arguments",
        "is_begun",
        "is_over",
        "is_whole",
        "name",
        "number",
        "pieces",
    )

    def __init__(self) -> None:
        self.name = ""
        self.call_id: str | None = None
        self.number = 0
        self.pieces: list[str] = []  # arguments that have not left
        self.has_arguments = self.is_whole = self.is_begun = self.is_over = False
        self._span: JsonSpan | None = None  # of the value that is under way

    def add(self, delta: CallDelta) -> None:
        self.call_id = self.call_id or delta.call_id
        if delta.name and not self.has_arguments:
            # One that begins with what is there is the whole again; else it is the next piece.
            self.name = delta.name if delta.name.startswith(self.name) else self.name + delta.name
            if len(self.name) > MAX_NAME_CHARS:
                raise ValueError(f"a tool call's name has {len(self.name)} characters or more")
        if delta.arguments:
            self._read(delta.arguments)
            self.pieces.append(delta.arguments)
            self.has_arguments = True

    def _read(self, text: str) -> None:
        """Where its values end: each character is looked at once."""
        position = 0
        while position < len(text):
            if self._span is None:
                if text[position] in JSON_WHITESPACE:
                    position += 1
                    continue
                if text[position] not in OPENS_SPAN:
                    self.is_whole = False
                    return
                self._span = JsonSpan()
            end = self._span.end(text, position)
            self.is_whole = end is not None
            if end is None:
                return
            self._span, position = None, end


class ToolCallOrder:
    """Deltas in, fragments out (`pipeline.events.Fragment`). `ValueError` for what is no call.

    The pieces of the first call that is not over leave at once. What comes beside it waits until its
    arguments are whole, or the stream ends; no more than `MAX_WAITING_CHARS` of it.
    """

    __slots__ = ("_by_place", "_current", "_last", "_num_begun", "_num_waiting", "_waiting")

    def __init__(self) -> None:
        self._by_place: dict[int, _Call] = {}
        self._current: _Call | None = None
        self._last: _Call | None = None  # of the last delta
        self._waiting: deque[_Call | Fragment] = deque()
        self._num_begun = 0
        self._num_waiting = 0  # characters, since something waits

    def calls(self, deltas: Sequence[CallDelta]) -> list[Fragment]:
        """What may leave after these pieces of calls."""
        out: list[Fragment] = []
        for delta in deltas:
            call = self._find(delta)
            self._last = call
            if call.is_over:
                if delta.arguments.strip():
                    raise ValueError("the arguments of a tool call go on after their end")
                continue
            call.add(delta)
            if call is self._current and call.has_arguments:
                self._release(call, out)
            else:
                self._wait(len(delta.arguments))
            self._advance(out)
        return out

    def others(self, fragments: Sequence[Fragment]) -> Sequence[Fragment]:
        """The same for text of other channels."""
        if self._current is None and not self._waiting:
            return fragments
        self._waiting += fragments
        self._wait(sum(len(fragment.text) for fragment in fragments))
        out: list[Fragment] = []
        self._advance(out)
        return out

    def _wait(self, num_chars: int) -> None:
        self._num_waiting += num_chars
        if self._num_waiting > MAX_WAITING_CHARS:
            raise ValueError(
                f"{self._num_waiting} characters came beside a tool call that does not end; "
                f"the limit is {MAX_WAITING_CHARS}"
            )

    def flush(self) -> list[Fragment]:
        """The stream has ended: all that is left, in its order."""
        out: list[Fragment] = []
        while self._current is not None or self._waiting:
            if self._current is not None:
                self._close(self._current, out)
            self._next(out)
        return out

    def _find(self, delta: CallDelta) -> _Call:
        known = self._last if delta.place is None else self._by_place.get(delta.place)
        if known is None or self._begins_next(delta, known):
            known = _Call()
            self._waiting.append(known)
            if delta.place is not None:
                self._by_place[delta.place] = known
        return known

    def _begins_next(self, delta: CallDelta, known: _Call) -> bool:
        """A delta with a name, where a call is known: is it the next one's?"""
        if not delta.name:
            return False
        if delta.call_id and known.call_id and delta.call_id != known.call_id:
            return True
        if not known.is_whole:
            return delta.place is None and known.has_arguments and delta.name != known.name
        is_echo = delta.name == known.name and not delta.call_id and not delta.arguments.strip()
        return not is_echo

    def _advance(self, out: list[Fragment]) -> None:
        """Go on to what waits as far as calls are whole."""
        while self._waiting and (self._current is None or self._current.is_whole):
            if self._current is not None:
                self._close(self._current, out)
            self._next(out)
        if not self._waiting:
            self._num_waiting = 0

    def _next(self, out: list[Fragment]) -> None:
        while self._waiting and self._current is None:
            item = self._waiting.popleft()
            if isinstance(item, Fragment):
                out.append(item)
                continue
            self._current = item
            if item.has_arguments:
                self._release(item, out)

    def _close(self, call: _Call, out: list[Fragment]) -> None:
        self._release(call, out)
        call.is_over = True
        self._current = None

    def _release(self, call: _Call, out: list[Fragment]) -> None:
        """Its name, which is whole now, and its arguments so far."""
        if not call.is_begun:
            if not call.name:
                raise ValueError("a tool call has no name")
            call.is_begun, call.number = True, self._num_begun
            self._num_begun += 1
            out.append(Fragment(TOOL_NAME, call.name, call.number, call.call_id or None))
        if call.pieces:
            out.append(Fragment(TOOL_ARGUMENTS, "".join(call.pieces), call.number))
            call.pieces.clear()
