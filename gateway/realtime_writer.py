"""How an answer's events become a Realtime response's. How one event is written is in
`gateway/realtime_events.py`; `response.created` is sent by whoever begins the response.

    per item    response.output_item.added
                conversation.item.added             unless the response is in no conversation
      message     response.content_part.added
                  response.output_text.delta *
                  response.output_text.done
                  response.content_part.done
      call        response.function_call_arguments.delta *
                  response.function_call_arguments.done
                conversation.item.done              as above
                response.output_item.done
    at the end  response.done

An item begins with the first text that leaves. Reasoning is not sent, only counted. However a response ends,
what is open is closed first, so that a client's last word on every item is its `done`, with all the text that
it was sent and no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Final, Literal, Protocol

from gateway.error_body import stream_error
from gateway.realtime_events import Events, ItemEvents, ResponseHead, WriteText, new_id
from gateway.realtime_items import ItemStatus
from gateway.record import RequestRecord
from gateway.whole_message import new_call_id
from pipeline.events import CONTENT, Finish, TextDelta, ToolCallDelta
from pipeline.realtime_errors import ResponseCancelled
from pipeline.speech import Speech, SpeechChunker
from pipeline.values import FinishReason, Json, Usage

ResponseStatus = Literal["completed", "cancelled", "failed", "incomplete"]

# What a finish reason says of the response: its status, and why it is incomplete.
_ENDINGS: Final[dict[FinishReason, tuple[ResponseStatus, str | None]]] = {
    "stop": ("completed", None),
    "tool_calls": ("completed", None),
    "length": ("incomplete", "max_output_tokens"),
    "content_filter": ("incomplete", "content_filter"),
}


def _ignore(status: str) -> None:
    """For who need not be told."""


class Place(Protocol):
    """Where a conversation keeps a response's items. They are values of JSON, as events show them."""

    def added(self, item: dict[str, Json]) -> str | None:
        """An item begins, empty. The answer: the id of the item before it."""

    def done(self, item: dict[str, Json]) -> None:
        """An item has ended, with all that its client was sent of it. Told before the client is."""


@dataclass(slots=True)
class _Item:
    """An output item that is being said. `pieces`: of its text or arguments, as they were sent."""

    fields: dict[str, Json]
    index: int
    events: ItemEvents
    previous_item_id: str | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def is_call(self) -> bool:
        return bool(self.fields["type"] == "function_call")

    def wire(self, status: ItemStatus) -> dict[str, Json]:
        text = "".join(self.pieces)
        if self.is_call:
            return {**self.fields, "status": status, "arguments": text}
        return {**self.fields, "status": status, "content": [{"type": "output_text", "text": text}]}


