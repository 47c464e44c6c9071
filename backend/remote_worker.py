"""One worker as its gateway sees it: connect, learn its model, serve, and start again when it is lost."""

from __future__ import annotations

import logging
import math
import random
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backend.address import Address
from backend.catalog import Catalog, ParserOf, no_parser
from backend.introduction import model_infos
from backend.link import Stats, Welcome
from backend.link_client import ClientLimits, LinkClient, open_link
from backend.media_support import Support
from backend.model_cache import ModelCache
from backend.replica import CONNECTING, DRAINING, READY, QueueBounds, WorkerStatus
from backend.replica_life import ReplicaLife
from pipeline.errors import EngineRejected, WorkerLost
from pipeline.ports import Handle, Sink, TextSink
from pipeline.values import EngineCall, TextCall

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How a gateway treats its workers. Seconds, requests and tokens; the bounds hold per worker."""

    cache_dir: Path
    secret: bytes | None = None
    tls: ssl.SSLContext | None = None
    gateway: str = "gateway"  # this process's name in the workers' logs
    limits: ClientLimits = field(default_factory=ClientLimits)
    max_waiting_requests: int = 256  # without a first token
    max_waiting_tokens: int = 1_000_000  # of their prompts
    min_backoff_s: float = 0.2
    max_backoff_s: float = 3.0
    reasoning_parser_of: ParserOf = no_parser  # a worker of a model must have the same one


class RemoteWorker(ReplicaLife):
    """Keeps one worker linked. `client` and `welcome` are of the present connection, or the last one.

    `on_change` is called with it whenever it has become ready, or is no longer; it must not raise.
    """

    def __init__(
        self,
        address: Address,
        settings: PoolSettings,
        catalog: Catalog,
        rng: random.Random,
        on_change: Callable[[RemoteWorker], None] = lambda worker: None,
    ) -> None:
        backoff_s = (settings.min_backoff_s, settings.max_backoff_s)
        super().__init__(str(address), catalog, rng, backoff_s, lambda: on_change(self))
        self.address = address
        self.client: LinkClient | None = None
        self.welcome: Welcome | None = None
        self._settings = settings
        self._cache = ModelCache(settings.cache_dir)
        self._num_dropped = 0  # on earlier connections
        self._copied_bytes = 0

    # -- backend.replica.Replica ---------------------------------------------------------------------------

    @property
    def model_names(self) -> Sequence[str] | None:
        return self.welcome.model_names if self.welcome is not None else None

    @property
    def heard_s(self) -> float:
        return self.client.heard_s if self.client is not None else -math.inf

    @property
    def media(self) -> Support:
        return self.client.media if self.client is not None else {}

    @property
    def outstanding_tokens(self) -> int:
        return self.client.slots.outstanding_tokens if self.client is not None else 0

    def serves(self, model: str, fingerprint: str = "") -> bool:
        client, welcome = self.client, self.welcome
        if self.state is not READY or welcome is None or client is None or not client.is_open:
            return False
        return fingerprint in ("", welcome.fingerprint) and model in welcome.model_names

    def max_model_len(self, model: str) -> int:
        assert self.welcome is not None, "it serves nothing"
        return self.welcome.max_model_len

    def has_room(self, num_tokens: int) -> bool:
        settings = self._settings
        bounds = QueueBounds(settings.max_waiting_requests, settings.max_waiting_tokens)
        return self.client is not None and bounds.admit(self.client.slots, num_tokens)

    def submit(self, call: EngineCall, sink: Sink) -> Handle:
        """Raises what `LinkClient.submit` raises."""
        assert self.client is not None, "it serves nothing"
        return self.client.submit(call, sink)

    def submit_text(self, call: TextCall, sink: TextSink) -> Handle:
        raise EngineRejected(f"worker {self.key} takes token ids, not text")

    def submit_background(self, call: EngineCall, sink: Sink) -> Handle:
        """Give this very worker a call that does not count as load, for routing or for the queue bounds.

        Raises `WorkerLost` when it is not ready, and what `LinkClient.submit` raises.
        """
        if self.state is not READY or self.client is None:
            raise WorkerLost(f"worker {self.key} is {self.state}")
        return self.client.submit(call, sink, is_background=True)

    def status(self) -> WorkerStatus:
        client, welcome = self.client, self.welcome
        slots = client.slots if client is not None else None
        # With the link all that the worker ran for us is over: its last figures would stand for ever.
        stats = client.stats if client is not None and not client.ended.done() else Stats()
        return WorkerStatus(
            address=str(self.address),
            name=welcome.worker if welcome is not None else str(self.address),
            state=self.state,
            reason="" if self.state is READY else self.reason,
            models=tuple(welcome.model_names) if welcome is not None else (),
            scripted=welcome is not None and welcome.scripted,
            engine_path=welcome.engine_path if welcome is not None else "",
            versions=dict(welcome.versions) if welcome is not None else {},
            max_running=welcome.max_running if welcome is not None else 0,
            running=stats.running,
            waiting=stats.waiting,
            kv_usage=stats.kv_usage,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            preemptions=stats.preemptions,
            outstanding_requests=slots.num_requests if slots is not None else 0,
            outstanding_tokens=slots.outstanding_tokens if slots is not None else 0,
            waiting_requests=slots.num_waiting if slots is not None else 0,
            waiting_tokens=slots.waiting_tokens if slots is not None else 0,
            dropped_entries=self._num_dropped + (slots.num_dropped if slots is not None else 0),
            copied_bytes=self._copied_bytes + (client.copied_bytes if client is not None else 0),
            num_connects=self.num_connects,
        )

    # -- one connection ------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        client = await self._open()
        if self.client is not None:
            self._num_dropped += self.client.slots.num_dropped
            self._copied_bytes += self.client.copied_bytes
        self.client = client
        welcome = await client.welcomed()
        self._advance("load", "reading the model's files")
        infos = model_infos(welcome)
        await self._catalog.join(self, welcome.worker, infos, lambda: self._cache.load(client, welcome.files))
        self.welcome, self.has_answered, self.misfit = welcome, True, None
        if not client.ended.done():
            self.num_connects += 1
            self._advance("accept", "")
            note = " (scripted: its tokens are made up)" if welcome.scripted else ""
            logger.info("worker %s at %s is ready%s", welcome.worker, self.key, note)
        raise await client.over()

    async def _open(self) -> LinkClient:
        settings, limits = self._settings, self._settings.limits
        try:
            return await open_link(
                self.address,
                settings.secret,
                settings.tls,
                settings.gateway,
                limits,
                self._heartbeat,
                self._lose,
            )
        except TimeoutError:
            raise TimeoutError(f"no connection within {limits.handshake_s:g} s") from None

    def _hang_up(self) -> None:
        if self.client is not None:
            self.client.close()

    def _heartbeat(self, stats: Stats) -> None:
        if self.state is CONNECTING:
            self._advance("load", "the engine is loading its model")
            self.has_answered = True
        elif self.state is READY and not stats.accepting:
            self._advance("drain", "it is shutting down")
        elif self.state is DRAINING and stats.accepting:
            self._advance("accept", "")
