"""Where a tool call can begin: what of a text is content for certain, and what must wait.

vLLM's parsers of whole answers decide only at the end what is a call. A gate knows, for one family of them,
the earliest place from which that decision can go either way. All before it streams; all after it is kept,
until no call can come of it (then it streams again) or the text ends (then the whole parse decides).

A gate may keep too much, never too little. It looks at each character once. No vLLM here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final, Protocol

_IN_STRING: Final = re.compile(r'[^"\\\x00-\x1f]*')
_BETWEEN: Final = re.compile(r'[^"{}\[\]]*')
_MAX_NAME_CHARS: Final = 256  # of a function in a Python call; what is longer is kept without a look


class Gate(Protocol):
    """Text of one answer in, content out."""

    @property
    def is_open(self) -> bool:
        """Whether a call may have begun in what is kept."""

    def feed(self, text: str) -> str:
        """What is content now."""

    def rest(self) -> str:
        """What is kept: not yet content, and perhaps never."""


class Watch(Protocol):
    """Reads what follows a marker."""

    def feed(self, text: str) -> bool:
        """Whether a call may come of it."""


class ObjectWatch:
    """Reads what may be `{"name": …, "arguments": …}` and says when it is not.

    Exact about the first object: at its end `json.loads` decides. `feed` is False from there on where it is
    no call. Before that it is False where no JSON object begins so, or a string of it holds a line break.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "_keys", "_parts", "_significant", "is_whole")

    def __init__(self, argument_keys: tuple[str, ...]) -> None:
        self._keys = argument_keys
        self._parts: list[str] = []
        self._significant = ""  # the first two characters that are not blank
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.is_whole = False  # the object has ended, and is a call

    def feed(self, text: str) -> bool:
        """Whether it can still be a call."""
        if self.is_whole:
            return True
        if len(self._significant) < 2:
            self._significant = (self._significant + "".join(text.split()))[:2]
            if not ('{"'.startswith(self._significant)):
                return False
        at = 0
        while at < len(text):
            at = self._string(text, at) if self._in_string else self._structure(text, at)
            if at < 0:
                return False
            if self._depth == 0 and self._parts_closed(text, at):
                return self._judge(text[:at])
        self._parts.append(text)
        return True

    def _string(self, text: str, at: int) -> int:
        """On to the end of the string or of the text; -1 where JSON allows no such character."""
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _IN_STRING.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
        elif text[at] == '"':
            self._in_string = False
        else:
            return -1
        return at + 1

    def _structure(self, text: str, at: int) -> int:
        """Past the next character that opens or closes something."""
        found = _BETWEEN.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        if text[at] == '"':
            self._in_string = True
        else:
            self._depth += 1 if text[at] in "{[" else -1
        return at + 1

    def _parts_closed(self, text: str, at: int) -> bool:
        return text[at - 1 : at] in ("}", "]") and not self._in_string

    def _judge(self, end: str) -> bool:
        try:
            found = json.loads("".join([*self._parts, end]))
        except (ValueError, RecursionError):
            return False
        self.is_whole = (
            isinstance(found, dict) and "name" in found and any(key in found for key in self._keys)
        )
        return self.is_whole


class MarkerGate:
    """A call begins with a marker; nothing that follows takes that back.

    `stream` reads along. Once that is certain of a call, so is the gate.
    """

    __slots__ = ("_is_shut", "_markers", "_parts", "_pattern", "_starts", "_stream", "_tail", "is_open")

    def __init__(self, *markers: str, stream: Watch | None = None) -> None:
        self._stream = stream
        self._markers = markers
        self._starts = frozenset(marker[0] for marker in markers)
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._tail = ""  # may be the beginning of a marker
        self._parts: list[str] = []
        self.is_open = False
        self._is_shut = False  # no call can come any more

    def feed(self, text: str) -> str:
        """See `Gate`."""
        if self._is_shut:
            return text
        if self.is_open:
            self._parts.append(text)
            return "" if self._goes_on(text) else self._shut()
        if not self._tail and self._starts.isdisjoint(text):
            return text
        return self._look(self._tail + text)

    def rest(self) -> str:
        """See `Gate`."""
        return self._tail + "".join(self._parts)

    def _look(self, text: str) -> str:
        found = self._pattern.search(text)
        if found is None:
            kept = max(overlap(text, marker) for marker in self._markers)
            self._tail = text[len(text) - kept :]
            return text[: len(text) - kept]
        self._tail = ""
        self._parts = [text[found.start() :]]
        self.is_open = True
        content = text[: found.start()]
        return content if self._goes_on(text[found.end() :]) else content + self._shut()

    def _goes_on(self, text: str) -> bool:
        """Whether there can still be a call, with this text after the marker."""
        is_call = self._stream is not None and self._stream.feed(text)
        return is_call or self._can_be_call(text)

    def _can_be_call(self, text: str) -> bool:
        return True

    def _shut(self) -> str:
        self._is_shut = True
        self.is_open = False
        text, self._parts = self.rest(), []
        return text


