"""Hop 12: how an answer's events become a response body; here SSE. One JSON document is `json_writer.py`,
what clients get that ask for plain text or JSON lines is in `text_writers.py`.

A writer is called in order: `first`, then `text`, `delta` and `finished` per choice, then `end`; or `fail`
at any time. The response head goes out with the first token or the first heartbeat, so that whatever fails
earlier is still a real HTTP status, which clients retry, and so that `server-timing` knows the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gateway.answer_logprobs import TokenTexts
from gateway.error_body import error_response, stream_error
from gateway.frames import (
    DONE,
    PING,
    TEXT_MARK,
    ContentFrames,
    Shape,
    data_frame,
    json_string,
    text_template,
    usage_object,
)
from gateway.outlet import Body
from gateway.record import RequestRecord
from gateway.whole_message import new_call_id
from pipeline.errors import HeadraceError
from pipeline.events import CONTENT, Finish, TextDelta, ToolCallDelta
from pipeline.values import Delivery

SSE_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
JSON_HEADERS: Final = ((b"content-type", b"application/json"),)
WriteText = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Framing:
    """What stands around the chunks of a stream: `frame` makes the bytes of one, `ping` those of silence."""

    headers: Sequence[tuple[bytes, bytes]]
    frame: Callable[[Any], bytes]
    ping: bytes
    done: bytes


SSE: Final = Framing(SSE_HEADERS, data_frame, PING, DONE)


class Writer(Protocol):
    """Turns an answer's events into bytes."""

    def first(self) -> None:
        """The first token of any choice has come."""

    def text(self, index: int, text: str) -> None:
        """Content without logprobs: the token path."""

    def text_writer(self, index: int) -> WriteText | None:
        """What does as `text` for this choice; None: each `text` needs to find the record up to date.

        Asked for when the choice has written something.
        """

    def delta(self, index: int, event: TextDelta | ToolCallDelta) -> None:
        """Anything that a choice says."""

    def finished(self, index: int, finish: Finish) -> None: ...

    def take_back(self, index: int) -> bool:
        """Forget a choice's text if none of it has left; whether that was so."""

    def end(self, timings: Callable[[], dict[str, Any]]) -> None: ...

    def fail(self, error: HeadraceError) -> None: ...

    def ping(self) -> None:
        """Nothing was written for a while."""

    def whole_text(self) -> str:
        """The first choice's content, as the client has it.

        Empty if it was not kept, or if tool calls came with it: then it is not all that the next turn will
        have of this message. Reasoning does not count: few clients send it back, and templates drop it.
        """

    @property
    def num_frames(self) -> int: ...