class RealtimeWriter:
    """A `gateway.writers.Writer` of an answer with one choice.

    `place` None: the response is in no conversation. `speech`: what is sent at once, a token or a piece that
    can be spoken. `on_end(status)`: the response has ended and its last event was sent; told once.

    With `speech` by pieces, text waits for the rest of its piece. A response that ends or fails sends what
    waits as it is; a cancelled one drops it, since nobody will hear it.
    """

    def __init__(
        self,
        events: Events,
        record: RequestRecord,
        head: ResponseHead,
        place: Place | None,
        speech: Speech = "token",
        wants_timings: bool = False,
        on_end: Callable[[str], None] = _ignore,
    ) -> None:
        self._events = events
        self._record = record
        self._head = head
        self._place = place
        self._chunker = None if speech == "token" else SpeechChunker(speech)
        self._wants_timings = wants_timings
        self._on_end = on_end
        self._open: _Item | None = None
        self._say: WriteText | None = None  # the delta of the message that is open
        self._pieces: list[str] = []  # of the open item
        self._output: list[Json] = []  # the items that are done
        self._texts: list[str] = []  # of the messages that are done
        self._has_calls = False
        self._ending: tuple[ResponseStatus, str | None] = _ENDINGS["stop"]
        self._is_ended = False
        self.num_frames = 0

    def first(self) -> None:
        self._record.status = 200

    def text(self, index: int, text: str) -> None:
        if self._chunker is None:
            self._send_text(text)
        else:
            for piece in self._chunker.feed(text):
                self._send_text(piece)

    def text_writer(self, index: int) -> Callable[[str], None] | None:
        return self._send_text if self._chunker is None else partial(self.text, index)

    def delta(self, index: int, event: TextDelta | ToolCallDelta) -> None:
        if isinstance(event, ToolCallDelta):
            self._call(event)
        elif event.channel == CONTENT:
            self.text(index, event.text)

    def finished(self, index: int, finish: Finish) -> None:
        self._ending = status, _ = _ENDINGS[finish.reason]
        self._flush()
        if status == "completed" and self._open is None and not self._output:
            self._begin_message()  # the next turn must not find two turns of the user in a row
        self._close("completed" if status == "completed" else "incomplete")

    def take_back(self, index: int) -> bool:
        """Only text that waits to be spoken can be."""
        if self._chunker is None or self._open is not None or self._output:
            return False
        self._chunker.flush()
        return True

    def end(self, timings: Callable[[], dict[str, Any]]) -> None:
        status, reason = self._ending
        details: Json = {"type": status} if reason is None else {"type": status, "reason": reason}
        self._done(status, details, timings)

    def fail(self, error: Exception) -> None:
        """All that is open is closed, then `response.done` says why. After the end: nothing."""
        if self._is_ended:
            return
        status: ResponseStatus
        details: Json
        if isinstance(error, ResponseCancelled):
            status, details = "cancelled", {"type": "cancelled", "reason": "client_cancelled"}
        else:
            self._flush()
            told = stream_error(error, self._record.request_id)["error"]
            status = "failed"
            details = {"type": status, "error": {key: told[key] for key in ("type", "code", "message")}}
        self._close("incomplete")
        self._done(status, details, lambda: self._record.timings(monotonic()))

    def ping(self) -> None:
        """A WebSocket has pings of its own."""

    def whole_text(self) -> str:
        if self._has_calls:
            return ""
        return "".join([*self._texts, *(self._pieces if self._open is not None else ())])

    # -- messages and calls --------------------------------------------------------------------------------

    def _send_text(self, text: str) -> None:
        say = self._say or self._begin_message()
        self._pieces.append(text)
        self.num_frames += 1
        say(text)

    def _call(self, event: ToolCallDelta) -> None:
        if event.name is not None:
            self._flush()
            self._close("completed")
            self._begin_call(event.call_id or new_call_id(), event.name)
        if event.arguments:
            assert self._open is not None, "a piece of a call before its name"
            assert self._open.is_call, "a piece of a call after its end"
            self._pieces.append(event.arguments)
            self.num_frames += 1
            self._open.events.delta(event.arguments)

    def _begin_message(self) -> WriteText:
        if self._open is not None:  # a call
            self._close("completed")
        item_id, index = new_id("item"), len(self._output)
        events = self._events.part_of(self._head.id, item_id, index)
        fields = {"id": item_id, "object": "realtime.item", "type": "message", "role": "assistant"}
        self._begin(_Item(fields, index, events), {**fields, "status": "in_progress", "content": []})
        self.num_frames += 1
        events.added()
        self._say = events.delta
        return events.delta

    def _begin_call(self, call_id: str, name: str) -> None:
        self._has_calls = True
        item_id, index = new_id("item"), len(self._output)
        events = self._events.call_of(self._head.id, item_id, index, call_id, name)
        fields = {"id": item_id, "object": "realtime.item", "type": "function_call"}
        item = _Item(fields | {"call_id": call_id, "name": name}, index, events)
        self._begin(item, item.wire("in_progress"))

    def _begin(self, item: _Item, wire: dict[str, Json]) -> None:
        self._open, self._pieces = item, item.pieces
        self.num_frames += 1
        self._events.output_item_added(self._head.id, item.index, wire)
        if self._place is not None:
            item.previous_item_id = self._place.added(wire)
            self.num_frames += 1
            self._events.item_added(wire, item.previous_item_id)

    def _close(self, status: ItemStatus) -> None:
        """The open item's `done` events, if one is open."""
        item, self._open, self._say = self._open, None, None
        if item is None:
            return
        wire, text = item.wire(status), "".join(item.pieces)
        self._output.append(wire)
        if not item.is_call:
            self._texts.append(text)
        self.num_frames += 2 if item.is_call else 3
        item.events.done(text)
        if self._place is not None:
            self.num_frames += 1
            self._place.done(wire)
            self._events.item_done(wire, item.previous_item_id)
        self._events.output_item_done(self._head.id, item.index, wire)

    def _flush(self) -> None:
        """What waits to be spoken leaves as it is."""
        rest = self._chunker.flush() if self._chunker is not None else ""
        if rest:
            self._send_text(rest)

    def _done(self, status: ResponseStatus, details: Json, timings: Callable[[], dict[str, Any]]) -> None:
        response = self._head.wire(status, details, self._output, usage_object(self._record.usage))
        if self._wants_timings:
            response["timings"] = timings()
        self.num_frames += 1
        self._events.response_done(response)
        self._is_ended = True
        self._on_end(status)


def usage_object(usage: Usage | None) -> dict[str, Json] | None:
    """Token counts in the names of Realtime. `reasoning_tokens` is an extension, where they are known.

    What is cached counts as text: the engine does not say what it was. None where nobody has counted.
    """
    if usage is None:
        return None
    output = {"text_tokens": usage.completion_tokens, "audio_tokens": 0}
    if usage.reasoning_tokens is not None:
        output["reasoning_tokens"] = usage.reasoning_tokens
    cached = {"text_tokens": usage.cached_tokens, "audio_tokens": 0, "image_tokens": 0}
    return {
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {
            "text_tokens": usage.prompt_tokens - sum(usage.media_tokens.values()),
            "audio_tokens": usage.media_tokens.get("audio", 0),
            "image_tokens": usage.media_tokens.get("image", 0),
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_details": cached,
        },
        "output_token_details": output,
    }
