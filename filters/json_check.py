"""Is it JSON? Asked of a text while it is being written.

The grammar is RFC 8259 and nothing beside it: one document, whitespace around it at most, no NaN, no
trailing commas, no raw control characters in strings. An escape of a lone surrogate is JSON, and so is a key
that an object has twice.

Messages say what was expected and where, never what was found: that may be text that must not leave.

Not here: schemas (`json_schema.py`), rewriting what is in JSON (`json_values.py`), and what happens after a
violation.
"""

from __future__ import annotations

import re
from typing import Final

from filters import json_lexer as lexer
from filters.json_schema import MAX_DEPTH

_NOT_PLAIN: Final = re.compile('["\\\\\x00-\x1f]')
# How many characters of an escape were read.
_BACKSLASH, _LAST_DIGIT = 1, 5


class JsonCheck:
    """One text, fed in pieces; says where it stops being JSON.

    `is_object`: the document must be an object. `problem`: what is wrong, and at which character (the first
    is 0), in less than 200 characters; None while nothing is. `num_fine`: characters before that.
    """

    __slots__ = ("_escape", "_in_string", "_is_object", "_scalar", "_structure", "num_fine", "problem")

    def __init__(self, is_object: bool = False) -> None:
        self._is_object = is_object
        self._structure = lexer.Structure(MAX_DEPTH)
        self._in_string = False
        self._escape = 0  # characters of the escape that is under way
        self._scalar = ""  # state of the number or name that is under way
        self.num_fine = 0
        self.problem: str | None = None

    def feed(self, text: str) -> int | None:
        """More text: how many of its characters are fine if one is not, None if all are."""
        if self.problem is not None:
            return 0
        if self._in_string and not self._escape and _NOT_PLAIN.search(text) is None:
            self.num_fine += len(text)
            return None
        at, size = 0, len(text)
        while at < size and self.problem is None:
            if self._in_string:
                at = self._read_escape(text, at) if self._escape else self._read_string(text, at)
            elif self._scalar:
                at = self._read_scalar(text, at)
            else:
                at = self._read_structure(text, at)
        if self.problem is not None:
            return at
        self.num_fine += size
        return None

    def flush(self) -> str | None:
        """The text has ended: what is wrong with all of it."""
        if self.problem is None and self._scalar in lexer.WHOLE_SCALARS:
            self._structure.end_value()
            self._scalar = ""
        if self.problem is None and (self._in_string or self._structure.expected != lexer.END):
            missing = "the end of a string" if self._in_string else self._expected()
            self.problem = f"the JSON ends too early, at character {self.num_fine}, before {missing}"
        return self.problem

    def _expected(self) -> str:
        if self._scalar:
            return "the end of a number or name"
        is_start = self._structure.expected == lexer.DOCUMENT
        return "an object" if is_start and self._is_object else self._structure.expected

    def _fail(self, at: int, expected: str) -> int:
        self.num_fine += at
        self.problem = f"not JSON from character {self.num_fine} on, where {expected} was expected"
        return at

    def _read_string(self, text: str, at: int) -> int:
        found = _NOT_PLAIN.search(text, at)
        if found is None:
            return len(text)
        at = found.start()
        if text[at] == "\\":
            self._escape = _BACKSLASH
        elif text[at] == '"':
            self._in_string = False
            self._structure.end_string()
        else:
            return self._fail(at, "a control character to be escaped")
        return at + 1

    def _read_escape(self, text: str, at: int) -> int:
        """One more character of an escape."""
        char = text[at]
        if self._escape == _BACKSLASH and char in lexer.SIMPLE_ESCAPES:
            self._escape = 0
        elif (char in lexer.HEX_DIGITS) if self._escape > _BACKSLASH else (char == "u"):
            self._escape = self._escape + 1 if self._escape < _LAST_DIGIT else 0
        else:
            return self._fail(at, "the rest of an escape")
        return at + 1

    def _read_scalar(self, text: str, at: int) -> int:
        at, self._scalar = lexer.read_scalar(text, at, self._scalar)
        if at == len(text):
            return at
        if self._scalar not in lexer.WHOLE_SCALARS:
            return self._fail(at, self._expected())
        self._scalar = ""
        self._structure.end_value()
        return at

    def _read_structure(self, text: str, at: int) -> int:
        """Up to the next string, number or name."""
        structure = self._structure
        while at < len(text):
            char = text[at]
            if char in lexer.WHITESPACE:
                at += 1
                continue
            if self._is_object and structure.expected == lexer.DOCUMENT and char != "{":
                return self._fail(at, "an object")
            if char == '"' and structure.takes_string:
                self._in_string = True
                return at + 1
            if char in lexer.SCALAR_STARTS and structure.takes_value:
                self._scalar = lexer.SCALARS[""][char]
                return at + 1
            if char not in lexer.STRUCTURE or not structure.take(char):
                return self._fail(at, self._wanted(char))
            at += 1
        return at

    def _wanted(self, char: str) -> str:
        if char in "{[" and self._structure.takes_value:
            return f"nesting of at most {MAX_DEPTH} levels"
        return self._expected()
