"""Streams for clients that ask for them by `Accept`: JSON lines, and plain text.

JSON lines are the chunks of SSE in another framing, so that `SseWriter` writes them. Plain text is the
answer's content and nothing else. It has no way to say that something went wrong, so that an answer that is
not whole ends without the end of its chunked coding: every HTTP client reports that.

Not here: who gets which form (`gateway/accept.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from gateway.frames import json_line
from gateway.outlet import Outlet
from gateway.record import RequestRecord
from gateway.writers import Framing, head, send_error
from pipeline.errors import ClientError, EngineFailed, HeadraceError
from pipeline.events import CONTENT, Finish, TextDelta, ToolCallDelta

# What a proxy and a browser must leave alone: the one would buffer it, the other guess what it is.
_STREAM_HEADERS: Final = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
)
NDJSON_HEADERS: Final = ((b"content-type", b"application/x-ndjson; charset=utf-8"), *_STREAM_HEADERS)
TEXT_HEADERS: Final = ((b"content-type", b"text/plain; charset=utf-8"), *_STREAM_HEADERS)

# A heartbeat is a space before the next line's value: JSON allows it, and many readers of lines fail at an
# empty one. There is no [DONE]: the body's end says it, and a line that is no JSON would stop them, too.
NDJSON: Final = Framing(NDJSON_HEADERS, json_line, ping=b" ", done=b"")


class AnswerBlocked(ClientError):
    """A rule stopped the answer before any of it had left."""

    code = "content_filter"

    def __init__(self) -> None:
        super().__init__("The answer was blocked by a content rule.")


class PlainTextWriter:
    """The content of one choice as it is. Reasoning is left out.

    The head goes out with the first text or the first heartbeat, so that more failures than those of SSE are
    still HTTP errors. After that, `cut` ends the connection of an answer that is not whole.
    """

    def __init__(
        self, outlet: Outlet, record: RequestRecord, cut: Callable[[], None], keeps_text: bool
    ) -> None:
        self._outlet = outlet
        self._record = record
        self._cut = cut
        self._kept: list[str] | None = [] if keeps_text else None
        self._head_sent = False
        self._untold: HeadraceError | None = None  # what plain text cannot say of the answer
        self._cutting: asyncio.Task[None] | None = None
        self.num_frames = 0

    def first(self) -> None:
        pass

    def text(self, index: int, text: str) -> None:
        if not text:
            return
        encoded = text.encode()  # as in JSON, half a surrogate pair raises: nobody's decoder makes one
        if not self._head_sent:
            self._send_head()
        if self._kept is not None:
            self._kept.append(text)
        self.num_frames += 1
        self._outlet.push(encoded)

    def text_writer(self, index: int) -> Callable[[str], None] | None:
        return partial(self.text, index)

    def delta(self, index: int, event: TextDelta | ToolCallDelta) -> None:
        if isinstance(event, ToolCallDelta):  # no tools were asked for; a parser of its own mind saw a call
            self._untold = EngineFailed("The answer holds a tool call, which plain text cannot carry.")
        elif event.channel == CONTENT:
            self.text(index, event.text)

    def finished(self, index: int, finish: Finish) -> None:
        if finish.reason == "content_filter":
            self._untold = AnswerBlocked()

    def take_back(self, index: int) -> bool:
        return False

    def end(self, timings: Callable[[], dict[str, Any]]) -> None:
        if self._untold is not None:
            self.fail(self._untold)
            return
        self._send_head()
        self._outlet.end()

    def fail(self, error: HeadraceError) -> None:
        if not self._head_sent:
            send_error(self._outlet, error, self._record)
        else:
            loop = asyncio.get_running_loop()
            self._cutting = loop.create_task(self._cut_off(), name="cut a plain text off")

    def ping(self) -> None:
        """Only the head: whatever else is sent would be text."""
        self._send_head()

    def whole_text(self) -> str:
        return "".join(self._kept or ())

    async def _cut_off(self) -> None:
        """After all that has left the filter: a task's first step comes after the loop has written it.

        A client that does not read is dropped by who watches over slow readers.
        """
        await self._outlet.flushed()
        self._outlet.drop()
        self._cut()

    def _send_head(self) -> None:
        if not self._head_sent:
            self._head_sent = True
            self.num_frames += 1
            self._record.status = 200
            self._outlet.start(200, head(TEXT_HEADERS, self._record))
