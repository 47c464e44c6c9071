"""Questions to an upstream server about itself: short answers, with its key and the prefix of its paths.

What is asked, and what an answer means, is its kind's (`backend/upstream_ports.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Final, Protocol, TypeVar

from backend.http_call import HttpTimeout
from backend.http_client import HttpResponse
from backend.http_ports import HttpCall, HttpFault, HttpRequest, Origin, Receiver
from backend.replica_life import RefusedError
from backend.upstream_address import UpstreamAddress
from backend.upstream_faults import KEY_STATUSES, UpstreamFault, bad_key
from pipeline.errors import WorkerLost, WorkerStalled

MAX_ANSWER_BYTES: Final = 8 << 20  # vLLM's /metrics has 0.1 MB
_JSON: Final = ((b"content-type", b"application/json"),)

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
        self._key = () if api_key is None else ((b"authorization", b"Bearer " + api_key.encode()),)

    def own(self, request: HttpRequest) -> HttpRequest:
        """A request with what is this server's: the prefix of its paths, and the key."""
        target = self._address.prefix + request.target
        return replace(request, target=target, headers=(*request.headers, *self._key))

    async def __call__(
        self, method: str, target: str, body: bytes = b"", allowed: Sequence[int] = ()
    ) -> HttpResponse:
        request = self.own(HttpRequest(method, target, _JSON if body else (), body))
        origin, server = self._address.origin, f"upstream {self._address}"
        try:
            response = await self._http.fetch(origin, request, self._limit_s, MAX_ANSWER_BYTES)
        except HttpTimeout as error:
            raise WorkerStalled(f"{server}: {error}") from error
        except HttpFault as error:
            raise WorkerLost(f"{server}: {error}") from error
        if response.status // 100 == 2 or response.status in allowed:
            return response
        if response.status in KEY_STATUSES:
            raise RefusedError(bad_key(str(self._address), response.status))
        raise UpstreamFault(f"{server} answers {method} {target} with HTTP {response.status}")

    async def told(self, answer: Awaitable[_T]) -> _T:
        """What a kind makes of answers; its `ValueError` is a fault of the server."""
        try:
            return await answer
        except ValueError as error:
            server = f"upstream {self._address}"
            raise UpstreamFault(f"{server} says of itself what cannot be read: {error}") from error
