"""The text of a Realtime client event -> a struct. What an item or a session may hold is not known here
(`gateway/realtime_items.py`, `gateway/realtime_session.py`).

Names and fields are those of OpenAI's Realtime API; `text_end` is an extension. Unknown fields are accepted.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, NoReturn

import msgspec
from msgspec import Meta

from gateway.json_body import check_depth, decode, show
from gateway.sampling_fields import INT32_MAX, RequestLimits
from pipeline.errors import DuplicateKey, InvalidRequest

MAX_EVENT_ID_CHARS: Final = 512
MAX_ITEM_ID_CHARS: Final = 128
# What wraps a field that has its own limit of depth: the event's field, an array, a tool, its function.
MAX_WRAPPINGS: Final = 4
# An event that cannot be read is searched for its id: all of it if that is cheap, else both its ends.
MAX_ID_SEARCH_CHARS: Final = 1 << 20
EDGE_CHARS: Final = 4096

EventId = Annotated[str, Meta(max_length=MAX_EVENT_ID_CHARS)]
ItemId = Annotated[str, Meta(max_length=MAX_ITEM_ID_CHARS)]
Index = Annotated[int, Meta(ge=0, le=INT32_MAX)]


class Event(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """What every client event may have."""

    event_id: EventId | None = None


class SessionUpdate(Event, frozen=True, tag="session.update"):
    """Change settings of the session; those that are not named stay."""

    session: dict[str, Any]


class ItemCreate(Event, frozen=True, tag="conversation.item.create"):
    """Put an item into the conversation. `previous_item_id` None: at its end; "root": at its front."""

    item: dict[str, Any]
    previous_item_id: ItemId | None = None


class ItemDelete(Event, frozen=True, tag="conversation.item.delete"):
    """Take an item out of the conversation."""

    item_id: ItemId


class ItemRetrieve(Event, frozen=True, tag="conversation.item.retrieve"):
    """Show an item as the server has it."""

    item_id: ItemId


class ItemTruncate(Event, frozen=True, tag="conversation.item.truncate"):
    """Cut an assistant's item to what was heard. `text_end`: characters of that part that stay."""

    item_id: ItemId
    content_index: Index = 0
    audio_end_ms: Index | None = None
    text_end: Index | None = None


class ResponseCreate(Event, frozen=True, tag="response.create"):
    """Let the model answer. `response`: what is different from the session, for this answer only."""

    response: dict[str, Any] | None = None


class ResponseCancel(Event, frozen=True, tag="response.cancel"):
    """Stop a response; without an id, the one in the conversation."""

    response_id: ItemId | None = None


ClientEvent = (
    SessionUpdate | ItemCreate | ItemDelete | ItemRetrieve | ItemTruncate | ResponseCreate | ResponseCancel
)


class _Head(msgspec.Struct):
    """The fields of an event that tell what it is, of whatever type they are."""

    type: Any = None
    event_id: Any = None


EVENT_TYPES: Final[tuple[str, ...]] = tuple(
    str(kind.__struct_config__.tag)
    for kind in (
        SessionUpdate,
        ItemCreate,
        ItemDelete,
        ItemRetrieve,
        ItemTruncate,
        ResponseCreate,
        ResponseCancel,
    )
)
_BUFFERS: Final = ("input_audio_buffer.", "output_audio_buffer.")
_DECODER: Final = msgspec.json.Decoder(ClientEvent)
_HEAD_DECODER: Final = msgspec.json.Decoder(_Head)
# Inside a JSON string the quotes would be escaped, so that no text of a user is taken for the field.
_EVENT_ID: Final = re.compile(rf'"event_id"\s{{0,8}}:\s{{0,8}}"([^"\\\x00-\x1f]{{1,{MAX_EVENT_ID_CHARS}}})"')


def read_event(text: str, limits: RequestLimits) -> ClientEvent:
    """The event in one message. Raises `InvalidRequest`, and nothing else."""
    try:
        event = decode(
            _DECODER,
            text.encode("utf-8", "surrogatepass"),
            limits.max_containers,
            drop_lone_surrogates=limits.drop_lone_surrogates,
        )
    except DuplicateKey:
        raise
    except InvalidRequest as error:
        _refuse(error, text)
    for name in ("session", "item", "response"):
        check_depth(getattr(event, name, None), limits.max_depth + MAX_WRAPPINGS, name)
    return event


def event_id_of(text: str) -> str | None:
    """The `event_id` of an event that cannot be read, for the error's answer. None: there is none to find."""
    if len(text) <= MAX_ID_SEARCH_CHARS and (head := _head(text)) is not None:
        found = head.event_id
        return found if isinstance(found, str) and len(found) <= MAX_EVENT_ID_CHARS else None
    edges = text if len(text) <= 2 * EDGE_CHARS else f"{text[:EDGE_CHARS]}\n{text[-EDGE_CHARS:]}"
    match = _EVENT_ID.search(edges)
    return None if match is None else match[1]


def _refuse(error: InvalidRequest, text: str) -> NoReturn:
    head = _head(text) if error.param == "type" else None
    if head is not None and head.type is not None:
        raise _unknown_type(head.type) from None
    message = str(error)
    if message.startswith("The body"):
        message = message.replace("The body", "The event", 1)
    raise InvalidRequest(message, error.param, error.code) from None


def _unknown_type(kind: Any) -> InvalidRequest:
    if isinstance(kind, str) and kind.startswith(_BUFFERS):
        return InvalidRequest(
            f"'type' {show(kind)} is not supported: this server has no audio buffers. Text and content parts "
            f"go in with conversation.item.create, text comes out.",
            "type",
            "unsupported_event",
        )
    return InvalidRequest(
        f"'type' must be one of {', '.join(EVENT_TYPES)}; got {show(kind)}.", "type", "unknown_event"
    )


def _head(text: str) -> _Head | None:
    try:
        return _HEAD_DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError):
        return None
