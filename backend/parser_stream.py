"""Tool calls that leave while the model writes them, for formats whose arguments are one JSON object.

A reader runs beside the gate (`parser_gates.py`) and reads what that keeps. A call begins when nothing but
arguments can follow: its name is a tool of the request, and the `{` of its arguments has come. From there on
they leave as they pass, in the model's own spelling. Where a reader cannot follow (a name of no tool,
arguments that are no object, a key twice, …) it stops for good, and the whole parse gives the rest.

So a reader never says what is no call; `parser_parts.py` holds what it said against the whole parse. Each
character is looked at once, and no split of the text changes what leaves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any, Final

from backend.parser_ending import Begun
from backend.parser_gates import overlap
from pipeline.events import TOOL_ARGUMENTS, TOOL_NAME, Fragment
from pipeline.json_span import JSON_WHITESPACE, JsonSpan, JsonString

# A reader, a text and an index -> the next index. A function, since a bound method would make a cycle, and
# readers would wait for the garbage collector.
_Step = Callable[[Any, str, int], int]
_MAX_NAME_CHARS: Final = 256  # what is longer is no name of a tool

# Where a reader is between two characters of a call that is an object.
_OPEN: Final = "open"
_KEY: Final = "key"
_COLON: Final = "colon"
_VALUE: Final = "value"
_AFTER_VALUE: Final = "after value"
_KEY_TEXT: Final = "key text"
_NAME_TEXT: Final = "name text"
_OTHER_TEXT: Final = "other text"
_ARGUMENTS: Final = "arguments"
_END: Final = "end"
_LOST: Final = "lost"
_FOLLOWS: Final[dict[str, dict[str, str]]] = {
    _OPEN: {"{": _KEY},
    _KEY: {'"': _KEY_TEXT},
    _COLON: {":": _VALUE},
    _AFTER_VALUE: {",": _KEY, "}": _END},
}


class CallStream:
    """One answer's calls, read from where the gate has opened. A reader of one format is a subclass.

    `begin` leads to each next call. `end` follows its last character, but for white space. `has_begun`: some
    call has.
    """

    __slots__ = (
        "_arguments",
        "_begin",
        "_end",
        "_names",
        "_out",
        "_span",
        "_tail",
        "_tool_names",
        "_wanted",
        "_where",
        "has_begun",
    )

    def __init__(self, tool_names: Collection[str], begin: str, end: str) -> None:
        self._tool_names = tool_names
        self._begin = begin
        self._end = end
        self._where: _Step = CallStream._seek
        self._tail = ""  # may be the beginning of `begin`
        self._wanted = ""  # of `end`: what has still to come
        self._span = JsonSpan()
        self._names: list[str] = []
        self._arguments: list[list[str]] = []  # of each call, in pieces
        self._out: list[Fragment] = []
        self.has_begun = False

    def feed(self, text: str) -> bool:
        """The next text. Whether a call has begun."""
        position = 0
        while position < len(text):
            position = self._where(self, text, position)
        return self.has_begun

    def take(self) -> Sequence[Fragment]:
        """What may leave since the last call."""
        out, self._out = self._out, []
        return out

    @property
    def begun(self) -> Sequence[Begun]:
        """The calls that have begun."""
        return [Begun(name, "".join(self._arguments[at])) for at, name in enumerate(self._names)]

    def _open(self) -> _Step:
        """How to read on after `begin`."""
        raise NotImplementedError

    def _begin_call(self, name: str) -> None:
        self._out.append(Fragment(TOOL_NAME, name, len(self._names)))
        self._names.append(name)
        self._arguments.append([])
        self.has_begun = True

    def _add_arguments(self, piece: str) -> None:
        self._arguments[-1].append(piece)
        self._out.append(Fragment(TOOL_ARGUMENTS, piece, len(self._names) - 1))

    def _close(self) -> None:
        """The call has ended, but for what closes it."""
        self._wanted = self._end
        self._where = CallStream._ending if self._end else CallStream._next

    def _seek(self, text: str, start: int) -> int:
        joined = self._tail + text[start:]
        found = joined.find(self._begin)
        if found < 0:
            self._tail = joined[len(joined) - overlap(joined, self._begin) :]
            return len(text)
        start += found + len(self._begin) - len(self._tail)
        self._tail = ""
        self._where = self._open()
        return start

    def _ending(self, text: str, start: int) -> int:
        wanted = self._wanted
        if len(wanted) == len(self._end) and text[start] != wanted[0] and text[start] in JSON_WHITESPACE:
            return start + 1
        piece = text[start : start + len(wanted)]
        if not wanted.startswith(piece):
            return self._lose(text)
        self._wanted = wanted[len(piece) :]
        if not self._wanted:
            self._where = CallStream._seek
        return start + len(piece)

    def _next(self, text: str, start: int) -> int:
        """Without an `end`: vLLM does not see a call that follows at once."""
        self._where = CallStream._seek
        return self._lose(text) if text.startswith(self._begin, start) else start

    def _lose(self, text: str, start: int = 0) -> int:
        """Nothing more can be read."""
        self._where = CallStream._lose
        return len(text)


class ObjectCalls(CallStream):
    """A call is `{"name": …, "arguments": {…}}`; `argument_keys` are the words for the latter.

    Without `begin` every `{` begins one. Arguments that come before their name wait for it. Other keys may
    have strings.
    """

    __slots__ = ("_argument_keys", "_at", "_early", "_first", "_key", "_keys", "_name", "_string")

    def __init__(
        self, tool_names: Collection[str], argument_keys: Set[str], begin: str = "", end: str = ""
    ) -> None:
        super().__init__(tool_names, begin or "{", end)
        self._argument_keys = argument_keys
        self._first = _OPEN if begin else _KEY
        self._string = JsonString()
        self._at = self._first
        self._key = ""
        self._keys: set[str] = set()
        self._name = ""
        self._early: list[str] | None = None  # arguments that wait for their name
        self._where = self._open()

    def _open(self) -> _Step:
        self._at = self._first
        self._keys.clear()
        self._name, self._early = "", None
        return ObjectCalls._structure

    def _structure(self, text: str, start: int) -> int:
        char = text[start]
        if char in JSON_WHITESPACE:
            return start + 1
        self._at = self._value(char) if self._at == _VALUE else _FOLLOWS[self._at].get(char, _LOST)
        if self._at == _LOST:
            return self._lose(text)
        if self._at in (_KEY_TEXT, _NAME_TEXT, _OTHER_TEXT):
            self._where = ObjectCalls._read_string
            return start
        if self._at == _ARGUMENTS:
            self._where = ObjectCalls._pass_arguments
            return start
        if self._at == _END:
            if self._argument_keys.isdisjoint(self._keys) or not self._name:
                return self._lose(text)
            self._close()
        return start + 1

    def _value(self, char: str) -> str:
        """What begins here, by its key."""
        if self._key not in self._argument_keys:
            text = _NAME_TEXT if self._key == "name" else _OTHER_TEXT
            return text if char == '"' else _LOST
        if char != "{" or len(self._argument_keys & self._keys) > 1:
            return _LOST
        if self._name:
            self._begin_call(self._name)
        else:
            self._early = []
        return _ARGUMENTS

    def _read_string(self, text: str, start: int) -> int:
        end = self._string.end(text, start)
        if end is None:
            return len(text)
        self._where = ObjectCalls._structure
        is_read = self._end_key if self._at == _KEY_TEXT else self._end_text
        return end if is_read(self._string.value) else self._lose(text)

    def _end_key(self, key: str) -> bool:
        """Whether it can be a key of a call."""
        if not key or key in self._keys:
            return False
        self._key, self._at = key, _COLON
        self._keys.add(key)
        return True

    def _end_text(self, string: str) -> bool:
        """Whether what has been read before it can be a call, with this name or other text."""
        is_name, self._at = self._at == _NAME_TEXT, _AFTER_VALUE
        if not is_name:
            return bool(string)
        if string not in self._tool_names:
            return False
        self._name = string
        if self._early is None:
            return True
        arguments = "".join(self._early)
        if not _is_json(arguments):
            return False
        self._begin_call(string)
        self._add_arguments(arguments)
        return True

    def _pass_arguments(self, text: str, start: int) -> int:
        end = self._span.end(text, start)
        piece = text[start:end]
        if self._name:
            self._add_arguments(piece)
        elif self._early is not None:
            self._early.append(piece)
        if end is None:
            return len(text)
        self._at, self._where = _AFTER_VALUE, ObjectCalls._structure
        return end


class NamedCalls(CallStream):
    """A call is a name in clear text, `separator`, and an object."""

    __slots__ = ("_name", "_separator")

    def __init__(self, tool_names: Collection[str], begin: str, separator: str, end: str) -> None:
        super().__init__(tool_names, begin, end)
        self._separator = separator
        self._name = ""

    def _open(self) -> _Step:
        self._name = ""
        return NamedCalls._read_name

    def _read_name(self, text: str, start: int) -> int:
        before = len(self._name)
        self._name += text[start:]
        found = self._name.find(self._separator)
        if found < 0:
            is_long = len(self._name) > _MAX_NAME_CHARS + len(self._separator)
            return self._lose(text) if is_long else len(text)
        self._name, start = self._name[:found], start + found + len(self._separator) - before
        if self._name not in self._tool_names:
            return self._lose(text)
        self._where = NamedCalls._before_arguments
        return start

    def _before_arguments(self, text: str, start: int) -> int:
        if text[start] in JSON_WHITESPACE:
            return start + 1
        if text[start] != "{":
            return self._lose(text)
        self._begin_call(self._name)
        self._where = NamedCalls._pass_arguments
        return start

    def _pass_arguments(self, text: str, start: int) -> int:
        end = self._span.end(text, start)
        self._add_arguments(text[start:end])
        if end is None:
            return len(text)
        self._close()
        return end


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
