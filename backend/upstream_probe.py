"""What is said to an upstream server besides calls, with its key and the prefix of its paths.

Questions about itself, with short answers, and notices that need none. What is asked, and what an answer
means, is its kind's (`backend/upstream_ports.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol, TypeVar

from backend.http_call import HttpTimeout
from backend.http_client import HttpResponse
from backend.http_ports import Headers, HttpCall, HttpFault, HttpRequest, Origin, Receiver
from backend.replica_life import RefusedError
from backend.upstream_address import UpstreamAddress
from backend.upstream_faults import KEY_STATUSES, UpstreamFault, bad_key
from backend.upstream_key import key_headers
from backend.upstream_ports import JSON_HEADERS, Ask
from pipeline.errors import WorkerLost, WorkerStalled

MAX_TOLD_BYTES: Final = 8 << 20  # vLLM's /metrics has 0.1 MB
MAX_NOTICES: Final = 64  # on their way at once to one server
NOTICE_S: Final = 5.0  # for one

_T = TypeVar("_T")


class Http(Protocol):
    """What an upstream server needs of `http_client.HttpClient`."""

    def send(self, origin: Origin, request: HttpRequest, receiver: Receiver) -> HttpCall: ...

    async def fetch(
        self, origin: Origin, request: HttpRequest, limit_s: float, max_bytes: int
    ) -> HttpResponse: ...


class UpstreamProbe:
    """`upstream_ports.Ask`. `limit_s`: for each answer."""

    def __init__(self, http: Http, address: UpstreamAddress, api_key: str | None, limit_s: float) -> None:
        self._http = http
        self._address = address
        self._limit_s = limit_s
        self.num_notices = 0  # under way
        self._key = key_headers(api_key)

    def own(self, request: HttpRequest) -> HttpRequest:
        """A request with what is this server's: the prefix of its paths, and the key."""
        target = self._address.prefix + request.target
        return replace(request, target=target, headers=(*request.headers, *self._key))

    async def __call__(
        self, method: str, target: str, body: bytes = b"", allowed: Sequence[int] = ()
    ) -> HttpResponse:
        request = self.own(HttpRequest(method, target, JSON_HEADERS if body else (), body))
        server, question = f"upstream {self._address}", f"{method} {target}"
        try:
            response = await self._http.fetch(self._address.origin, request, self._limit_s, MAX_TOLD_BYTES)
        except HttpTimeout as error:
            raise WorkerStalled(f"{server}, {question}: {error}") from error
        except HttpFault as error:
            raise WorkerLost(f"{server}, {question}: {error}") from error
        if response.status // 100 == 2 or response.status in allowed:
            return response
        if response.status in KEY_STATUSES:
            raise RefusedError(bad_key(str(self._address), response.status))
        raise UpstreamFault(f"{server} answers {question} with HTTP {response.status}{_elsewhere(response)}")

    def tell(self, request: HttpRequest) -> None:
        """Send a notice, and take no interest in what becomes of it.

        Nothing is sent where `MAX_NOTICES` are under way: the server does not answer them.
        """
        if self.num_notices < MAX_NOTICES:
            self.num_notices += 1
            notice = _Notice(self._notice_over)
            notice.follow(self._http.send(self._address.origin, self.own(request), notice))

    def _notice_over(self) -> None:
        self.num_notices -= 1

    async def told(self, read: Callable[[Ask], Awaitable[_T]]) -> _T:
        """What a kind makes of answers; what they are not, in form or size, is a fault of the server."""
        question = ""  # the last one of this very reading

        async def ask(
            method: str, target: str, body: bytes = b"", allowed: Sequence[int] = ()
        ) -> HttpResponse:
            nonlocal question
            question = f"{method} {target}"
            return await self(method, target, body, allowed)

        try:
            return await read(ask)
        except (ValueError, OverflowError, RecursionError) as error:
            server = f"upstream {self._address}"
            raise UpstreamFault(f"{server} answers {question} with what cannot be read: {error}") from error


def _elsewhere(response: HttpResponse) -> str:
    """Where it wants to be asked instead: redirects are not followed, the address is to be set right."""
    place = next((value for name, value in response.headers if name == b"location"), b"")
    return (
        f", which leads to {place[:200].decode('latin-1')!r}" if response.status // 100 == 3 and place else ""
    )


class _Notice:
    """`http_ports.Receiver` of an answer that nobody reads. `on_over` is called once."""

    def __init__(self, on_over: Callable[[], None]) -> None:
        self._on_over = on_over
        self._timer: asyncio.TimerHandle | None = None

    def follow(self, call: HttpCall) -> None:
        def late() -> None:
            call.abort()
            self._on_over()

        self._timer = asyncio.get_running_loop().call_later(NOTICE_S, late)

    def begun(self, status: int, headers: Headers) -> None: ...

    def data(self, data: bytes) -> None: ...

    def ended(self) -> None:
        assert self._timer is not None, "an answer within `send`"
        self._timer.cancel()
        self._on_over()

    def failed(self, fault: HttpFault) -> None:
        self.ended()
