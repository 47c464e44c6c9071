"""What passed requests need of others: where they go, a place at a server, and who sends them.

The requests themselves are in `gateway/passthrough.py`; places are given by `gateway/upstream_choice.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from backend.http_ports import Headers, HttpCall, HttpRequest, Origin, Receiver
from pipeline.errors import WorkerLost


@dataclass(frozen=True, slots=True)
class UpstreamTarget:
    """Where a request goes: `prefix` before its path, `headers` with the server's key. Logs have `name`."""

    origin: Origin
    prefix: str = ""
    headers: Headers = ()
    name: str = ""


class Place(Protocol):
    """One request's place at a server, which it takes until `release`."""

    @property
    def target(self) -> UpstreamTarget: ...

    def begun(self, status: int) -> None:
        """The response has."""

    def lost(self, error: WorkerLost) -> None:
        """The connection was, before any of the response had come."""

    def release(self) -> None:
        """The request is over. Idempotent."""


class Choose(Protocol):
    def __call__(self, model: str | None) -> Place:
        """At a server of this model, or at any for None. Raises `UnknownModel`, `NoWorker`, `QueueFull`."""


class Sender(Protocol):
    """`backend.http_client.HttpClient`."""

    def send(
        self, origin: Origin, request: HttpRequest, receiver: Receiver, head_s: float | None = None
    ) -> HttpCall: ...