class TaggedObjectGate(MarkerGate):
    """A JSON object after a marker. One that cannot be read makes vLLM take the whole answer for content."""

    __slots__ = ("_watch",)

    def __init__(self, marker: str, argument_keys: tuple[str, ...], *, stream: Watch | None = None) -> None:
        super().__init__(marker, stream=stream)
        self._watch = ObjectWatch(argument_keys)

    def _can_be_call(self, text: str) -> bool:
        return self._watch.feed(text)


class BareObjectGate(MarkerGate):
    """A JSON object without any marker: every `{` may begin one, and the first decides for all."""

    __slots__ = ("_watch",)

    def __init__(self, argument_keys: tuple[str, ...], *, stream: Watch | None = None) -> None:
        super().__init__("{", stream=stream)
        self._watch = ObjectWatch(argument_keys)
        self._watch.feed("{")

    def _can_be_call(self, text: str) -> bool:
        return self._watch.feed(text)


class PythonGate:
    """`[name(` at the very beginning, perhaps after `prefix`: all of the answer is calls, or nothing is."""

    __slots__ = ("_is_shut", "_kept", "_parts", "_prefix", "is_open")

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._kept = ""  # while undecided
        self._parts: list[str] = []
        self.is_open = False
        self._is_shut = False

    def feed(self, text: str) -> str:
        """See `Gate`."""
        if self._is_shut:
            return text
        if self.is_open:
            self._parts.append(text)
            return ""
        self._kept += text
        can_be = self._can_be_call(self._kept)
        if can_be is False:
            self._is_shut = True
            text, self._kept = self._kept, ""
            return text
        self.is_open = bool(can_be)
        return ""

    def rest(self) -> str:
        """See `Gate`."""
        return self._kept + "".join(self._parts)

    def _can_be_call(self, text: str) -> bool | None:
        """None while that is open. With the prefix it stays possible: the whole parse drops that."""
        if self._prefix and text:
            if text.startswith(self._prefix):
                return True
            if self._prefix.startswith(text):
                return None
        found = re.match(r"\[(?:[a-zA-Z]\w*)?", text)
        if found is None:
            return False if text else None
        if found.end() == len(text):
            return True if len(text) > _MAX_NAME_CHARS else None
        return text[found.end()] == "(" and found.end() > 1


class Markers:
    """Tells plain text from text that has a marker, or ends with what may begin one. 0.2 us a token."""

    __slots__ = ("_pattern", "_starts")

    def __init__(self, markers: Sequence[str], held: Sequence[str]) -> None:
        """`held`: no markers, but a text that ends with the beginning of one of them is not plain either."""
        self._starts = frozenset(each[0] for each in (*markers, *held) if each)
        beginnings = {each[:size] for each in (*markers, *held) for size in range(1, len(each))}
        whole = "|".join(sorted(map(re.escape, filter(None, markers)), key=len, reverse=True))
        self._pattern = re.compile(f"{whole}|(?:{'|'.join(map(re.escape, sorted(beginnings)))})\\Z")

    def touch(self, text: str) -> bool:
        """Whether the text is not plain."""
        return not self._starts.isdisjoint(text) and self._pattern.search(text) is not None


def overlap(text: str, marker: str) -> int:
    """How many of the last characters of `text` may be the beginning of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
