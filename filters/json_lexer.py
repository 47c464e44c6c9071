"""What JSON is made of, for readers that get it in pieces: structure, numbers and names, string escapes.

RFC 8259 to the letter. Not here: what a reader does with it (`json_check.py`, `json_values.py`).
"""

from __future__ import annotations

import re
from typing import Final

WHITESPACE: Final = frozenset(" \t\n\r")
STRUCTURE: Final = frozenset("{}[],:")
# Where a text may stand between two tokens, in the words of a message.
DOCUMENT: Final = "a value"
FIRST_ITEM: Final = "a value or ]"
ITEM: Final = "a value of the list"
MEMBER: Final = "a value of the object"
FIRST_KEY: Final = "a key or }"
KEY: Final = "a key"
COLON: Final = "a colon"
NEXT_ITEM: Final = "a comma or ]"
NEXT_MEMBER: Final = "a comma or }"
END: Final = "nothing more"

_VALUES: Final = frozenset((DOCUMENT, FIRST_ITEM, ITEM, MEMBER))
_KEYS: Final = frozenset((FIRST_KEY, KEY))
_CLOSING: Final = {"}": (FIRST_KEY, NEXT_MEMBER), "]": (FIRST_ITEM, NEXT_ITEM)}
_AFTER: Final = {(",", NEXT_ITEM): ITEM, (",", NEXT_MEMBER): KEY, (":", COLON): MEMBER}


class Structure:
    """What may come next in a JSON text, as one of the constants above.

    `max_depth`: how deep objects and lists may be nested; one byte each.
    """

    __slots__ = ("_is_object", "_max_depth", "expected")

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._is_object = bytearray()  # of each open object or list
        self.expected = DOCUMENT

    @property
    def depth(self) -> int:
        return len(self._is_object)

    @property
    def takes_value(self) -> bool:
        return self.expected in _VALUES

    @property
    def takes_string(self) -> bool:
        return self.expected in _VALUES or self.expected in _KEYS

    def take(self, char: str) -> bool:
        """One of `{}[],:`. False, and nothing has changed, if it may not stand here."""
        if char in "{[":
            if self.expected not in _VALUES or len(self._is_object) >= self._max_depth:
                return False
            self._is_object.append(char == "{")
            self.expected = FIRST_KEY if char == "{" else FIRST_ITEM
            return True
        if char in _CLOSING:
            if self.expected not in _CLOSING[char]:
                return False
            self._is_object.pop()
            self.end_value()
            return True
        after = _AFTER.get((char, self.expected))
        if after is None:
            return False
        self.expected = after
        return True

    def end_string(self) -> None:
        """A string has ended: a key, or a value."""
        if self.expected in _KEYS:
            self.expected = COLON
        else:
            self.end_value()

    def end_value(self) -> None:
        """A value has ended."""
        if not self._is_object:
            self.expected = END
        else:
            self.expected = NEXT_MEMBER if self._is_object[-1] else NEXT_ITEM


def _scalar_table() -> dict[str, dict[str, str]]:
    """Numbers and names as an automaton: state -> character -> state. A name's state is what was read."""
    digits = "0123456789"
    integer = {**dict.fromkeys("123456789", "integer"), "0": "zero"}
    exponent = dict.fromkeys("eE", "e")
    table = {
        "": {"-": "minus", **integer},
        "minus": integer,
        "zero": {".": "point", **exponent},
        "integer": {**dict.fromkeys(digits, "integer"), ".": "point", **exponent},
        "point": dict.fromkeys(digits, "fraction"),
        "fraction": {**dict.fromkeys(digits, "fraction"), **exponent},
        "e": {**dict.fromkeys(digits, "exponent"), **dict.fromkeys("+-", "sign")},
        "sign": dict.fromkeys(digits, "exponent"),
        "exponent": dict.fromkeys(digits, "exponent"),
    }
    for name in ("true", "false", "null"):
        for size, char in enumerate(name):
            table.setdefault(name[:size], {})[char] = name[: size + 1]
        table[name] = {}
    return table


SCALARS: Final = _scalar_table()
SCALAR_STARTS: Final = frozenset(SCALARS[""])
WHOLE_SCALARS: Final = frozenset(("zero", "integer", "fraction", "exponent", "true", "false", "null"))


def read_scalar(text: str, start: int, state: str) -> tuple[int, str]:
    """Goes on with a number or a name: where it stops in this text, and the state there."""
    for at in range(start, len(text)):
        following = SCALARS[state].get(text[at])
        if following is None:
            return at, state
        state = following
    return len(text), state


_SIMPLE: Final = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
SIMPLE_ESCAPES: Final = frozenset(_SIMPLE)
HEX_DIGITS: Final = frozenset("0123456789abcdefABCDEF")
_LOW_SURROGATE: Final = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_BEGUN_LOW_SURROGATE: Final = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")


def read_escape(text: str, start: int) -> tuple[str, int] | None:
    """What an escape at this backslash stands for, and where it ends. None: it may go on after the text.

    A pair of surrogates is one character; one alone is itself. An escape that JSON does not know is only its
    backslash.
    """
    rest = text[start + 1 : start + 12]
    if not rest:
        return None
    if rest[0] in _SIMPLE:
        return _SIMPLE[rest[0]], start + 2
    digits = rest[1:5]
    if rest[0] != "u" or not HEX_DIGITS.issuperset(digits):
        return "\\", start + 1
    if len(digits) < 4:
        return None if start + 1 + len(rest) == len(text) else ("\\", start + 1)
    code = int(digits, 16)
    if 0xD800 <= code < 0xDC00:
        low = rest[5:]
        if _LOW_SURROGATE.fullmatch(low):
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[2:], 16) - 0xDC00
            return chr(code), start + 12
        if _BEGUN_LOW_SURROGATE.fullmatch(low) and start + 1 + len(rest) == len(text):
            return None
    return chr(code), start + 6


def read_loose_escape(text: str, start: int) -> tuple[str, int] | None:
    """The same where the text is not JSON, but may be to a reader that takes more: only what stands for a
    character that changes nothing around it is that character, all else stays as it is written.
    """
    if text[start + 1 : start + 2] not in ("", "u"):
        return text[start : start + 2], start + 2
    escape = read_escape(text, start)
    if escape is None:
        return None
    char, end = escape
    is_harmless = (
        char >= " " and char not in "\"'\\" and not "\x7f" <= char < "\xa0" and not _is_surrogate(char)
    )
    return (char if is_harmless else text[start:end]), end


def _is_surrogate(char: str) -> bool:
    return "\ud800" <= char <= "\udfff"


_TO_ESCAPE: Final = re.compile('["\\\\\x00-\x1f\ud800-\udfff]')
_ESCAPED: Final = {char: "\\" + name for name, char in _SIMPLE.items() if name != "/"}


def encoded(text: str) -> str:
    """The text as it stands between the quotes of a JSON string, with as few escapes as there may be."""
    if _TO_ESCAPE.search(text) is None:
        return text
    return _TO_ESCAPE.sub(lambda found: _ESCAPED.get(found[0]) or f"\\u{ord(found[0]):04x}", text)
