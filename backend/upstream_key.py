"""The gateway's key for its upstream servers: shown to them, and kept out of their errors.

They may quote a request's headers, and clients get those words. Not here: answers, and bodies that are
passed on, which stream as they are.
"""

from __future__ import annotations

from typing import Any, Final

from backend.http_ports import Headers
from pipeline.errors import HeadraceError
from pipeline.ports import Sink, TextSink

HIDDEN: Final = "***"
MIN_CHARS: Final = 4  # of a key, or of its beginning; less is no secret, and occurs in words


def key_headers(key: str | None) -> Headers:
    """How a server is shown the gateway's key; none where it has none."""
    return () if key is None else ((b"authorization", b"Bearer " + key.encode()),)


class KeylessSink:
    """A sink, `Sink` or `TextSink`, to whose errors the key is unknown. Its other methods are its own."""

    __slots__ = ("_fail", "_key", "ended", "text", "tokens")

    def __init__(self, sink: Sink | TextSink, key: str) -> None:
        self._key = key
        self._fail = sink.failed
        self.tokens: Any = getattr(sink, "tokens", None)
        self.text: Any = getattr(sink, "text", None)
        self.ended: Any = getattr(sink, "ended", None)

    def failed(self, error: HeadraceError) -> None:
        error.args = tuple(hidden(each, self._key) if isinstance(each, str) else each for each in error.args)
        self._fail(error)


def hidden(text: str, key: str) -> str:
    """The text without the key, nor a beginning of it where the text was cut off within one."""
    if len(key) < MIN_CHARS:
        return text
    text = text.replace(key, HIDDEN)
    for num in range(min(len(key) - 1, len(text)), MIN_CHARS - 1, -1):
        if text.endswith(key[:num]):
            return text[:-num] + HIDDEN
    return text
