"""JSON that comes in pieces and is only to be passed on: where a value ends, and what a string says.

Each character is looked at once. Not here: whether it is JSON at all (`filters.json_check`).
"""

from __future__ import annotations

import json
import re
from typing import Final

JSON_WHITESPACE: Final = " \t\n\r"
OPENS_SPAN: Final = '{["'  # what a value begins with whose end `JsonSpan` finds

_MARK: Final = re.compile(r'["{}\[\]]')
_STRING_MARK: Final = re.compile(r'["\\]')


class JsonSpan:
    """Finds where an object, an array or a string ends that comes in pieces. Checks nothing else.

    After its end it is as new.
    """

    __slots__ = ("_depth", "_in_escape", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._in_escape = False

    def end(self, text: str, start: int) -> int | None:
        """The index after its last character, or None: it goes on past this text."""
        position = start
        while position < len(text):
            if self._in_escape:
                self._in_escape = False
                position += 1
                continue
            found = (_STRING_MARK if self._in_string else _MARK).search(text, position)
            if found is None:
                return None
            position = found.end()
            if self._ends_with(found[0]):
                return position
        return None

    def _ends_with(self, mark: str) -> bool:
        if mark == "\\":
            self._in_escape = True
        elif mark == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if mark in "{[" else -1
        return self._depth == 0 and not self._in_string


class JsonString:
    """Reads one string that comes in pieces, then the next. `value`: what the last one says.

    It is empty for a string that is none (a bad escape, a bare control character) or that cannot be sent
    (half a surrogate pair).
    """

    __slots__ = ("_pieces", "_span", "value")

    def __init__(self) -> None:
        self._span = JsonSpan()
        self._pieces: list[str] = []
        self.value = ""

    def end(self, text: str, start: int) -> int | None:
        """As `JsonSpan.end`. The first piece begins with the quote."""
        end = self._span.end(text, start)
        self._pieces.append(text[start:end])
        if end is not None:
            self.value = _decoded("".join(self._pieces))
            self._pieces.clear()
        return end


def _decoded(text: str) -> str:
    try:
        string: str = json.loads(text)
        string.encode()
    except ValueError:
        return ""
    return string
