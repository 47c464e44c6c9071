"""One text inside of JSON: its filter, its characters, and where they stand in the whole input.

Not here: where it begins and ends, and how it is written again (`json_values.py`).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Final, NamedTuple

from filters.json_lexer import read_escape, read_loose_escape
from filters.text_filter import TextFilter

_MAX_ANCHORS: Final = 4000
_KEPT_CHARS: Final = 1000
_QUOTE_OR_BACKSLASH: Final = re.compile(r'["\\]')
_BACKSLASH: Final = re.compile(r"\\")


class Decoded(NamedTuple):
    """A piece of a text without its escapes."""

    text: str
    end: int  # where the reading stopped; before the quote that ends the text
    is_ended: bool
    pending: str = ""  # an escape at the end of the piece that is not complete


class ValueText:
    """A string of the JSON or, `is_plain`, text that is not JSON. `start` is its raw offset."""

    __slots__ = ("_decoded", "_mark", "_raw", "_read_escape", "filter", "num_fed")

    def __init__(self, text_filter: TextFilter, start: int, is_plain: bool) -> None:
        self.filter = text_filter
        self.num_fed = 0
        self._mark = _BACKSLASH if is_plain else _QUOTE_OR_BACKSLASH
        self._read_escape = read_loose_escape if is_plain else read_escape
        # From each of these counts of characters on, the next ones stand at this raw offset and after it.
        self._decoded = [0]
        self._raw = [start]

    def decode(self, text: str, at: int, base: int) -> Decoded:
        """The characters from `at` on, which stands at `base + at` in the input; to be fed to the filter."""
        parts: list[str] = []
        num_decoded = self.num_fed
        while True:
            found = self._mark.search(text, at)
            end = found.start() if found is not None else len(text)
            parts.append(text[at:end])
            num_decoded += end - at
            if found is None or found[0] == '"':
                return Decoded("".join(parts), end, found is not None)
            escape = self._read_escape(text, end)
            if escape is None:
                return Decoded("".join(parts), len(text), False, text[end:])
            char, at = escape
            parts.append(char)
            num_decoded += len(char)
            if at - end != len(char):
                self._decoded.append(num_decoded)
                self._raw.append(base + at)

    def feed(self, text: str) -> str:
        """Decoded text through the filter."""
        self.num_fed += len(text)
        return self.filter.feed(text)

    def raw_of(self, decoded: int) -> int:
        """Where the character after `decoded` ones stands in the input."""
        if len(self._decoded) == 1:
            return self._raw[0] + decoded - self._decoded[0]
        i = max(bisect_right(self._decoded, decoded) - 1, 0)
        return self._raw[i] + decoded - self._decoded[i]

    @property
    def released(self) -> int:
        """How far the filter has settled the input. Offsets far before it may be forgotten."""
        if len(self._decoded) > _MAX_ANCHORS:
            num = bisect_right(self._decoded, min(self.filter.released, self.num_fed - _KEPT_CHARS)) - 1
            if num > 0:
                del self._decoded[:num], self._raw[:num]
        return self.raw_of(self.filter.released)
