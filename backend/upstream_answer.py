"""One choice at an upstream server: the receiver of its response, and the handle of its submission.

It ends exactly once: by the reader's finish, by a fault, or by an abort. What the events say, its wire's
reader knows; what a fault means for the server, the server (`backend/upstream_server.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from backend.fault_log import log_fault
from backend.http_ports import Headers, HttpCall, HttpFault
from backend.http_slices import SLICE_BYTES, Slices
from backend.sse_reader import SseReader
from backend.upstream_faults import MAX_BODY_BYTES, UpstreamFault, refusal
from backend.upstream_load import Share
from backend.upstream_ports import AnswerReader
from pipeline.errors import HeadraceError, WorkerLost

# vLLM's completions give the prompt's ids back in their first event, 8 bytes each.
MAX_EVENT_BYTES: Final = 32 << 20
# What may follow a finish: an event with the usage, and the stream's end. Then the connection is free again.
TAIL_S: Final = 5.0
# The usage follows a finish at once. A server that leaves it out, and the stream open, holds the answer up.
REST_S: Final = 2.0


class Host(Protocol):
    """What an answer needs of its server."""

    @property
    def key(self) -> str: ...

    def noted(self, model: str, error: HeadraceError, has_begun: bool) -> None:
        """A fault, before the sink hears of it. `has_begun`: some of the response had come."""

    def told(self) -> None:
        """The sink has heard of it."""


class UpstreamAnswer:
    """`http_ports.Receiver` and `pipeline.ports.Handle`.

    `send` makes the request and sends it with this object as its receiver; it may be called twice. `fail` is
    the sink's. `give_up` is called once if the connection is closed before the answer was over.
    """

    __slots__ = (
        *(
            "_call",
            "_events",
            "_fail",
            "_give_up",
            "_has_begun",
            "_has_events",
            "_headers",
            "_host",
            "_is_told",
        ),
        *("_max_bytes", "_model", "_num_bytes", "_reader", "_send", "_share", "_slices", "_status"),
        *("_tail", "_whole"),
    )

    def __init__(
        self,
        host: Host,
        model: str,
        reader: AnswerReader,
        fail: Callable[[HeadraceError], None],
        share: Share,
        send: Callable[[UpstreamAnswer], HttpCall],
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._model = model
        self._reader = reader
        self._fail = fail
        self._share = share
        self._give_up = give_up
        # Until the server has taken it: it holds the prompt.
        self._send: Callable[[UpstreamAnswer], HttpCall] | None = send
        self._events = SseReader(MAX_EVENT_BYTES)
        self._slices: Slices | None = None  # from the first long read on
        self._max_bytes = reader.max_bytes
        self._num_bytes = 0  # of the response's body
        self._status = 0
        self._headers: Headers = ()  # of a refusal
        self._whole: bytearray | None = None  # the body, where it is no stream
        self._has_begun = False
        self._has_events = False
        # The sink has had its end, or wants none: nothing more is said to it. The response may still go on.
        self._is_told = False
        # Between the reader's finish and the sink's: `REST_S`, stopped by whatever tells the sink. After it:
        # `TAIL_S`, stopped by the response's end, and by what closes the connection.
        self._tail: asyncio.TimerHandle | None = None
        self._call = send(self)

    # -- pipeline.ports.Handle -----------------------------------------------------------------------------

    @property
    def worker(self) -> str:
        return self._host.key

    def abort(self) -> None:
        """A closed connection is what all these servers take for an abort, sooner or later."""
        if not self._is_told:
            self._close()
            self._give_up()

    # -- http_ports.Receiver -------------------------------------------------------------------------------

    def begun(self, status: int, headers: Headers) -> None:
        self._has_begun = True
        self._status = status
        if status == 200:
            self._send = None
        else:
            self._headers = headers
        if status != 200 or any(
            name == b"content-type" and b"json" in kind.lower() for name, kind in headers
        ):
            self._whole = bytearray()

    def data(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes or self._whole is not None:
            self._bounded(data)
        elif self._slices is not None or len(data) > SLICE_BYTES:
            self._sliced().add(data)
        else:
            self._read(data)

    def ended(self) -> None:
        if self._slices is not None:
            self._slices.end(self._ended)
        else:
            self._ended()

    def failed(self, fault: HttpFault) -> None:
        if self._slices is not None:
            self._slices.end(lambda: self._failed(fault))
        else:
            self._failed(fault)

    def _ended(self) -> None:
        self._stop_tail()
        whole = self._whole
        if self._is_told:
            return
        if whole is not None and self._status != 200:
            self._refused(bytes(whole))
            return
        if whole is not None:
            self._guarded(lambda now_s: self._reader.event(bytes(whole), now_s))
        if not self._is_told:
            self._guarded(self._reader.closed)
        if not self._is_told:
            self._end(WorkerLost(f"upstream {self.worker} ended the answer before it was complete"))
        self._stop_tail()  # that of `_finish`: there is no rest to wait for

    def _failed(self, fault: HttpFault) -> None:
        self._stop_tail()
        if not self._is_told and self._reader.has_finish:  # nothing of the answer is missing
            self._guarded(self._reader.closed)
        if not self._is_told:
            self._end(WorkerLost(f"upstream {self.worker}: {fault}"))
        self._stop_tail()  # as in `_ended`

    # -- in ------------------------------------------------------------------------------------------------

    def _sliced(self) -> Slices:
        if self._slices is None:
            self._slices = Slices(self._call, self._read)
        return self._slices

    def _bounded(self, data: bytes) -> None:
        """What is no stream is read whole, and nothing is read past a bound: a server may go on for ever."""
        if self._is_told:
            self._close()  # a tail without end
            return
        if self._whole is not None and self._status != 200:
            self._whole += data[: MAX_BODY_BYTES - len(self._whole)]
            if self._num_bytes > MAX_BODY_BYTES:
                self._call.abort()
                self._refused(bytes(self._whole))
            return
        limit = self._max_bytes if self._whole is None else min(MAX_EVENT_BYTES, self._max_bytes)
        if self._num_bytes > limit:
            said = f"upstream {self.worker} sent an answer of {self._num_bytes} bytes or more"
            self._break(UpstreamFault(f"{said}; the limit is {limit}"))
        elif self._whole is not None:
            self._whole += data

    def _read(self, data: bytes) -> None:
        if self._is_told:
            return  # the tail
        now_s = time.monotonic()
        try:
            for payload in self._events.feed(data):
                if not self._has_events:
                    self._has_events = True
                    self._share.first_token()
                if self._reader.event(payload, now_s):
                    self._finish()
                if self._is_told:  # or its sink has aborted it
                    return
            if self._reader.has_finish and self._tail is None:
                self._tail = asyncio.get_running_loop().call_later(REST_S, self._no_rest)
        except Exception as error:
            self._raised(error)

    def _no_rest(self) -> None:
        self._guarded(self._reader.closed)

    def _guarded(self, tell: Callable[[float], bool]) -> None:
        try:
            if tell(time.monotonic()):
                self._finish()
        except Exception as error:
            self._raised(error)

    def _raised(self, error: Exception) -> None:
        """By the reader, for what is no answer, or by the sink. Both may quote what was read."""
        log_fault(error)
        if isinstance(error, ValueError | RecursionError):  # JSON may be nested too deeply
            self._break(UpstreamFault(f"upstream {self.worker} sent what is no answer of its API"))
        else:
            self._break(HeadraceError("An internal error ended this stream."))

    def _refused(self, body: bytes) -> None:
        send, self._send = self._send, None
        try:
            if send is not None and self._reader.refused(self._status, body):
                self._whole, self._has_begun, self._num_bytes = None, False, 0
                self._call = send(self)
                return
            error = refusal(self.worker, self._status, body, self._headers)
        except Exception as raised:
            self._raised(raised)
        else:
            self._end(error)

    # -- ends ----------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Complete. The rest of the response is read, so that its connection can serve again."""
        if not self._is_told:
            self._is_told = True
            self._share.release()
            self._stop_tail()
            self._tail = asyncio.get_running_loop().call_later(TAIL_S, self._close)

    def _close(self) -> None:
        self._is_told = True
        self._send = None
        self._stop_tail()
        self._share.release()
        if self._slices is not None:
            self._slices.drop()
        self._call.abort()

    def _break(self, error: HeadraceError) -> None:
        """Nothing more of this response is wanted."""
        if not self._is_told:
            self._close()
            self._quietly(self._give_up)
            self._quietly(self._fail, error)

    def _end(self, error: HeadraceError) -> None:
        """The exchange is over, and not as it should be."""
        self._is_told = True
        self._send = None
        self._share.release()
        self._quietly(self._host.noted, self._model, error, self._has_begun)
        self._quietly(self._fail, error)
        self._quietly(self._host.told)

    def _quietly(self, tell: Callable[..., None], *arguments: object) -> None:
        """Whoever else raises, the sink must hear of the end."""
        try:
            tell(*arguments)
        except Exception as error:
            log_fault(error)

    def _stop_tail(self) -> None:
        if self._tail is not None:
            self._tail.cancel()
            self._tail = None
