"""One client's response: what is pushed leaves in the same call, without waking a task.

Waking the request's task for each token costs 2 to 3 us. An ASGI `send` that need not wait finishes in one
step, so `MessageOutlet` runs that step itself. Only when the client reads slowly does `send` suspend; a task
then finishes it, later messages wait in a bounded buffer, and past the bound the client is dropped. Where the
server offers it, chunks of a body and text messages do without `send` as long as nothing waits
(`gateway/direct_body.py`, `gateway/direct_text.py`).

`Outlet` here is the body of an HTTP response. A WebSocket's is in `gateway/websocket_outlet.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, MutableMapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from gateway.direct_body import BeginDirect, WriteBytes

Message = MutableMapping[str, Any]
Send = Callable[[Message], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """How much may wait for a client that does not read, and for how long, in seconds."""

    max_bytes: int = 256 << 10
    limit_s: float = 30.0


class Body(Protocol):
    """Where a response's bytes go, as those see it who write them."""

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None: ...

    def push(self, body: bytes) -> None: ...

    def end(self, body: bytes = b"") -> None: ...


def no_direct(on_stop: Callable[[], None]) -> WriteBytes | None:
    """A server that offers nothing: all goes through `send`."""
    return None


class MessageOutlet:
    """The way out through one ASGI `send`, whatever the kind of its messages.

    Never raises to the pusher; `on_gone(reason)` is called at most once. `on_flushed()`: a client that was
    slow has read what waited for it. `begin_direct`: the server's offer.
    """

    __slots__ = (
        "_begin_direct",
        "_buffer",
        "_max_bytes",
        "_on_gone",
        "_send",
        "_task",
        "_write",
        "blocked_since_s",
        "closed",
        "num_buffered",
        "on_flushed",
        "peak",
    )

    def __init__(
        self,
        send: Send,
        max_buffered_bytes: int,
        on_gone: Callable[[str], None],
        begin_direct: BeginDirect = no_direct,
    ) -> None:
        self._send = send
        self._begin_direct = begin_direct
        self._write: WriteBytes | None = None  # past `send`
        self._max_bytes = max_buffered_bytes
        self._on_gone = on_gone
        self.on_flushed: Callable[[], None] = nothing
        self._buffer: list[Message] = []
        self._task: asyncio.Task[None] | None = None
        self.num_buffered = 0  # bytes that wait for the client
        self.peak = 0
        self.blocked_since_s: float | None = None  # monotonic; the client has not read since
        self.closed = False  # the last message went out, or the client is gone

    def drop(self) -> None:
        """The client is gone: forget what waits for it."""
        self.closed = True
        self._buffer.clear()
        self.num_buffered = 0
        self.blocked_since_s = None
        self._on_gone = _ignore  # whoever is told of it holds this outlet
        self._write = None
        self._begin_direct = no_direct  # it holds the connection
        if self._task is not None:
            self._task.cancel()
            self._task = None  # here, since a task that is cancelled before its first step runs nothing

    def go_direct(self) -> None:
        """From here on what is pushed may pass `send` by, if the server offers it and nothing waits."""
        if self._task is None and not self.closed:
            self._write = self._begin_direct(self._stop_direct)

    def _stop_direct(self) -> None:
        self._write = None

    async def flushed(self) -> None:
        """Returns when nothing waits for the client any more."""
        while self._task is not None:
            await asyncio.wait([self._task])

    def _num_bytes(self, message: Message) -> int:
        """What a message that waits counts for."""
        raise NotImplementedError

    def _next(self) -> Message:
        """Takes out of the buffer what is sent next."""
        raise NotImplementedError

    def _push(self, message: Message) -> None:
        if self.closed:
            return
        if self._task is not None:
            self._enqueue(message)
            return
        sending = self._send(message)
        try:
            waiter = sending.send(None)
        except StopIteration:
            return
        except Exception as error:  # a server may report a lost client by raising from send
            self._gone(f"send failed: {type(error).__name__}")
            return
        self.blocked_since_s = monotonic()
        self._task = asyncio.get_running_loop().create_task(self._finish(sending, waiter))

    def _enqueue(self, message: Message) -> None:
        self._buffer.append(message)
        self.num_buffered += self._num_bytes(message)
        if self.num_buffered > self.peak:
            self.peak = self.num_buffered
        if self._is_too_much():
            self._gone(f"reads too slowly: {self.num_buffered} bytes wait, the limit is {self._max_bytes}")

    def _is_too_much(self) -> bool:
        return self.num_buffered > self._max_bytes

    async def _finish(self, sending: Coroutine[Any, Any, None], waiter: Any) -> None:
        try:
            await _Resumed(sending, waiter)
            while self._buffer:
                self.blocked_since_s = monotonic()
                await self._send(self._next())
        except Exception as error:  # as in _push
            self._gone(f"send failed: {type(error).__name__}")
        finally:
            self.blocked_since_s = None
            self._task = None
        self.on_flushed()
        self.go_direct()

    def _gone(self, reason: str) -> None:
        if not self.closed or self._buffer:
            on_gone = self._on_gone
            self.drop()
            on_gone(reason)


