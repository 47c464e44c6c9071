"""The WebSocket route as an ASGI callable: who comes in, what comes in, and every way that it ends.

What is said belongs to the `Talk` (`gateway/realtime_ports.py`). Frames, pings and sizes belong to
`gateway/websocket_protocol.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import Any, Final
from uuid import uuid4

from websockets.frames import CloseCode

from backend.fault_log import log_fault
from gateway.client_address import LOGGED_CLIENT
from gateway.direct_body import DIRECT_EXTENSION
from gateway.error_body import error_response, how_it_ended, status_of
from gateway.exchange import ABORT_EXTENSION, Receive, Scope
from gateway.outlet import ReaderLimits, Send, no_direct, nothing, why_too_slow
from gateway.realtime_admission import Admission, Admitted
from gateway.realtime_ports import PATH, OpenedSocket, Talk, TalkFactory
from gateway.record import RequestRecord
from gateway.websocket_handshake import UPGRADE_HEADERS, UpgradeRequired
from gateway.websocket_outlet import WebSocketOutlet
from pipeline.errors import Draining, HeadraceError, InvalidRequest
from pipeline.realtime_errors import IdleConversation, LivedTooLong, TooManyConversations

_DENIAL: Final = "websocket.http.response"

Remember = Callable[[RequestRecord], None]  # told once of each connection, when it is over or was refused


@dataclass(frozen=True, slots=True)
class RealtimeLimits:
    """How many conversations one process has, and how long each; times in seconds."""

    max_conversations: int = 1000
    idle_s: float = 600.0
    limit_s: float = 3600.0


class _Connection:
    """One accepted client and the talk with it."""

    def __init__(
        self,
        send: Send,
        scope: Scope,
        admitted: Admitted,
        max_buffered_bytes: int,
        record: RequestRecord,
        on_rest: Callable[[_Connection], None],
    ) -> None:
        self.record = record
        extensions = scope.get("extensions", {})
        begin_direct = extensions.get(DIRECT_EXTENSION, no_direct)
        self.outlet = WebSocketOutlet(send, max_buffered_bytes, self._on_gone, begin_direct)
        self.opened_s = self.heard_s = monotonic()
        self.is_over = False
        self._ended = "closed"
        self._abort = extensions.get(ABORT_EXTENSION, nothing)
        self.socket = OpenedSocket(
            outlet=self.outlet,
            query=admitted.query,
            key_id=admitted.key_id,
            client=scope.get(LOGGED_CLIENT),
            abort=self.abort,
            rested=partial(on_rest, self),
        )
        self.talk: Talk

    def abort(self) -> None:
        """End it now: closing politely would wait for a client that does not read."""
        self.outlet.drop()
        self._abort()

    def over(self, reason: str) -> None:
        """Tell the talk, once."""
        if not self.is_over:
            self.is_over = True
            self.record.ended, self.record.detail = self._ended, reason
            self.record.buffered_peak = self.outlet.peak
            self.outlet.drop()
            try:
                self.talk.lost(reason)
            except Exception as error:
                log_fault(error, "none")
            # They hold this connection: what was said would wait for the collector's full round, which may
            # never come.
            del self.talk, self.socket

    def end(self, error: HeadraceError, code: CloseCode) -> None:
        """Close it with a named error, which its log line tells."""
        self._ended, _ = how_it_ended(error)
        try:
            self.talk.refused(error)
        except Exception as fault:
            log_fault(fault, "none")
        self.outlet.close(code, error.code or "")

    def _on_gone(self, reason: str) -> None:
        self.abort()
        self.over(reason)


class RealtimeSocket:
    """The route. One per process; `check` is called by the clock that looks after all open requests."""

    def __init__(
        self,
        factory: TalkFactory,
        admission: Admission,
        limits: RealtimeLimits | None = None,
        reader: ReaderLimits | None = None,
        remember: Remember = lambda record: None,
    ) -> None:
        self._remember = remember
        self._factory = factory
        self._admission = admission
        self._limits = limits or RealtimeLimits()
        self._reader = reader or ReaderLimits()
        self._connections: set[_Connection] = set()
        self._is_draining = False

    @property
    def num_open(self) -> int:
        """Conversations whose connection is not over."""
        return len(self._connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _answer(
                send, "http.response", UpgradeRequired("This is a WebSocket: the request must offer one.")
            )
            return
        record = RequestRecord(uuid4().hex, PATH, monotonic(), scope.get(LOGGED_CLIENT), stream=True)
        try:
            await self._serve(scope, receive, send, record)
        finally:
            self._remember(record)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        await receive()  # websocket.connect
        try:
            connection, subprotocol = self._admit(scope, send, record)
        except Exception as error:
            if not isinstance(error, HeadraceError):
                log_fault(error, record.request_id)
            record.status = status_of(error)
            record.ended, record.detail = how_it_ended(error)
            await _deny(scope, send, error)
            return
        record.status = HTTPStatus.SWITCHING_PROTOCOLS
        self._connections.add(connection)
        try:
            await send({"type": "websocket.accept", "subprotocol": subprotocol})
            connection.outlet.go_direct()
            connection.talk.opened()
            await self._listen(connection, receive)
        except OSError:  # the server's way to say that the client has gone
            connection.over("closed the connection")
        except Exception as error:
            log_fault(error, "none")
            connection.outlet.close(CloseCode.INTERNAL_ERROR, "internal_error")
            await connection.outlet.flushed()
            connection.over("internal_error")
        finally:
            connection.over("the connection was cut")
            self._connections.discard(connection)

    def _admit(self, scope: Scope, send: Send, record: RequestRecord) -> tuple[_Connection, str | None]:
        if len(self._connections) >= self._limits.max_conversations:
            raise TooManyConversations(len(self._connections), self._limits.max_conversations)
        if self._is_draining:
            raise Draining
        admitted = self._admission.admit(scope)
        record.key_id = admitted.key_id
        connection = _Connection(send, scope, admitted, self._reader.max_bytes, record, self._on_rest)
        connection.talk = self._factory(connection.socket)
        return connection, admitted.subprotocol

    async def _listen(self, connection: _Connection, receive: Receive) -> None:
        """Until the connection is over. After each message others have their turn: many may come at once.

        A client that is behind with its reading is not read from, so that what it asks for cannot pile up.
        """
        while (message := await receive())["type"] != "websocket.disconnect":
            connection.heard_s = monotonic()
            if connection.outlet.closed:
                continue
            text = message.get("text")
            if text is None:
                error = InvalidRequest("Binary messages mean nothing here; events are JSON text.")
                connection.talk.refused(error)
            else:
                connection.talk.received(text)
            if connection.outlet.is_behind and connection.talk.is_idle:
                await connection.outlet.flushed()
            else:  # also of a client that is behind with an answer: a cancel may come
                await asyncio.sleep(0)
        connection.over(_why(message))

    def check(self, now_s: float) -> None:
        """Enforce the limits on every conversation."""
        for connection in list(self._connections):
            try:
                self._check(connection, now_s)
            except Exception as error:  # one talk's fault must not stop the clock of all the others
                log_fault(error, "none")
                connection.abort()
                connection.over("internal_error")

    def _check(self, connection: _Connection, now_s: float) -> None:
        reason = why_too_slow(connection.outlet.blocked_since_s, now_s, self._reader.limit_s)
        if reason is not None:
            connection.abort()
            connection.over(reason)
        elif not connection.outlet.closed and connection.talk.is_idle:
            self._check_idle(connection, now_s)

    def _check_idle(self, connection: _Connection, now_s: float) -> None:
        limits = self._limits
        if self._is_draining:
            connection.end(Draining("The server is shutting down."), CloseCode.GOING_AWAY)
        elif now_s - max(connection.heard_s, connection.talk.last_active_s) > limits.idle_s:
            connection.end(IdleConversation(limits.idle_s), CloseCode.NORMAL_CLOSURE)
        elif now_s - connection.opened_s > limits.limit_s:
            connection.end(LivedTooLong(limits.limit_s), CloseCode.NORMAL_CLOSURE)

    def _on_rest(self, connection: _Connection) -> None:
        """While draining a conversation ends with its last response, before the server does."""
        if self._is_draining and not connection.outlet.closed:
            self._check_idle(connection, monotonic())

    def drain(self) -> None:
        """Take no more conversations, and end those in which no response is active; the others then."""
        self._is_draining = True
        self.check(monotonic())

    def cut(self, error: HeadraceError) -> None:
        """End every conversation now, with a named error."""
        for connection in list(self._connections):
            if not connection.outlet.closed:
                connection.end(error, CloseCode.SERVICE_RESTART)


def _why(message: Mapping[str, Any]) -> str:
    """How a connection ended, for a log. Not its reason: that is the client's own text."""
    return f"closed with {message.get('code', int(CloseCode.NO_STATUS_RCVD))}"


async def _deny(scope: Scope, send: Send, error: BaseException) -> None:
    """Answer the handshake with an error instead of a WebSocket."""
    if _DENIAL in scope.get("extensions", {}):
        await _answer(send, _DENIAL, error)
    else:
        await send({"type": "websocket.close", "code": CloseCode.NORMAL_CLOSURE})


async def _answer(send: Send, prefix: str, error: BaseException) -> None:
    status, headers, body = error_response(error)
    more: Sequence[tuple[bytes, bytes]] = UPGRADE_HEADERS if isinstance(error, UpgradeRequired) else ()
    headers = [*headers, *more, (b"content-length", b"%d" % len(body))]
    await send({"type": f"{prefix}.start", "status": status, "headers": headers})
    last: MutableMapping[str, Any] = {"type": f"{prefix}.body", "body": body, "more_body": False}
    await send(last)
