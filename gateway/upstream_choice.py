"""Which upstream server gets a request that is passed on as it is (`gateway/passthrough.py`).

By the rules of `backend/pool.py`, for calls whose tokens nobody has counted. The bytes are not seen here.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from backend.pool import QUIET_LIMIT_S
from backend.replica import READY, QueueBounds, Replica
from backend.upstream_address import UpstreamAddress
from backend.upstream_faults import refusal
from backend.upstream_key import key_headers
from backend.upstream_server import UpstreamServer
from gateway.passthrough_ports import UpstreamTarget
from pipeline.errors import NoWorker, QueueFull, UnknownModel, WorkerLost

# A server that refused a passed request as one too many gets no other for so long, where there are others.
# Generations go on: it may be full for this one route, say a proxy of many services.
FULL_S: Final = 0.5


class UpstreamChoice:
    """`gateway.passthrough_ports.Choose`: of the servers that are ready, the one with the least to do.

    `replicas`: linked workers among them are no upstreams. `api_key`: what the servers are shown.
    `max_passed`: requests under way at each, of this process.
    """

    def __init__(
        self,
        addresses: Sequence[UpstreamAddress],
        api_key: str | None,
        replicas: Sequence[Replica],
        max_passed: int = QueueBounds().max_waiting_requests,
    ) -> None:
        headers = key_headers(api_key)
        targets = {
            str(address): UpstreamTarget(address.origin, address.prefix, headers, str(address))
            for address in addresses
        }
        upstreams = [replica for replica in replicas if isinstance(replica, UpstreamServer)]
        self._servers = [_Server(upstream, targets[upstream.key]) for upstream in upstreams]
        self._max_passed = max_passed
        self._next = 0  # which server wins the next tie

    def __call__(self, model: str | None) -> UpstreamPlace:
        ready = [server for server in self._servers if server.serves(model)]
        if not ready:
            raise self._nobody(model)
        able = [server for server in ready if server.has_room(self._max_passed)]
        if not able:
            raise QueueFull(
                f"Every upstream server of this route is full ({len(ready)} ready). Try again later."
            )
        now_s = time.monotonic()
        able = _rather(able, lambda server: now_s - server.upstream.heard_s < QUIET_LIMIT_S)
        able = _rather(able, lambda server: now_s >= server.full_until_s)
        best = min(able, key=self._cost)
        self._next = self._servers.index(best) + 1
        return UpstreamPlace(best, model)

    def _cost(self, server: _Server) -> tuple[int, int, int]:
        load = server.upstream.load
        turn = (self._servers.index(server) - self._next) % len(self._servers)
        return load.outstanding_tokens, load.num_requests, turn

    def _nobody(self, model: str | None) -> UnknownModel | NoWorker:
        """A name that nobody serves is unknown only when every server has said what it serves."""
        upstreams = [server.upstream for server in self._servers]
        if model is not None:
            known = sorted({name for each in upstreams for name in each.model_names or ()})
            if model not in known and all(each.model_names is not None for each in upstreams):
                return UnknownModel(model, tuple(known))
            upstreams = [each for each in upstreams if each.model_names is None or model in each.model_names]
        states = Counter(each.state for each in upstreams)
        told = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none configured"
        return NoWorker(f"No upstream server is ready for this route and model (servers: {told}).")


class _Server:
    """One of them, and what is passed to it."""

    def __init__(self, upstream: UpstreamServer, target: UpstreamTarget) -> None:
        self.upstream = upstream
        self.target = target
        self.num_passed = 0  # under way
        self.full_until_s = -math.inf

    def serves(self, model: str | None) -> bool:
        return self.upstream.state is READY if model is None else self.upstream.serves(model)

    def has_room(self, max_passed: int) -> bool:
        return self.num_passed < max_passed and self.upstream.has_room(0)


class UpstreamPlace:
    """`gateway.passthrough_ports.Place`. As calls do it waits in the queue until the response begins.

    It counts as one token: what it makes the server do is not known, but it is more than nothing.
    """

    def __init__(self, server: _Server, model: str | None) -> None:
        self.target = server.target
        self._server = server
        self._model = model or ""
        self._share = server.upstream.load.add(0, 1)
        self._is_over = False
        server.num_passed += 1

    def begun(self, status: int) -> None:
        self._share.first_token()
        if isinstance(refusal(self.target.name, status, b""), QueueFull):
            self._server.full_until_s = time.monotonic() + FULL_S

    def lost(self, error: WorkerLost) -> None:
        """The server is asked whether it lives, as after a call of ours."""
        self._server.upstream.noted(self._model, error, has_begun=False)
        self._server.upstream.told()

    def release(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._server.num_passed -= 1
            self._share.release()


def _rather(servers: list[_Server], is_better: Callable[[_Server], bool]) -> list[_Server]:
    """Those, if there are any."""
    return [server for server in servers if is_better(server)] or servers
