"""What the pool needs of each server of a model: whether it serves, its load, and that it takes calls.

Linked workers (`backend/remote_worker.py`) and upstream servers (`backend/upstream_server.py`) are replicas.
What they have in common beyond the Protocol is here too: their states' names, their status, the queue bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from backend.media_support import Support
from pipeline.ports import Handle, Sink, TextSink
from pipeline.values import EngineCall, TextCall

CONNECTING: Final = "connecting"
LOADING: Final = "loading"
READY: Final = "ready"
DRAINING: Final = "draining"
STALLED: Final = "stalled"
REFUSED: Final = "refused"
CLOSED: Final = "closed"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A replica for /ready, /v1/models and metrics.

    The engine's figures are of its last heartbeat, and 0 without a link.
    """

    address: str
    name: str  # the worker's own; its address until it has introduced itself
    state: str
    reason: str  # why it is not ready; empty when it is
    models: tuple[str, ...]
    scripted: bool
    engine_path: str
    versions: dict[str, str]
    max_running: int
    running: int
    waiting: int
    kv_usage: float
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    outstanding_requests: int  # of this gateway process, like the following
    outstanding_tokens: int
    waiting_requests: int
    waiting_tokens: int
    dropped_entries: int
    copied_bytes: int
    num_connects: int


class Replica(Protocol):
    """A server of one or more models. Only one that serves a model is asked for context, room and media."""

    @property
    def key(self) -> str:
        """Where it is: the same over its restarts, and no other's."""

    @property
    def state(self) -> str: ...

    @property
    def has_answered(self) -> bool:
        """Whether it has once served, failed, been refused, or told that it still loads."""

    @property
    def misfit(self) -> str | None:
        """Why it does not fit this gateway's own settings, while it is refused for that."""

    @property
    def model_names(self) -> Sequence[str] | None:
        """What it serves, or served last; None until it has said so."""

    @property
    def heard_s(self) -> float:
        """Monotonic time when it last sent anything."""

    @property
    def media(self) -> Support:
        """What it takes beside text."""

    @property
    def outstanding_tokens(self) -> int:
        """Prompts not prefilled and outputs not finished, of this process."""

    async def run(self) -> None:
        """Keep it connected until cancelled."""

    def serves(self, model: str, fingerprint: str = "") -> bool:
        """Whether it is ready and serves the model, of this fingerprint if given."""

    def max_model_len(self, model: str) -> int: ...

    def has_room(self, num_tokens: int) -> bool:
        """Whether a prompt of this length may join those that wait for it."""

    def submit(self, call: EngineCall, sink: Sink) -> Handle: ...

    def submit_text(self, call: TextCall, sink: TextSink) -> Handle:
        """Only for a model whose `ModelInfo` says that its servers take text."""

    def status(self) -> WorkerStatus: ...


class Queue(Protocol):
    """This process's calls at one replica that have no first token yet."""

    num_waiting: int
    waiting_tokens: int  # of their prompts


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """How much may wait at one replica."""

    max_waiting_requests: int = 256  # without a first token
    max_waiting_tokens: int = 1_000_000  # of their prompts

    def admit(self, queue: Queue, num_tokens: int) -> bool:
        """Whether a prompt of this length may join. A single one always may."""
        if queue.num_waiting >= self.max_waiting_requests:
            return False
        return not queue.num_waiting or queue.waiting_tokens + num_tokens <= self.max_waiting_tokens
