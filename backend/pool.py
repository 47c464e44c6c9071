"""All linked workers as one engine: who serves what, who has room, who gets the next call."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from backend.address import Address
from backend.catalog import Catalog, OnModel
from backend.link_client import ClientLimits, LinkClient
from backend.media_support import Support, joined, lack
from backend.remote_worker import PoolSettings, RemoteWorker, WorkerStatus
from pipeline.errors import EngineRejected, NoWorker, QueueFull, UnknownModel
from pipeline.ports import Handle, Sink
from pipeline.routing import Load, choose
from pipeline.values import EngineCall, MediaKind, ModelInfo

logger = logging.getLogger(__name__)

QUIET_LIMIT_S: Final = 3.0  # heartbeats come once a second

__all__ = ["ClientLimits", "PoolSettings", "RemoteWorker", "WorkerPool", "WorkerStatus"]


class WorkerPool:
    """`pipeline.ports.Engine` over workers.

    `on_model(info, files)` is awaited before the first worker of a model becomes ready, with the model's
    files by name. `rng` jitters reconnects. `on_change` is called with each worker that has become ready or
    is no longer. A worker that is listed twice is a `ValueError`.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        settings: PoolSettings,
        on_model: OnModel,
        rng: random.Random | None = None,
        on_change: Callable[[RemoteWorker], None] = lambda worker: None,
    ) -> None:
        if len(set(addresses)) != len(addresses):
            raise ValueError(f"a worker is listed twice: {', '.join(map(str, addresses))}")
        self._catalog = Catalog(on_model, settings.reasoning_parser_of)
        rng = rng or random.Random()
        self._workers = [
            RemoteWorker(address, settings, self._catalog, rng, on_change) for address in addresses
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to connect; workers become ready in their own time (`statuses`)."""
        self._tasks = [
            asyncio.create_task(worker.run(), name=f"worker {worker.key}") for worker in self._workers
        ]

    async def stop(self) -> None:
        """Close every connection; what still runs fails with `WorkerLost` and is aborted by its worker."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("a worker's task failed", exc_info=result)
        self._tasks = []

    def statuses(self) -> list[WorkerStatus]:
        return [worker.status() for worker in self._workers]

    def misfits(self) -> list[str]:
        """Why workers are refused that do not fit this gateway's own settings, one line each."""
        return [worker.misfit for worker in self._workers if worker.misfit is not None]

    def is_settled(self) -> bool:
        """Whether every worker has once served, failed, been refused, or told that it still loads."""
        return all(worker.has_answered for worker in self._workers)

    # -- pipeline.ports.Engine -----------------------------------------------------------------------------

    def models(self) -> list[ModelInfo]:
        """Models with a ready worker.

        Where workers of a name differ, the shortest context is the model's, and the media that any takes.
        """
        infos = []
        for name in self._catalog.names():
            info, lengths = self._catalog.info(name), self._context_lengths(name)
            if info is not None and lengths:
                infos.append(replace(info, max_model_len=min(lengths), media=self.media(name)))
        return infos

    def _context_lengths(self, name: str) -> list[int]:
        return [
            worker.welcome.max_model_len
            for worker in self._workers
            if worker.welcome is not None and worker.serving(name) is not None
        ]

    def max_model_len(self, model: str) -> int:
        lengths = self._context_lengths(model)
        if not lengths:
            raise self._nobody(model)
        return min(lengths)

    def media(self, model: str) -> Support:
        """What the ready workers of a model take beside text; nothing where none is ready."""
        clients = (worker.serving(model) for worker in self._workers)
        return joined(client.media for client in clients if client is not None)

    def check_room(self, model: str) -> None:
        self._with_room(model, 0)

    def submit(self, call: EngineCall, sink: Sink) -> Handle:
        kinds = [medium.kind for medium in call.media]
        clients = _not_silent(self._with_room(call.model, call.prompt.num_tokens, call.fingerprint, kinds))
        loads = [Load(client.key, client.slots.outstanding_tokens) for client in clients]
        return clients[choose(call.prompt.affinity, loads)].submit(call, sink)

    def _with_room(
        self, model: str, num_tokens: int, fingerprint: str = "", kinds: Sequence[MediaKind] = ()
    ) -> list[LinkClient]:
        """Connections to ready workers of a model that can take such a prompt; there is at least one.

        `fingerprint`: of this very model. A name may have become another one's since the ids were made.
        `kinds`: of its media, each as often as there are such.
        """
        ready = [
            (worker, client)
            for worker in self._workers
            if (client := worker.serving(model, fingerprint)) is not None
        ]
        if not ready:
            raise self._nobody(model, fingerprint)
        if kinds:
            problems = [lack(client.media, kinds) for _, client in ready]
            ready = [each for each, problem in zip(ready, problems, strict=True) if problem is None]
            if not ready:
                raise EngineRejected(f"No worker of {model!r} takes this request's media: {problems[0]}.")
        clients = [client for worker, client in ready if worker.has_room(client.slots, num_tokens)]
        if not clients:
            raise QueueFull(
                f"The queue of every worker of {model!r} is full ({len(ready)} ready). Try again later."
            )
        return clients

    def _nobody(self, model: str, fingerprint: str = "") -> UnknownModel | NoWorker:
        """A name that nobody serves is unknown only when every worker has said what it serves."""
        if fingerprint and self._context_lengths(model):
            return NoWorker("The model was exchanged meanwhile: another model has its name now. Try again.")
        known = self._catalog.names()
        if model not in known and all(worker.welcome is not None for worker in self._workers):
            return UnknownModel(model, known)
        states = Counter(
            worker.state
            for worker in self._workers
            if worker.welcome is None or model in worker.welcome.model_names
        )
        told = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none configured"
        # Without the name: nobody may know it, and then it is a client's text, which no log may hold.
        return NoWorker(f"No worker of this model is ready (workers: {told}).")


def _not_silent(clients: list[LinkClient]) -> list[LinkClient]:
    """Those whose heartbeats come, if there are any: a worker that froze a moment ago is still linked."""
    now_s = time.monotonic()
    heard = [client for client in clients if now_s - client.heard_s < QUIET_LIMIT_S]
    return heard or clients
