"""What an engine says that is forced to call tools: JSON by a schema of `pipeline.tool_choice` -> fragments.

Read as it passes: each character once, arguments in the model's own spelling and only with their end looked
for. A text that has not the form (of an engine that ignores the schema) is not lost, it is content. Not here:
the formats in which models call tools by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeline.events import CONTENT, TOOL_ARGUMENTS, TOOL_NAME, Fragment
from pipeline.json_span import JSON_WHITESPACE, OPENS_SPAN, JsonSpan, JsonString
from pipeline.ports import OutputParser

# Where a parser is in the text: between two characters of the structure, …
_ARRAY: Final = "array"
_ITEM: Final = "item"
_KEY: Final = "key"
_COLON: Final = "colon"
_AFTER_VALUE: Final = "after value"
_NEXT: Final = "next"
_DONE: Final = "done"
# … before a value, in a string that is read, in arguments that pass, …
_VALUE: Final = "value"
_KEY_TEXT: Final = "key text"
_NAME_TEXT: Final = "name text"
_ARGUMENTS: Final = "arguments"
_BARE: Final = "bare"  # arguments without brackets or quotes, by which their end would be found
# … or past what can be read.
_OTHER: Final = "other"

_FOLLOWS: Final[dict[str, dict[str, str]]] = {
    _ARRAY: {"[": _ITEM},
    _ITEM: {"{": _KEY},
    _KEY: {'"': _KEY_TEXT},
    _COLON: {":": _VALUE},
    _AFTER_VALUE: {",": _KEY, "}": _NEXT},
    _NEXT: {",": _ITEM, "]": _DONE},
    _DONE: {},
}


class NamedCall:
    """The text is the arguments of one call, whose name is known. An `OutputParser`.

    White space around the arguments is dropped; what else follows their end is content.
    """

    __slots__ = ("_name", "_span", "_where")

    def __init__(self, name: str) -> None:
        self._name = name
        self._span = JsonSpan()
        self._where = _VALUE

    def feed(self, text: str, ids: Sequence[int]) -> Sequence[Fragment]:
        """`ids` are not looked at."""
        out: list[Fragment] = []
        if self._where == _VALUE:
            text = text.lstrip(JSON_WHITESPACE)
            if not text:
                return ()
            out.append(Fragment(TOOL_NAME, self._name))
            self._where = _ARGUMENTS if text[0] in OPENS_SPAN else _BARE
        if self._where == _ARGUMENTS:
            end = self._span.end(text, 0)
            if text:
                out.append(Fragment(TOOL_ARGUMENTS, text[:end]))
            if end is None:
                return out
            self._where, text = _DONE, text[end:]
        if self._where == _DONE:
            text = text.lstrip(JSON_WHITESPACE)
            if text:
                self._where = _OTHER
        if text:
            out.append(Fragment(TOOL_ARGUMENTS if self._where == _BARE else CONTENT, text))
        return out

    def finish(self) -> Sequence[Fragment]:
        return ()


class RequiredCalls:
    """The text is a JSON array of `{"name": …, "parameters": {…}}`, one per call. An `OutputParser`.

    A name leaves when it is complete, arguments as they pass; arguments that come before their name wait for
    it. From the first character that does not fit, all is content, together with the call that was not yet
    begun. A text that ends in the middle of the structure gives what has left of that call, and no more.
    """

    __slots__ = (
        "_call",
        "_early",
        "_has_name",
        "_keeps",
        "_key",
        "_keys",
        "_raw",
        "_span",
        "_string",
        "_where",
    )

    def __init__(self) -> None:
        self._where = _ARRAY
        self._call = 0
        self._key = ""
        self._keys: set[str] = set()  # of this call
        self._has_name = False
        self._string = JsonString()
        self._span = JsonSpan()
        self._early: list[str] = []  # arguments that wait for their name
        self._raw: list[str] = []  # what has been read and becomes content if this call does not come about
        self._keeps = True

    def feed(self, text: str, ids: Sequence[int]) -> Sequence[Fragment]:
        """`ids` are not looked at."""
        out: list[Fragment] = []
        position = 0
        while position < len(text):
            if self._where == _ARGUMENTS:
                position = self._pass_arguments(text, position, out)
            elif self._where in (_KEY_TEXT, _NAME_TEXT):
                position = self._read_string(text, position, out)
            elif self._where == _OTHER:
                out.append(Fragment(CONTENT, "".join(self._raw) + text[position:]))
                self._raw.clear()
                break
            else:
                position = self._step(text, position, out)
        return out

    def finish(self) -> Sequence[Fragment]:
        return ()  # a call that was cut off before its name is nothing; the finish says that it was cut off

    def _step(self, text: str, position: int, out: list[Fragment]) -> int:
        """Over one character of the structure; or to the same, which begins something else."""
        char = text[position]
        if char not in JSON_WHITESPACE:
            follows = self._value(char) if self._where == _VALUE else _FOLLOWS[self._where].get(char, _OTHER)
            if follows == _NEXT:
                follows = self._end_call(out)
            self._where = follows
            if follows in (_ARGUMENTS, _KEY_TEXT, _NAME_TEXT, _OTHER):
                return position
        self._keeps = self._keeps or char == "{"
        self._keep(char)
        return position + 1

    def _value(self, char: str) -> str:
        """What begins here, by its key."""
        if self._key == "name" and char == '"':
            return _NAME_TEXT
        if self._key == "parameters" and char in OPENS_SPAN:
            return _ARGUMENTS
        return _OTHER

    def _read_string(self, text: str, start: int, out: list[Fragment]) -> int:
        end = self._string.end(text, start)
        self._keep(text[start:end])
        if end is None:
            return len(text)
        string = self._string.value
        self._where = self._end_key(string) if self._where == _KEY_TEXT else self._end_name(string, out)
        return end

    def _end_key(self, key: str) -> str:
        if key in self._keys:
            return _OTHER
        self._key = key
        self._keys.add(key)
        return _COLON

    def _end_name(self, name: str, out: list[Fragment]) -> str:
        if not name:
            return _OTHER
        out.append(Fragment(TOOL_NAME, name, self._call))
        if self._early:
            out.append(Fragment(TOOL_ARGUMENTS, "".join(self._early), self._call))
            self._early.clear()
        self._has_name, self._keeps = True, False
        self._raw.clear()
        return _AFTER_VALUE

    def _pass_arguments(self, text: str, start: int, out: list[Fragment]) -> int:
        end = self._span.end(text, start)
        piece = text[start:end]
        if self._has_name:
            out.append(Fragment(TOOL_ARGUMENTS, piece, self._call))
        else:
            self._early.append(piece)
            self._keep(piece)
        if end is None:
            return len(text)
        self._where = _AFTER_VALUE
        return end

    def _end_call(self, out: list[Fragment]) -> str:
        if not self._has_name:
            return _OTHER
        if "parameters" not in self._keys:
            out.append(Fragment(TOOL_ARGUMENTS, "{}", self._call))  # all arguments are JSON
        self._call += 1
        self._has_name = False
        self._keys.clear()
        return _NEXT

    def _keep(self, piece: str) -> None:
        if self._keeps:
            self._raw.append(piece)


class Forced:
    """Reasoning first, if a parser for it is given; its content is read as the calls. An `OutputParser`."""

    __slots__ = ("_calls", "_inner")

    def __init__(self, inner: OutputParser | None, calls: OutputParser) -> None:
        self._inner = inner
        self._calls = calls

    def feed(self, text: str, ids: Sequence[int]) -> Sequence[Fragment]:
        if self._inner is None:
            return self._calls.feed(text, ids)
        return self._called(self._inner.feed(text, ids))

    def finish(self) -> Sequence[Fragment]:
        last = [] if self._inner is None else self._called(self._inner.finish())
        return [*last, *self._calls.finish()]

    def _called(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        out: list[Fragment] = []
        for fragment in fragments:
            if fragment.channel == CONTENT:
                out += self._calls.feed(fragment.text, ())
            else:
                out.append(fragment)
        return out
