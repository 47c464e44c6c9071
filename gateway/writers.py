"""Hop 12: how an answer's events become a response body. SSE for streams, one JSON document otherwise.

A writer is called in order: `first`, then `text` and `finish` per choice, then `end`; or `fail` at any
time. The response head goes out with the first token or the first heartbeat, so that whatever fails earlier
is still a real HTTP status, which clients retry, and so that `server-timing` knows the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from gateway.error_body import error_response, stream_error
from gateway.frames import DONE, PING, Shape, TextFrames, TokenTexts, data_frame, json_bytes, usage_object
from gateway.outlet import Outlet
from gateway.record import RequestRecord
from pipeline.errors import HeadraceError
from pipeline.events import PositionLogprobs
from pipeline.values import Delivery, FinishReason

SSE_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
JSON_HEADERS: Final = ((b"content-type", b"application/json"),)


class Writer(Protocol):
    """Turns an answer's events into bytes."""

    def first(self) -> None:
        """The first token of any choice has come."""

    def text(self, index: int, text: str) -> None: ...

    def text_with_logprobs(self, index: int, text: str, entries: Sequence[PositionLogprobs]) -> None: ...

    def take_back(self, index: int) -> bool:
        """Forget a choice's text if none of it has left; whether that was so."""

    def finish(self, index: int, finish: FinishReason, stop_reason: int | str | None) -> None: ...

    def end(self, timings: Callable[[], dict[str, Any]]) -> None: ...

    def fail(self, error: HeadraceError) -> None: ...

    def ping(self) -> None:
        """Nothing was written for a while."""

    def whole_text(self) -> str:
        """The first choice's text, as the client has it; empty if it was not kept."""

    @property
    def num_frames(self) -> int: ...


class SseWriter:
    """Frames of `data: {json}`, comments as heartbeats, `[DONE]` only after a whole answer."""

    def __init__(
        self,
        outlet: Outlet,
        shape: Shape,
        texts: TokenTexts,
        record: RequestRecord,
        delivery: Delivery,
        num_choices: int,
    ) -> None:
        self._outlet = outlet
        self._shape = shape
        self._texts = texts
        self._record = record
        self._delivery = delivery
        self._is_continuous = delivery.continuous_usage  # asked for each token
        self._num_choices = num_choices
        self._frames = [TextFrames(shape, index) for index in range(num_choices)]
        self._head_sent = False
        self.num_frames = 0

    def first(self) -> None:
        self._send_head()
        for index in range(self._num_choices):
            opening = self._shape.opening(index)
            if opening is not None:
                self._choice(opening)

    def text(self, index: int, text: str) -> None:
        if self._is_continuous:
            self._choice(self._shape.delta(index, text, None))
            return
        self.num_frames += 1
        self._outlet.push(self._frames[index].frame(text))

    def text_with_logprobs(self, index: int, text: str, entries: Sequence[PositionLogprobs]) -> None:
        self._choice(self._shape.delta(index, text, self._shape.logprobs(entries, self._texts)))

    def take_back(self, index: int) -> bool:
        return False

    def finish(self, index: int, finish: FinishReason, stop_reason: int | str | None) -> None:
        self._choice(self._shape.ending(index, finish, stop_reason))

    def end(self, timings: Callable[[], dict[str, Any]]) -> None:
        last = b""
        if self._delivery.include_usage:
            chunk = self._shape.chunk([]) | {"usage": usage_object(self._record.usage)}
            if self._delivery.include_timings:
                chunk["timings"] = timings()
            last = data_frame(chunk)
        self.num_frames += 1
        self._outlet.end(last + DONE)

    def fail(self, error: HeadraceError) -> None:
        if not self._head_sent:
            send_error(self._outlet, error, self._record)
            return
        self.num_frames += 1
        self._outlet.end(data_frame(stream_error(error)))

    def ping(self) -> None:
        self._send_head()
        self.num_frames += 1
        self._outlet.push(PING)

    def whole_text(self) -> str:
        return ""

    def _choice(self, choice: Any) -> None:
        chunk = self._shape.chunk([choice])
        if self._delivery.continuous_usage:
            chunk["usage"] = usage_object(self._record.usage)
        self.num_frames += 1
        self._outlet.push(data_frame(chunk))

    def _send_head(self) -> None:
        if not self._head_sent:
            self._head_sent = True
            self._record.status = 200
            self._outlet.start(200, head(SSE_HEADERS, self._record))


