r"""Text that is JSON, filtered value by value: the arguments of tool calls, and answers in JSON.

Every string, keys as well, is one text with a filter of its own, which gets the characters that the escapes
stand for; what it lets go is written with as few escapes as there may be. So what leaves is JSON of the same
structure. Structure and whitespace leave at once, and a closing quote ends its text. A number or name
(`true`) is a text too, held to its end, and becomes a string if a rule rewrites it.

Beyond what the filters hold, only an escape or a number that is not complete is held.

* A raw control character in a string is escaped. An escape that JSON does not know stays, with its backslash
  escaped.
* Documents may follow each other, if they are not bare numbers or names: `138 1234 5678` is not JSON.
* Text that is not JSON is filtered as one text from there on, quotes and all. Its `\u` escapes count as
  the characters that they stand for and are written as such: other readers take more for JSON than it is.
* Structure is no text: a keyword with a brace in it is not found across one.
* Two keys may become the same one.

Offsets (`released`, those of hits) count raw characters of the whole input. They are exact, but for the
start of a hit that only reports and began more than 1,000 characters and 4,000 escapes before its end.

Not here: whether it is JSON (`json_check.py`), and the words of the grammar (`json_lexer.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from filters import json_lexer as lexer
from filters.hit import Hit
from filters.text_filter import TextFilter
from filters.value_text import ValueText

MAX_DEPTH: Final = 10_000  # one byte each; deeper text is not read as JSON
MAX_SCALAR_CHARS: Final = 256  # as much as a stream holds; a longer number is not read as JSON
_AFTER_SCALAR: Final = lexer.WHITESPACE | frozenset(",]}")
_SPACE: Final = "space"  # state of a bare number with whitespace after it


class JsonValueFilter:
    """One JSON text, fed in pieces. `filters.text_filter.TextFilter`.

    `make` gives a new filter for each value; if it gives None, everything passes as it is. A block in any
    value ends it all: what has left is the beginning of some JSON. After `flush` or `abandon`, `feed` raises
    `RuntimeError`.
    """

    def __init__(self, make: Callable[[], TextFilter | None]) -> None:
        self._make = make
        self._next = make()
        self._passes_all = self._next is None
        self._structure = lexer.Structure(MAX_DEPTH)
        self._value: ValueText | None = None  # the string that is open, or all the rest
        self._is_plain = False  # all the rest
        self._pending = ""  # an escape in it that is not complete
        self._scalar = ""  # the number or name that is not complete
        self._scalar_state = ""
        self._scalar_start = 0
        self._num_read = 0
        self._base = 0  # raw offset of the piece that is being read
        self._num_leaked_before = 0  # by values that are complete
        self._is_closed = False
        self.is_active = self._next is not None and self._next.is_active
        self.held = 0
        self.peak_held = 0
        self.num_leaked = 0
        self.released = 0
        self.hits: list[Hit] = []
        self.blocked = False
        self.blocked_by: str | None = None

    def feed(self, text: str) -> str:
        """More text; returns what may leave now."""
        if self._is_closed:
            if not self.blocked:
                raise RuntimeError("the text has ended; a new text needs a new filter")
            return ""
        value = self._value
        if value is None or self._pending or "\\" in text or ('"' in text and not self._is_plain):
            return self._read(text)
        self._num_read += len(text)
        out = value.feed(text)
        self._account()
        return out if self._is_plain else lexer.encoded(out)

    def flush(self) -> str:
        """The text has ended: what can no longer be part of a match leaves."""
        if self._is_closed:
            return self.feed("")
        out: list[str] = []
        if self._scalar:
            self._end_scalar(out)
        pending, self._pending = self._pending, ""
        value = self._value
        if value is not None:
            if self._is_plain:
                self._pass(value, pending, out)
            if not self._is_closed:
                self._end_value(value, out)
            if not self._is_plain and not self.blocked:
                out.append(pending)
        self._is_closed = True
        self._account()
        return "".join(out)

    def expire(self) -> str:
        """Text was held for too long: the policy blocks, or lets it go.

        An escape or a number that is not complete stays, unless a rule may be about it.
        """
        out: list[str] = []
        if not self._is_closed and self._scalar and self._is_in_question():
            self._leave_scalar(0, out)
        if not self._is_closed and self._value is not None and self._value.filter.held:
            out.append(self._written(self._value.filter.expire()))
            self._account()
        return "".join(out)

    def pause(self) -> str:
        """What is held leaves as if the text ended here, but it may go on. An escape that began stays."""
        out: list[str] = []
        if not self._is_closed and self._scalar:
            self._end_scalar(out)
        if not self._is_closed and self._value is not None:
            out.append(self._written(self._value.filter.pause()))
        self._account()
        return "".join(out)

    def abandon(self) -> str:
        """The text breaks off: what only rules that fail open still hold leaves. Ends the text."""
        if self._is_closed:
            return ""
        out: list[str] = []
        if self._scalar:
            self._leave_scalar(0, out)
        if self._value is not None:
            out.append(self._written(self._value.filter.abandon()))
        self._is_closed = True
        self._account()
        return "".join(out)

    def _read(self, text: str) -> str:
        out: list[str] = []
        if self._passes_all:
            out.append(text)
            self._num_read += len(text)
            text = ""
        self._base = self._num_read - len(self._pending)
        text, self._pending = self._pending + text, ""
        self._num_read = self._base + len(text)
        at = 0
        while at < len(text) and not self._is_closed:
            if self._value is not None:
                at = self._read_value(self._value, text, at, out)
            elif self._scalar:
                at = self._read_scalar(text, at, out)
            else:
                at = self._read_structure(text, at, out)
        self._account()
        return "".join(out)

    def _read_structure(self, text: str, start: int, out: list[str]) -> int:
        """Up to the next value."""
        structure, at = self._structure, start
        while at < len(text):
            char = text[at]
            if structure.expected == lexer.END and char in '{["':
                structure.expected = lexer.DOCUMENT
            if char in lexer.WHITESPACE or (char in lexer.STRUCTURE and structure.take(char)):
                at += 1
                continue
            out.append(text[start:at])
            if char == '"' and structure.takes_string:
                out.append(char)
                self._value = self._new_value(self._base + at + 1)
                return at + 1
            if char in lexer.SCALAR_STARTS and structure.takes_value:
                self._scalar, self._scalar_state = char, lexer.SCALARS[""][char]
                self._scalar_start = self._base + at
                return at + 1
            self._leave_json(self._base + at)
            return at
        out.append(text[start:at])
        return at

    def _read_value(self, value: ValueText, text: str, at: int, out: list[str]) -> int:
        """Up to the end of the string, or of the piece."""
        decoded, at, is_ended, self._pending = value.decode(text, at, self._base)
        self._pass(value, decoded, out)
        if is_ended and not self._is_closed:
            self._end_value(value, out)
            if not self._is_closed:
                out.append('"')
                self._structure.end_string()
        return at + is_ended

    def _read_scalar(self, text: str, at: int, out: list[str]) -> int:
        """Up to the end of the number or name, or of the piece."""
        while at < len(text) and len(self._scalar) <= MAX_SCALAR_CHARS:
            if self._scalar_state != _SPACE:
                end, self._scalar_state = lexer.read_scalar(text, at, self._scalar_state)
                self._scalar += text[at:end]
                at = end
            if at == len(text) or len(self._scalar) > MAX_SCALAR_CHARS:
                break
            char = text[at]
            is_whole = self._scalar_state == _SPACE or self._scalar_state in lexer.WHOLE_SCALARS
            if self._structure.depth and is_whole and char in _AFTER_SCALAR:
                self._end_scalar(out)
                return at
            if self._structure.depth or not is_whole or char not in lexer.WHITESPACE:
                return self._leave_scalar(at, out)
            self._scalar += char
            self._scalar_state = _SPACE
            at += 1
        return self._leave_scalar(at, out) if len(self._scalar) > MAX_SCALAR_CHARS else at

    def _end_scalar(self, out: list[str]) -> None:
        """The number or name is complete, or the text ends in it."""
        is_whole = self._scalar_state == _SPACE or self._scalar_state in lexer.WHOLE_SCALARS
        if not is_whole and not self._structure.depth:
            self._leave_scalar(0, out)
            return
        scalar = self._scalar.rstrip()
        value = self._new_value(self._scalar_start)
        left = value.filter.feed(scalar)
        if not value.filter.blocked:
            left += value.filter.flush()
        self._take(value)
        self._num_leaked_before += value.filter.num_leaked
        if self.blocked:
            return  # nothing of it leaves
        # What was rewritten is a number no more, and must be a value all the same.
        out.append(left if left == scalar else f'"{lexer.encoded(left)}"')
        out.append(self._scalar[len(scalar) :])
        self._scalar = ""
        self._structure.end_value()

    def _leave_scalar(self, at: int, out: list[str]) -> int:
        """What looked like a number or name is not JSON."""
        self._leave_json(self._scalar_start)
        scalar, self._scalar = self._scalar, ""
        assert self._value is not None
        self._pass(self._value, scalar, out)
        return at

    def _leave_json(self, raw: int) -> None:
        """All from this offset on is one text."""
        self._is_plain = True
        self._value = self._new_value(raw)

    def _new_value(self, raw: int) -> ValueText:
        text_filter, self._next = self._next or self._make(), None
        assert text_filter is not None
        return ValueText(text_filter, raw, self._is_plain)

    def _is_in_question(self) -> bool:
        """Whether a rule may be about the number or name, as far as it goes."""
        text_filter = self._make()
        assert text_filter is not None
        return text_filter.feed(self._scalar) != self._scalar

    def _pass(self, value: ValueText, text: str, out: list[str]) -> None:
        """More of the open value, through its filter."""
        out.append(self._written(value.feed(text)))
        self._take(value)

    def _end_value(self, value: ValueText, out: list[str]) -> None:
        out.append(self._written(value.filter.flush()))
        self._take(value)
        if not self.blocked:
            self._num_leaked_before += value.filter.num_leaked
            self._value = None

    def _written(self, text: str) -> str:
        return text if self._is_plain else lexer.encoded(text)

    def _take(self, value: ValueText) -> None:
        """What the filter of a value has found."""
        text_filter = value.filter
        for hit in text_filter.hits:
            self.hits.append(replace(hit, start=value.raw_of(hit.start), end=value.raw_of(hit.end)))
        text_filter.hits.clear()
        if text_filter.blocked:
            self.blocked = self._is_closed = True
            self.blocked_by = text_filter.blocked_by

    @property
    def reported(self) -> int:
        """As of a `HeldText`, in the input's own offsets."""
        value = self._value
        return self.released if value is None else min(self.released, value.raw_of(value.filter.reported))

    def _account(self) -> None:
        """How far the input is settled."""
        value = self._value
        if value is not None:
            text_filter = value.filter
            if text_filter.hits or text_filter.blocked:
                self._take(value)
            self.num_leaked = self._num_leaked_before + text_filter.num_leaked
            self.released = value.released
        else:
            self.num_leaked = self._num_leaked_before
            self.released = self._scalar_start if self._scalar else self._num_read
        self.held = 0 if self.blocked else self._num_read - self.released
        if self.held > self.peak_held:
            self.peak_held = self.held
