"""The answer of a request that does not stream: one JSON document, once all of it is there.

Not here: streams (`writers.py`), and what stands in the document (`frames.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.answer_logprobs import TokenTexts
from gateway.frames import Shape, json_bytes, usage_object
from gateway.outlet import Outlet
from gateway.record import RequestRecord
from gateway.whole_message import WholeMessage
from gateway.writers import JSON_HEADERS, WriteText, head, send_error
from pipeline.errors import HeadraceError
from pipeline.events import Finish, TextDelta, ToolCallDelta


class JsonWriter:
    """Collects the whole answer; nothing is sent before its end."""

    def __init__(
        self, outlet: Outlet, shape: Shape, texts: TokenTexts, record: RequestRecord, num_choices: int
    ) -> None:
        self._outlet = outlet
        self._shape = shape
        self._texts = texts
        self._record = record
        self._messages = [WholeMessage() for _ in range(num_choices)]
        self._choices: list[Any] = [None] * num_choices
        self.num_frames = 0

    def first(self) -> None:
        pass

    def text(self, index: int, text: str) -> None:
        self._messages[index].content.append(text)

    def text_writer(self, index: int) -> WriteText | None:
        return self._messages[index].content.append

    def delta(self, index: int, event: TextDelta | ToolCallDelta) -> None:
        self._messages[index].add(event)

    def finished(self, index: int, finish: Finish) -> None:
        message = self._messages[index]
        entries = message.logprobs
        logprobs = None if entries is None else self._shape.logprobs(entries, self._texts)
        self._choices[index] = self._shape.whole(index, message, logprobs, finish)

    def take_back(self, index: int) -> bool:
        self._messages[index] = WholeMessage()
        return True

    def whole_text(self) -> str:
        return self._messages[0].text

    def end(self, timings: Callable[[], dict[str, Any]]) -> None:
        body = json_bytes(self._shape.document(self._choices, usage_object(self._record.usage)))
        self._record.status = 200
        self._outlet.start(200, [*head(JSON_HEADERS, self._record), (b"content-length", b"%d" % len(body))])
        self._outlet.end(body)

    def fail(self, error: HeadraceError) -> None:
        send_error(self._outlet, error, self._record)

    def ping(self) -> None:
        pass
