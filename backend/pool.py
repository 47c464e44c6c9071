"""All replicas as one engine, linked workers and upstream servers: who has room, who gets the next call."""

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
from backend.link_client import ClientLimits
from backend.media_support import Support, joined, lack
from backend.remote_worker import PoolSettings, RemoteWorker
from backend.replica import Replica, WorkerStatus
from pipeline.errors import EngineRejected, NoWorker, QueueFull, UnknownModel
from pipeline.ports import Handle, Sink, TextSink
from pipeline.routing import Load, choose
from pipeline.values import EngineCall, MediaKind, ModelInfo, TextCall

logger = logging.getLogger(__name__)

QUIET_LIMIT_S: Final = 3.0  # heartbeats come once a second

__all__ = ["ClientLimits", "PoolSettings", "RemoteWorker", "WorkerPool", "WorkerStatus", "linked_pool"]


class WorkerPool:
    """`pipeline.ports.Engine` over replicas, which have joined, or will join, the catalog.

    One that is listed twice is a `ValueError`.
    """

    def __init__(self, replicas: Sequence[Replica], catalog: Catalog) -> None:
        keys = [replica.key for replica in replicas]
        if len(set(keys)) != len(keys):
            raise ValueError(f"a worker is listed twice: {', '.join(keys)}")
        self.replicas = tuple(replicas)
        self._catalog = catalog
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to connect; replicas become ready in their own time (`statuses`)."""
        self._tasks = [
            asyncio.create_task(replica.run(), name=f"worker {replica.key}") for replica in self.replicas
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
        return [replica.status() for replica in self.replicas]

    def misfits(self) -> list[str]:
        """Why replicas are refused that do not fit this gateway's own settings, one line each."""
        return [replica.misfit for replica in self.replicas if replica.misfit is not None]

    def is_settled(self) -> bool:
        """Whether every replica has once served, failed, been refused, or told that it still loads."""
        return all(replica.has_answered for replica in self.replicas)

    # -- pipeline.ports.Engine -----------------------------------------------------------------------------

    def models(self) -> list[ModelInfo]:
        """Models with a ready replica.

        Where replicas of a name differ, the shortest context is the model's, and the media that any takes.
        """
        infos = []
        for name in self._catalog.names():
            info, lengths = self._catalog.info(name), self._context_lengths(name)
            if info is not None and lengths:
                infos.append(replace(info, max_model_len=min(lengths), media=self.media(name)))
        return infos

    def _context_lengths(self, name: str) -> list[int]:
        return [replica.max_model_len(name) for replica in self.replicas if replica.serves(name)]

    def max_model_len(self, model: str) -> int:
        lengths = self._context_lengths(model)
        if not lengths:
            raise self._nobody(model)
        return min(lengths)

    def media(self, model: str) -> Support:
        """What the ready replicas of a model take beside text; nothing where none is ready."""
        return joined(replica.media for replica in self.replicas if replica.serves(model))

    def check_room(self, model: str) -> None:
        self._with_room(model, 0)

    def submit(self, call: EngineCall, sink: Sink) -> Handle:
        return self._choose(call, [medium.kind for medium in call.media]).submit(call, sink)

    def submit_text(self, call: TextCall, sink: TextSink) -> Handle:
        return self._choose(call).submit_text(call, sink)

    def _choose(self, call: EngineCall | TextCall, kinds: Sequence[MediaKind] = ()) -> Replica:
        able = _not_silent(self._with_room(call.model, call.num_prompt_tokens, call.fingerprint, kinds))
        loads = [Load(replica.key, replica.outstanding_tokens) for replica in able]
        return able[choose(call.affinity, loads)]

    def _with_room(
        self, model: str, num_tokens: int, fingerprint: str = "", kinds: Sequence[MediaKind] = ()
    ) -> list[Replica]:
        """Ready replicas of a model that can take such a prompt; there is at least one.

        `fingerprint`: of this very model. A name may have become another one's since the ids were made.
        `kinds`: of its media, each as often as there are such.
        """
        ready = [replica for replica in self.replicas if replica.serves(model, fingerprint)]
        if not ready:
            raise self._nobody(model, fingerprint)
        if kinds:
            problems = [lack(replica.media, kinds) for replica in ready]
            ready = [each for each, problem in zip(ready, problems, strict=True) if problem is None]
            if not ready:
                raise EngineRejected(f"No worker of {model!r} takes this request's media: {problems[0]}.")
        able = [replica for replica in ready if replica.has_room(num_tokens)]
        if not able:
            raise QueueFull(
                f"The queue of every worker of {model!r} is full ({len(ready)} ready). Try again later."
            )
        return able

    def _nobody(self, model: str, fingerprint: str = "") -> UnknownModel | NoWorker:
        """A name that nobody serves is unknown only when every replica has said what it serves."""
        if fingerprint and self._context_lengths(model):
            return NoWorker("The model was exchanged meanwhile: another model has its name now. Try again.")
        known = self._catalog.names()
        names = [replica.model_names for replica in self.replicas]
        if model not in known and None not in names:
            return UnknownModel(model, known)
        states = Counter(
            replica.state
            for replica, served in zip(self.replicas, names, strict=True)
            if served is None or model in served
        )
        told = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none configured"
        # Without the name: nobody may know it, and then it is a client's text, which no log may hold.
        return NoWorker(f"No worker of this model is ready (workers: {told}).")


def linked_pool(
    addresses: Sequence[Address],
    settings: PoolSettings,
    on_model: OnModel,
    rng: random.Random | None = None,
    on_change: Callable[[RemoteWorker], None] = lambda worker: None,
) -> WorkerPool:
    """A pool of linked workers alone.

    `on_model(info, files)` is awaited before the first worker of a model becomes ready, with the model's
    files by name. `rng` jitters reconnects. `on_change` is called with each worker that has become ready or
    is no longer.
    """
    catalog = Catalog(on_model, settings.reasoning_parser_of)
    rng = rng or random.Random()
    workers = [RemoteWorker(address, settings, catalog, rng, on_change) for address in addresses]
    return WorkerPool(workers, catalog)


def _not_silent(replicas: list[Replica]) -> list[Replica]:
    """Those whose heartbeats come, if there are any: one that froze a moment ago is still connected."""
    now_s = time.monotonic()
    heard = [replica for replica in replicas if now_s - replica.heard_s < QUIET_LIMIT_S]
    return heard or replicas