class SseWriter:
    """Frames of `data: {json}`, comments as heartbeats, `[DONE]` only after a whole answer.

    Another `framing` puts the same chunks on the wire in another way.
    """

    def __init__(
        self,
        outlet: Body,
        shape: Shape,
        texts: TokenTexts,
        record: RequestRecord,
        delivery: Delivery,
        num_choices: int,
        framing: Framing = SSE,
        keeps_text: bool = False,
    ) -> None:
        """`keeps_text`: for `whole_text`, of a stream of one choice."""
        self._outlet = outlet
        self._shape = shape
        self._texts = texts
        self._record = record
        self._delivery = delivery
        self._is_continuous = delivery.continuous_usage  # asked for each token
        self._num_choices = num_choices
        self._framing = framing
        self._frame = framing.frame
        self._content = [self._channel(index, CONTENT) for index in range(num_choices)]
        # Made with the first such text. Those of tool arguments are of the last call: no other gets any.
        self._reasoning: list[WriteText | None] = [None] * num_choices
        self._arguments: list[WriteText | None] = [None] * num_choices
        self._kept: list[str] | None = [] if keeps_text else None
        self._frames: list[ContentFrames] = []
        self._head_sent = False
        self._num_frames = 0

    @property
    def num_frames(self) -> int:
        return self._num_frames + sum([frames.num_frames for frames in self._frames])

    def first(self) -> None:
        self._send_head()
        for index in range(self._num_choices):
            opening = self._shape.opening(index)
            if opening is not None:
                self._choice(opening)

    def text(self, index: int, text: str) -> None:
        if self._kept is not None:
            self._kept.append(text)
        if self._is_continuous:
            self._choice(self._shape.delta(index, text, None))
            return
        self._num_frames += 1
        self._content[index](text)

    def text_writer(self, index: int) -> WriteText | None:
        if self._is_continuous:
            return None
        choice = self._shape.delta(index, TEXT_MARK, None)
        around = text_template(self._shape, choice, self._frame)
        self._frames.append(frames := ContentFrames(around, self._outlet, self._kept))
        return frames.write

    def delta(self, index: int, event: TextDelta | ToolCallDelta) -> None:
        if isinstance(event, ToolCallDelta):
            self._tool_call(index, event)
            return
        channel, text, entries = event
        if self._kept is not None and channel == CONTENT:
            self._kept.append(text)
        if entries or self._is_continuous:
            logprobs = self._shape.logprobs(entries, self._texts) if entries else None
            self._choice(self._shape.delta(index, text, logprobs, channel))
            return
        write = self._content[index] if channel == CONTENT else self._reasoning[index]
        if write is None:
            write = self._reasoning[index] = self._channel(index, channel)
        self._num_frames += 1
        write(text)

    def finished(self, index: int, finish: Finish) -> None:
        self._choice(self._shape.ending(index, finish))

    def take_back(self, index: int) -> bool:
        return False

    def end(self, timings: Callable[[], dict[str, Any]]) -> None:
        self._num_frames += 1
        self._outlet.end(self._usage(timings) + self._framing.done)

    def fail(self, error: HeadraceError) -> None:
        if not self._head_sent:
            send_error(self._outlet, error, self._record)
            return
        self._num_frames += 1
        self._outlet.end(self._frame(stream_error(error)))

    def ping(self) -> None:
        self._send_head()
        self._num_frames += 1
        self._outlet.push(self._framing.ping)

    def whole_text(self) -> str:
        return "".join(self._kept or ())

    def _tool_call(self, index: int, event: ToolCallDelta) -> None:
        self._kept = None  # see `Writer.whole_text`
        if event.name is not None:
            self._arguments[index] = None
            event = event._replace(call_id=event.call_id or new_call_id())
        if event.name is not None or self._is_continuous:
            self._choice(self._shape.tool_call(index, event))
            return
        write = self._arguments[index]
        if write is None:
            choice = self._shape.tool_call(index, event._replace(arguments=TEXT_MARK))
            write = self._arguments[index] = self._text_into(choice)
        self._num_frames += 1
        write(event.arguments)

    def _channel(self, index: int, channel: str) -> WriteText:
        return self._text_into(self._shape.delta(index, TEXT_MARK, None, channel))

    def _text_into(self, choice: Any) -> WriteText:
        """Writes text into this choice. A function: nothing costs less to call for each token."""
        around, push = text_template(self._shape, choice, self._frame), self._outlet.push

        def write(text: str) -> None:
            push(json_string(text).join(around))

        return write

    def _usage(self, timings: Callable[[], dict[str, Any]]) -> bytes:
        """The frame before the end, if it was asked for."""
        if not self._delivery.include_usage:
            return b""
        chunk = self._shape.chunk([]) | {"usage": usage_object(self._record.usage)}
        if self._delivery.include_timings:
            chunk["timings"] = timings()
        return self._frame(chunk)

    def _choice(self, choice: Any) -> None:
        chunk = self._shape.chunk([choice])
        if self._delivery.continuous_usage:
            chunk["usage"] = usage_object(self._record.usage)
        self._num_frames += 1
        self._outlet.push(self._frame(chunk))

    def _send_head(self) -> None:
        if not self._head_sent:
            self._head_sent = True
            self._record.status = 200
            self._outlet.start(200, head(self._framing.headers, self._record))


def head(headers: Sequence[tuple[bytes, bytes]], record: RequestRecord) -> list[tuple[bytes, bytes]]:
    """Response headers of an answer: its kind, its id, what is known of its stages, what was left out."""
    all_headers = [*headers, (b"x-request-id", record.request_id.encode())]
    for name, value in (
        (b"server-timing", record.server_timing()),
        (b"x-headrace-context", record.context()),
    ):
        if value:
            all_headers.append((name, value))
    return all_headers


def send_error(outlet: Body, error: Exception, record: RequestRecord) -> None:
    """The whole response is an error."""
    status, headers, body = error_response(error, record.request_id)
    record.status = status
    outlet.start(
        status,
        [*headers, (b"x-request-id", record.request_id.encode()), (b"content-length", b"%d" % len(body))],
    )
    outlet.end(body)
