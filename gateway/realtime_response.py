"""One response of a Realtime conversation: from `response.create` to `response.done`.

It is the `gateway.client.Client` of its answer. What it says is written by `gateway/realtime_writer.py`;
which responses a conversation has, and what it keeps of them, is in `gateway/realtime.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from backend.fault_log import log_fault
from gateway.error_body import how_it_ended, status_of
from gateway.outlet import nothing
from pipeline.errors import ClientGone, HeadraceError
from pipeline.values import ChatRequest

if TYPE_CHECKING:
    from gateway.answer import Answer
    from gateway.flow import Flow
    from gateway.realtime_writer import RealtimeWriter
    from gateway.record import RequestRecord
    from gateway.websocket_outlet import WebSocketOutlet


class Response:
    """A response that has begun. It ends once: then its last event was sent, or nobody is left to take it.

    `outlet` and `close` are those of the connection, which all responses of a conversation share.
    """

    read_timeout_s = None

    def __init__(self, record: RequestRecord, outlet: WebSocketOutlet, close: Callable[[], None]) -> None:
        self.record = record
        self.outlet = outlet
        self.close = close
        self.on_gone: Callable[[str], None] = _ignore
        self.on_over: Callable[[], None] = nothing
        self.writer: RealtimeWriter  # set before anything else happens; it tells `over` of its end
        self._answer: Answer | None = None
        self._work: asyncio.Future[Any] | None = None  # of the prompt, while it is prepared elsewhere
        self._refusal: HeadraceError | None = None
        self._over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    async def run(self, flow: Flow, request: ChatRequest) -> None:
        """Its whole life. Raises nothing but a cancel."""
        flow.in_progress.add(self)
        try:
            self._check()  # before its first step
            self.record.begin()
            prompt, ready = await flow.prepare_request(self, request)
            self._check()  # since the prompt was ready, a moment ago
            self._answer = answer = flow.start(self, self.writer, prompt, ready)
            del ready  # with its buffers: only choices that may be submitted again still hold them
            self.record.status = HTTPStatus.OK
            await flow.finish(self, answer, prompt)
        except HeadraceError as error:
            self._fail(error)
        except Exception as error:
            log_fault(error, self.record.request_id)
            self._fail(error)
        finally:
            flow.in_progress.discard(self)
            self.record.buffered_peak = self.outlet.peak
            self.over()
            self._let_go()

    def cancel(self, error: HeadraceError) -> None:
        """End it now, whatever it is doing: its last event has been sent when this returns."""
        if self._answer is not None:
            self._answer.fail(error)
        else:
            self._fail(error)
            self.refuse(error)

    def lost(self, reason: str) -> None:
        """The connection is gone: the engine stops."""
        if self._answer is not None:
            self._answer.client_gone(reason)
        else:
            self.record.ended, self.record.detail = ClientGone.code or "", reason
            self.record.status = ClientGone.status_hint
            self.refuse(ClientGone(reason))
        self.over()

    def over(self) -> None:
        """Its last event was sent."""
        if not self.is_over:
            self._over.set()
            self.on_over()

    def _let_go(self) -> None:
        """Of what holds it, too, as an error holds the frames that it went through.

        Prompts and texts would wait for the garbage collector, whose full round may never come.
        """
        del self.writer
        self._answer = self._refusal = None
        self.on_gone, self.on_over = _ignore, nothing

    def _fail(self, error: Exception) -> None:
        """It ends with an error before there was an answer."""
        if self.is_over:
            return
        self.record.ended, self.record.detail = how_it_ended(error)
        self.record.status = status_of(error)
        self.writer.fail(error)
        self.over()

    def _check(self) -> None:
        """Raises what `refuse` was given."""
        if self._refusal is not None:
            raise self._refusal

    # -- gateway.client.Asker and Client -------------------------------------------------------------------

    async def unless_gone(self, work: Awaitable[Any]) -> Any:
        """The result of some work, which is not begun after `refuse`. Raises what that was given."""
        self._work = task = asyncio.ensure_future(work)
        try:
            if self._refusal is None:  # it may have come in a pause, while there was no work
                await asyncio.wait((task,))
            self._check()
            return task.result()
        finally:
            self._work = None
            task.cancel()

    def refuse(self, error: HeadraceError) -> None:
        """Wait no longer for the prompt."""
        if self._answer is None and self._refusal is None:
            self._refusal = error
            if self._work is not None:
                self._work.cancel()

    async def finished(self) -> None:
        """Returns when its last event was sent, or nobody is left to take it."""
        await self._over.wait()


def _ignore(reason: str) -> None:
    pass
