"""One HTTP request and its response at the ASGI edge: head, body within limits, outlet, and the end of both.

Knows ASGI and nothing of models. `gateway/flow.py` drives it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from time import monotonic
from typing import Any, Final, TypeVar
from uuid import uuid4

from gateway.client_address import LOGGED_CLIENT
from gateway.cors import RESPONSE_HEADERS
from gateway.direct_body import DIRECT_EXTENSION
from gateway.error_body import how_it_ended
from gateway.outlet import Outlet, Send, no_direct
from gateway.record import RequestRecord
from gateway.writers import send_error
from pipeline.errors import BodyTooLarge, BodyTooSlow, ClientGone, HeadraceError, InvalidRequest

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

Served = TypeVar("Served")

SANE_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
ABORT_EXTENSION: Final = "headrace.abort"  # gateway/http_protocol.py puts the transport's abort() there


class Exchange:
    """A request being answered. `gone` is set by the owner to learn of a lost client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_buffered_bytes: int) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.path: str = scope["path"]
        self.query_string: bytes = scope.get("query_string", b"")
        self.http_version: str = scope.get("http_version", "1.1")
        self.record = RequestRecord(request_id=self._request_id(), route=scope["path"], started_s=monotonic())
        self.record.client = scope.get(LOGGED_CLIENT)
        begin_direct = scope.get("extensions", {}).get(DIRECT_EXTENSION, no_direct)
        headers = scope.get(RESPONSE_HEADERS, ())
        self.outlet = Outlet(send, max_buffered_bytes, self._on_gone, headers, begin_direct)
        self.on_gone: Callable[[str], None] = _ignore
        self._deadline: asyncio.Timeout | None = None  # of the body, while it is read
        self._work: asyncio.Future[Any] | None = None  # of the prompt, while it is prepared elsewhere
        self._refusal: HeadraceError | None = None
        self._scope = scope
        self._receive = receive

    async def read_body(self, max_bytes: int, limit_s: float) -> bytes:
        """The whole body.

        Raises `BodyTooLarge` as soon as the limit is known to be passed, `ClientGone` if it breaks off.
        """
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:19]) > max_bytes:
            raise BodyTooLarge(int(declared[:19]), max_bytes)
        try:
            async with asyncio.timeout(limit_s) as self._deadline:
                return await self._receive_body(max_bytes)
        except TimeoutError:
            raise self._refusal or BodyTooSlow(limit_s) from None
        finally:
            self._deadline = None

    def refuse(self, error: HeadraceError) -> None:
        """Wait no longer for the body or the prompt: `read_body` or `unless_gone` raises this."""
        self._refusal = error
        if self._deadline is not None:
            self._deadline.reschedule(0.0)
        elif self._work is not None:
            self._work.cancel()

    async def _receive_body(self, max_bytes: int) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("closed before its body was complete")
            part = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise BodyTooLarge(num_bytes, max_bytes)
            if part:
                parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def unless_gone(self, work: Awaitable[Served]) -> Served:
        """The result of some work before anything is sent; it is not begun after `refuse`.

        Raises `ClientGone` if the client leaves first, and what `refuse` was given.
        """
        self._work = task = asyncio.ensure_future(work)
        if self._refusal is not None:  # it came in a pause, while there was no work
            task.cancel()
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone("closed before its prompt was ready")
            if task.cancelled() and self._refusal is not None:
                raise self._refusal
            return task.result()
        finally:
            self._work = None
            task.cancel()
            gone.cancel()

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def finished(self) -> None:
        """Returns when the response is complete or the client has gone, whichever is first.

        ASGI promises `http.disconnect` in both cases, so that one task is enough to watch for it.
        """
        await self._gone()
        if not self.outlet.closed or self.outlet.blocked_since_s is not None:
            self.outlet.drop()
            self.on_gone("closed the connection")

    def fail(self, error: Exception) -> None:
        """Answer with an error; only before anything else was sent."""
        self.record.ended, self.record.detail = how_it_ended(error)
        if isinstance(error, ClientGone):
            self.record.status = error.status_hint
            self.outlet.drop()
        else:
            send_error(self.outlet, error, self.record)

    def let_go(self) -> None:
        """It has been served. Whoever is told of its end would wait for the garbage collector with it."""
        self.on_gone = _ignore

    def close(self) -> None:
        """Cut the connection now: closing it politely would wait for a client that does not read."""
        abort = self._scope.get("extensions", {}).get(ABORT_EXTENSION)
        if abort is not None:
            abort()

    def seconds_header(self, name: bytes) -> float | None:
        """A header that holds a positive number of seconds, or None."""
        try:
            value = float(self.headers[name])
        except (KeyError, ValueError):
            return None
        return value if 0 < value < 1e9 else None

    @property
    def read_timeout_s(self) -> float | None:
        """How long the client waits for a byte, as openai's clients tell it."""
        return self.seconds_header(b"x-stainless-read-timeout")

    def _request_id(self) -> str:
        given = self.headers.get(b"x-request-id", b"")
        return given.decode() if SANE_REQUEST_ID.fullmatch(given) else uuid4().hex

    def _on_gone(self, reason: str) -> None:
        self.on_gone(reason)
        self.close()


def require_json(headers: MutableMapping[bytes, bytes]) -> None:
    """Raises `InvalidRequest` unless the body says that it is JSON.

    A page of another site can send any other type, or none, without asking (CORS's simple requests), also to
    a gateway without keys on the visitor's own machine.
    """
    media_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if media_type != b"application/json" and not media_type.endswith(b"+json"):
        shown = media_type[:60].decode("latin-1")
        raise InvalidRequest(
            f"The body's content type is {shown!r}; it must be 'application/json'.", "content-type"
        )


def _ignore(reason: str) -> None:
    pass
