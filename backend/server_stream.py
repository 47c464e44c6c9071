"""A worker's side of one stream: its lifecycle, and what connections and worker owe each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from backend.assembly import Assembly
from backend.link import Delta, Frame, Welcome
from backend.ports import EngineInfo, Job

ASSEMBLING, REFUSED, RUNNING, ENDED, ABORTING, ORPHAN, FREE = (
    "assembling",
    "refused",  # answered with an ERROR while pieces of it may still be on their way
    "running",
    "ended",  # its finish waits in the outbox
    "aborting",
    "orphan",  # its connection is gone; the engine has not confirmed the abort yet
    "free",
)
LIFECYCLE: Final[dict[str, dict[str, str]]] = {
    ASSEMBLING: {"submit": RUNNING, "refuse": REFUSED, "abort": FREE, "lost": FREE},
    REFUSED: {"submit": FREE, "abort": FREE, "replace": FREE, "lost": FREE},
    RUNNING: {"finish": FREE, "hold": ENDED, "fail": FREE, "closed": FREE, "abort": ABORTING, "lost": ORPHAN},
    ENDED: {"sent": FREE, "abort": FREE, "lost": FREE},
    ABORTING: {"finish": FREE, "fail": FREE, "closed": FREE, "abort": ABORTING, "lost": ORPHAN},
    ORPHAN: {"finish": FREE, "fail": FREE, "closed": FREE},
    FREE: {},
}


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of a worker's link. Seconds, bytes and counts."""

    max_connections: int = 64
    max_waiting: int = 1024  # jobs without a first token, over all connections; more are answered `busy`
    max_assembly_bytes: int = 256 << 20  # of prompts in pieces and media, over all connections
    handshake_s: float = 10.0
    stats_s: float = 1.0
    write_high_bytes: int = 256 << 10  # unsent; past it the reader counts as slow, and its deltas merge
    slow_reader_s: float = 30.0  # a gateway that has not caught up (to a quarter) after so long is gone
    stop_s: float = 1.0  # to flush the last words when stopping


class Connection(Protocol):
    """What the worker as a whole does to one connection; `GatewayConnection` is one."""

    deltas: list[Delta]
    phase: str
    streams: dict[int, Stream]

    @property
    def gone(self) -> asyncio.Future[None]: ...
    def welcome(self) -> None: ...
    def send_step(self) -> None: ...
    def send_heartbeat(self, stats: bytearray) -> None: ...
    def finished(self, stream: Stream) -> None: ...
    def free(self, stream: Stream, event: str, last: Frame) -> None: ...
    def end(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class Stream:
    """One generation of one slot: the engine's key for it."""

    __slots__ = ("connection", "generation", "media", "num_bytes", "pieces", "slot", "started", "state")

    def __init__(self, connection: Connection, slot: int, generation: int) -> None:
        self.connection = connection
        self.slot = slot
        self.generation = generation
        self.state = ASSEMBLING
        self.started = False  # it has had its first output
        self.pieces: list[bytes] = []
        self.num_bytes = 0  # of the pieces
        self.media = bytearray()  # all of them so far, one after the other

    def advance(self, event: str) -> None:
        self.state = LIFECYCLE[self.state][event]


class Host(Protocol):
    """The worker, to its connections."""

    limits: ServerLimits
    secret: bytes
    assembly: Assembly

    @property
    def info(self) -> EngineInfo: ...
    @property
    def is_ready(self) -> bool: ...
    def busy(self) -> str | None:
        """Why no further job can be taken, or None."""

    def welcome(self, nonce: bytes) -> Welcome: ...
    def opened(self, connection: Connection) -> bool: ...
    def lost(self, connection: Connection, streams: Sequence[Stream]) -> None: ...
    def submit(self, stream: Stream, job: Job) -> None: ...
    def abort(self, streams: Sequence[Stream]) -> None: ...
