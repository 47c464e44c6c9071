"""The server events of a Realtime connection, as the text of its messages.

Each has an `event_id`, unique on its connection. The order of a response's events is in
`gateway/realtime_writer.py`; what stands in items and sessions comes from those who have them.

Only the number and the text differ from delta to delta, so a delta is cut once into what stands around them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal, Protocol
from uuid import uuid4

import msgspec

from gateway.error_body import stream_error
from pipeline.values import Json

WriteText = Callable[[str], None]

_encode: Final = msgspec.json.Encoder().encode
_MARK: Final = "\x00mark\x00"  # stands for what differs, in an event that is to be cut at it


class TextOutlet(Protocol):
    """Where events go. Never raises."""

    def push(self, text: bytes) -> None:
        """One message, in UTF-8."""


class ItemEvents(Protocol):
    """The events of what one output item says."""

    @property
    def delta(self) -> WriteText:
        """Writes a piece of its text or arguments."""

    def done(self, text: str) -> None:
        """All of it is there, or as much as there will be."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What a response object says of a response from its beginning to its end.

    `conversation_id` None: it is in no conversation. `metadata` is the client's.
    """

    id: str
    conversation_id: str | None = None
    metadata: dict[str, str] | None = None
    max_output_tokens: int | Literal["inf"] = "inf"

    def wire(
        self, status: str = "in_progress", details: Json = None, output: Json = (), usage: Json = None
    ) -> dict[str, Json]:
        """The response object."""
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": details,
            "output": output,
            "conversation_id": self.conversation_id,
            "output_modalities": ("text",),
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "usage": usage,
        }


class Events:
    """Every event of one connection."""

    def __init__(self, outlet: TextOutlet) -> None:
        self._push = outlet.push
        self._prefix = f"event_{uuid4().hex[:12]}_"
        self._next_number = count(1).__next__

    # -- the session and its items -------------------------------------------------------------------------

    def session_created(self, session: Json) -> None:
        self._send("session.created", session=session)

    def session_updated(self, session: Json) -> None:
        self._send("session.updated", session=session)

    def item_added(self, item: Json, previous_item_id: str | None) -> None:
        self._send("conversation.item.added", previous_item_id=previous_item_id, item=item)

    def item_done(self, item: Json, previous_item_id: str | None) -> None:
        self._send("conversation.item.done", previous_item_id=previous_item_id, item=item)

    def item_retrieved(self, item: Json) -> None:
        self._send("conversation.item.retrieved", item=item)

    def item_deleted(self, item_id: str) -> None:
        self._send("conversation.item.deleted", item_id=item_id)

    def item_truncated(self, item_id: str, content_index: int, text_end: int | None) -> None:
        """`text_end`: the characters that are left of an item's text; OpenAI's event has no such field, but
        needs its own, of audio."""
        self._send(
            "conversation.item.truncated",
            item_id=item_id,
            content_index=content_index,
            audio_end_ms=0,
            text_end=text_end,
        )

    def error(self, error: BaseException, client_event_id: str | None = None) -> None:
        """A client event could not be followed. `client_event_id`: its `event_id`, if it had one."""
        self._send("error", error={**stream_error(error)["error"], "event_id": client_event_id})

    # -- a response ----------------------------------------------------------------------------------------

    def response_created(self, head: ResponseHead) -> None:
        self._send("response.created", response=head.wire())

    def response_done(self, response: Json) -> None:
        self._send("response.done", response=response)

    def output_item_added(self, response_id: str, output_index: int, item: Json) -> None:
        self._send(
            "response.output_item.added", response_id=response_id, output_index=output_index, item=item
        )

    def output_item_done(self, response_id: str, output_index: int, item: Json) -> None:
        self._send("response.output_item.done", response_id=response_id, output_index=output_index, item=item)

    def part_of(self, response_id: str, item_id: str, output_index: int) -> TextPartEvents:
        """The events of an item's one text."""
        where = _where(response_id, item_id, output_index) | {"content_index": 0}
        return TextPartEvents(self._send, self._text_into("response.output_text.delta", where), where)

    def call_of(
        self, response_id: str, item_id: str, output_index: int, call_id: str, name: str
    ) -> CallEvents:
        """The events of a function call's arguments."""
        where = _where(response_id, item_id, output_index) | {"call_id": call_id}
        delta = self._text_into("response.function_call_arguments.delta", where)
        return CallEvents(self._send, delta, where, name)

    # ------------------------------------------------------------------------------------------------------

    def _send(self, kind: str, **fields: Json) -> None:
        event = {"type": kind, "event_id": f"{self._prefix}{self._next_number()}", **fields}
        self._push(_encode(event))

    def _text_into(self, kind: str, fields: dict[str, Json]) -> WriteText:
        """Writes deltas of this kind. A function: nothing costs less to call for each token."""
        event = {"type": kind, "event_id": self._prefix + _MARK, **fields, "delta": _MARK}
        head, between, _ = _encode(event).split(_encode(_MARK)[1:-1])
        middle, push, next_number, encode = between[:-1], self._push, self._next_number, _encode

        def write(text: str) -> None:
            push(b"%b%d%b%b}" % (head, next_number(), middle, encode(text)))

        return write


@dataclass(frozen=True, slots=True)
class TextPartEvents:
    """The events of one text of a message."""

    _send: Callable[..., None]
    delta: WriteText
    _where: dict[str, Json]

    def added(self) -> None:
        self._send("response.content_part.added", **self._where, part={"type": "text", "text": ""})

    def done(self, text: str) -> None:
        self._send("response.output_text.done", **self._where, text=text)
        self._send("response.content_part.done", **self._where, part={"type": "text", "text": text})


@dataclass(frozen=True, slots=True)
class CallEvents:
    """The events of one function call's arguments."""

    _send: Callable[..., None]
    delta: WriteText
    _where: dict[str, Json]
    _name: str

    def done(self, text: str) -> None:
        self._send("response.function_call_arguments.done", **self._where, name=self._name, arguments=text)


def _where(response_id: str, item_id: str, output_index: int) -> dict[str, Json]:
    return {"response_id": response_id, "item_id": item_id, "output_index": output_index}


def new_id(prefix: str) -> str:
    """An id that nothing else has."""
    return f"{prefix}_{uuid4().hex[:24]}"
