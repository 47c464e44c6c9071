"""A Realtime conversation: what each client event does, and the responses that run.

One per WebSocket, which `gateway/realtime_socket.py` holds. The events come in order and each is done with
before the next one, so that after a cancel the client can build on what it knows; only responses run on, as
tasks of their own (`gateway/realtime_response.py`). Items and settings are values
(`gateway/realtime_conversation.py`, `gateway/realtime_session.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, time
from typing import Any, Final

from backend.fault_log import log_fault
from gateway.flow import Flow
from gateway.realtime_conversation import Conversation, Memory
from gateway.realtime_events import Events, ResponseHead, new_id
from gateway.realtime_items import Item, answer_item, of_item, read_item
from gateway.realtime_ports import PATH, OpenedSocket
from gateway.realtime_response import Response
from gateway.realtime_schema import (
    ClientEvent,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    ResponseCancel,
    ResponseCreate,
    SessionUpdate,
    event_id_of,
    read_event,
)
from gateway.realtime_session import ResponsePlan, Session, of_session
from gateway.realtime_writer import RealtimeWriter
from gateway.record import RequestRecord
from gateway.sampling_fields import RequestLimits
from pipeline.errors import HeadraceError, InvalidRequest
from pipeline.realtime_errors import ActiveResponse, NoActiveResponse, ResponseCancelled, TooManyResponses
from pipeline.values import ChatRequest, Json


@dataclass(frozen=True, slots=True)
class TalkParts:
    """What every conversation needs."""

    flow: Flow
    remember: Callable[[RequestRecord], None]  # told of each response when it is over
    limits: RequestLimits
    max_items: int  # of one conversation
    max_bytes: int  # of all its items
    memory: Memory  # that all conversations share
    max_responses: int  # of one conversation, at the same time
    limit_s: float  # how long one may last


class RealtimeTalk:
    """`gateway.realtime_socket.Talk`: a conversation, from its first event to the loss of its connection."""

    def __init__(self, parts: TalkParts, socket: OpenedSocket, model: str) -> None:
        self._parts = parts
        self._socket = socket
        self._events = Events(socket.outlet)
        self._id = new_id("conv")
        expires_at = int(time() + parts.limit_s)
        self._session = Session.first(new_id("sess"), model, parts.limits, expires_at)
        self._conversation = Conversation(parts.max_items, parts.max_bytes, parts.memory)
        self._responses: dict[str, Response] = {}  # that run, by id
        self._active: str | None = None  # the one that is in the conversation
        self._tasks: set[asyncio.Task[None]] = set()
        self.last_active_s = monotonic()

    # -- gateway.realtime_socket.Talk ----------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self._responses

    def opened(self) -> None:
        self._events.session_created(self._session.wire())

    def received(self, text: str) -> None:
        """One message. Whatever is wrong with it is told in an `error` event."""
        self.last_active_s = monotonic()
        event: ClientEvent | None = None
        try:
            event = read_event(text, self._parts.limits)
            _HANDLERS[type(event)](self, event)
        except HeadraceError as error:
            self._events.error(error, event_id_of(text) if event is None else event.event_id)
        except Exception as error:
            log_fault(error, self._session.id)
            self._events.error(error, None if event is None else event.event_id)

    def refused(self, error: HeadraceError) -> None:
        """A message that is no event."""
        self._events.error(error)

    def lost(self, reason: str) -> None:
        """The connection is gone: nothing runs on."""
        for response in list(self._responses.values()):
            response.lost(reason)
        self._conversation.close()

    # -- client events -------------------------------------------------------------------------------------

    def _update(self, event: SessionUpdate) -> None:
        session = self._session.update(event.session)
        self._check_settings(session)
        self._session = session
        self._events.session_updated(self._session.wire())

    def _create_item(self, event: ItemCreate) -> None:
        item = read_item(event.item, self._parts.limits, new_id)
        self._check(item)
        previous_id = self._conversation.add(item, event.previous_item_id)
        self._events.item_added(item.wire(), previous_id)
        self._events.item_done(item.wire(), previous_id)

    def _delete_item(self, event: ItemDelete) -> None:
        self._conversation.delete(event.item_id)
        self._events.item_deleted(event.item_id)

    def _retrieve_item(self, event: ItemRetrieve) -> None:
        self._events.item_retrieved(self._conversation.get(event.item_id).wire(with_media=True))

    def _truncate_item(self, event: ItemTruncate) -> None:
        item = self._conversation.truncate(
            event.item_id, event.content_index, event.text_end, event.audio_end_ms
        )
        self._events.item_truncated(item.id, event.content_index, event.text_end)

    def _create_response(self, event: ResponseCreate) -> None:
        plan = self._session.plan(event.response, self._conversation, new_id)
        if plan.in_conversation:
            if self._active is not None:
                raise ActiveResponse(self._active)
            self._conversation.check_room()
        if len(self._responses) >= self._parts.max_responses:
            raise TooManyResponses(len(self._responses), self._parts.max_responses)
        self._begin(plan)

    def _cancel_response(self, event: ResponseCancel) -> None:
        response_id = self._active if event.response_id is None else event.response_id
        response = None if response_id is None else self._responses.get(response_id)
        if response is None:
            raise NoActiveResponse(event.response_id)
        response.cancel(ResponseCancelled())

    def _check(self, item: Item) -> None:
        """Raises `InvalidRequest` for an item that would make every response fail."""
        if item.message is None:
            return
        base = self._session.base
        try:
            self._parts.flow.check(ChatRequest(base.model, (item.message,), base.generation, base.delivery))
        except InvalidRequest as error:
            raise of_item(error, item, "item") from None

    def _check_settings(self, session: Session) -> None:
        """Raises `InvalidRequest` for settings that would make every response fail."""
        instructions = {"role": "system", "content": session.settings.get("instructions", "")}
        try:
            self._parts.flow.check(replace(session.base, messages=(instructions,)))
        except InvalidRequest as error:
            raise of_session(error) from None

    # -- responses -----------------------------------------------------------------------------------------

    def _begin(self, plan: ResponsePlan) -> None:
        response_id = new_id("resp")
        record = RequestRecord(response_id, PATH, monotonic())
        record.key_id, record.client = self._socket.key_id, self._socket.client
        head = ResponseHead(
            response_id,
            self._id if plan.in_conversation else None,
            plan.metadata,
            plan.max_output_tokens,
        )
        response = Response(record, self._socket.outlet, self._socket.abort)
        place = _Place(self._conversation) if plan.in_conversation else None
        response.writer = RealtimeWriter(
            self._events,
            record,
            head,
            place,
            plan.speech,
            plan.wants_timings,
            on_end=lambda status: response.over(),
        )
        response.on_over = partial(self._forget, response)
        self._responses[response_id] = response
        if plan.in_conversation:
            self._active = response_id
        self._events.response_created(head)
        task = asyncio.create_task(self._run(response, plan), name="realtime response")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, response: Response, plan: ResponsePlan) -> None:
        try:
            await response.run(self._parts.flow, plan.request)
        finally:
            self._parts.remember(response.record)

    def _forget(self, response: Response) -> None:
        """The response is over."""
        response_id = response.record.request_id
        self._responses.pop(response_id, None)
        if self._active == response_id:
            self._active = None
        self.last_active_s = monotonic()
        if not self._responses:
            self._socket.rested()


# Not in each talk: with methods of its own in it, it would wait for the garbage collector.
_HANDLERS: Final[dict[type[Any], Callable[[RealtimeTalk, Any], None]]] = {
    SessionUpdate: RealtimeTalk._update,
    ItemCreate: RealtimeTalk._create_item,
    ItemDelete: RealtimeTalk._delete_item,
    ItemRetrieve: RealtimeTalk._retrieve_item,
    ItemTruncate: RealtimeTalk._truncate_item,
    ResponseCreate: RealtimeTalk._create_response,
    ResponseCancel: RealtimeTalk._cancel_response,
}


class _Place:
    """Where a response's items go: behind what the model has read when it began.

    What its client adds meanwhile is about what comes after.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._previous_id = conversation.last_id

    def added(self, item: dict[str, Json]) -> str | None:
        previous_id = self._conversation.add_answer(answer_item(item), self._previous_id)
        self._previous_id = item["id"]
        return previous_id

    def done(self, item: dict[str, Json]) -> None:
        self._conversation.finish_answer(answer_item(item))