class Outlet(MessageOutlet):
    """The body side of one ASGI `send`.

    `start_headers`: what the response head has whoever writes it.
    """

    __slots__ = ("_start_headers",)

    def __init__(
        self,
        send: Send,
        max_buffered_bytes: int,
        on_gone: Callable[[str], None],
        start_headers: Sequence[tuple[bytes, bytes]] = (),
        begin_direct: BeginDirect = no_direct,
    ) -> None:
        super().__init__(send, max_buffered_bytes, on_gone, begin_direct)
        self._start_headers = start_headers

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the response head."""
        headers = [*headers, *self._start_headers]
        self._push({"type": "http.response.start", "status": status, "headers": headers})
        self.go_direct()

    def push(self, body: bytes) -> None:
        """Send a part of the body."""
        write = self._write
        if write is None:
            self._push({"type": "http.response.body", "body": body, "more_body": True})
            self.go_direct()  # there may have been a pause, and all has been read
        elif body:  # an empty chunk would end the body
            try:
                write(b"%x\r\n%b\r\n" % (len(body), body))
            except Exception as error:  # as in `_push`
                self._gone(f"send failed: {type(error).__name__}")

    def end(self, body: bytes = b"") -> None:
        """Send the last part; nothing may follow."""
        self._write = None
        self._push({"type": "http.response.body", "body": body, "more_body": False})
        self.closed = True

    def _num_bytes(self, message: Message) -> int:
        return len(message["body"])

    def _next(self) -> Message:
        """Everything that waits, as one message: a slow client gets what it missed at once.

        The head never waits: it is the first message, so that nothing can be under way before it.
        """
        waiting, self._buffer = self._buffer, []
        self.num_buffered = 0
        body = b"".join([message["body"] for message in waiting])
        return {"type": "http.response.body", "body": body, "more_body": waiting[-1]["more_body"]}


class _Resumed:
    """Awaits the rest of a coroutine whose first step was run by hand and yielded `waiter`."""

    __slots__ = ("_coroutine", "_waiter")

    def __init__(self, coroutine: Coroutine[Any, Any, None], waiter: Any) -> None:
        self._coroutine = coroutine
        self._waiter = waiter

    def __await__(self) -> Generator[Any, Any, None]:
        coroutine, waiter = self._coroutine, self._waiter
        try:
            while True:
                try:
                    value = yield waiter
                except BaseException as error:  # a cancel must reach the coroutine where it waits
                    waiter = coroutine.throw(error)
                else:
                    waiter = coroutine.send(value)
        except StopIteration:
            return


def _ignore(reason: str) -> None:
    """For who was told."""


def nothing() -> None:
    """For who need not be told."""


def why_too_slow(blocked_since_s: float | None, now_s: float, limit_s: float) -> str | None:
    """Why a client must be dropped that is blocked, or None."""
    if blocked_since_s is None or now_s - blocked_since_s < limit_s:
        return None
    return f"has not read for {now_s - blocked_since_s:.0f} s; the limit is {limit_s:g} s"