class KeepingSseWriter(SseWriter):
    """A stream of one choice that also keeps its text."""

    def __init__(
        self,
        outlet: Outlet,
        shape: Shape,
        texts: TokenTexts,
        record: RequestRecord,
        delivery: Delivery,
        num_choices: int,
    ) -> None:
        super().__init__(outlet, shape, texts, record, delivery, num_choices)
        self._kept: list[str] = []

    def text(self, index: int, text: str) -> None:
        self._kept.append(text)
        super().text(index, text)

    def text_with_logprobs(self, index: int, text: str, entries: Sequence[PositionLogprobs]) -> None:
        self._kept.append(text)
        super().text_with_logprobs(index, text, entries)

    def whole_text(self) -> str:
        return "".join(self._kept)


class JsonWriter:
    """Collects the whole answer; nothing is sent before its end."""

    def __init__(
        self, outlet: Outlet, shape: Shape, texts: TokenTexts, record: RequestRecord, num_choices: int
    ) -> None:
        self._outlet = outlet
        self._shape = shape
        self._texts = texts
        self._record = record
        self._parts: list[list[str]] = [[] for _ in range(num_choices)]
        self._entries: list[list[PositionLogprobs] | None] = [None] * num_choices
        self._choices: list[Any] = [None] * num_choices
        self.num_frames = 0

    def first(self) -> None:
        pass

    def text(self, index: int, text: str) -> None:
        self._parts[index].append(text)

    def text_with_logprobs(self, index: int, text: str, entries: Sequence[PositionLogprobs]) -> None:
        self._parts[index].append(text)
        self._entries[index] = collected = self._entries[index] or []
        collected += entries

    def take_back(self, index: int) -> bool:
        self._parts[index].clear()
        self._entries[index] = None
        return True

    def whole_text(self) -> str:
        return "".join(self._parts[0])

    def finish(self, index: int, finish: FinishReason, stop_reason: int | str | None) -> None:
        entries = self._entries[index]
        logprobs = None if entries is None else self._shape.logprobs(entries, self._texts)
        self._choices[index] = self._shape.whole(
            index, "".join(self._parts[index]), logprobs, finish, stop_reason
        )

    def end(self, timings: Callable[[], dict[str, Any]]) -> None:
        body = json_bytes(self._shape.document(self._choices, usage_object(self._record.usage)))
        self._record.status = 200
        self._outlet.start(200, [*head(JSON_HEADERS, self._record), (b"content-length", b"%d" % len(body))])
        self._outlet.end(body)

    def fail(self, error: HeadraceError) -> None:
        send_error(self._outlet, error, self._record)

    def ping(self) -> None:
        pass


def head(headers: Sequence[tuple[bytes, bytes]], record: RequestRecord) -> list[tuple[bytes, bytes]]:
    """Response headers of an answer: its kind, its id, what is known of its stages, what was left out."""
    all_headers = [
        *headers,
        (b"x-request-id", record.request_id.encode()),
        (b"server-timing", record.server_timing()),
    ]
    context = record.context()
    return all_headers if context is None else [*all_headers, (b"x-headrace-context", context)]


def send_error(outlet: Outlet, error: Exception, record: RequestRecord) -> None:
    """The whole response is an error."""
    status, headers, body = error_response(error, record.request_id)
    record.status = status
    outlet.start(
        status,
        [*headers, (b"x-request-id", record.request_id.encode()), (b"content-length", b"%d" % len(body))],
    )
    outlet.end(body)
