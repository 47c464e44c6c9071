"""The life of a replica as its gateway sees it: connect, load, serve, and start again when it is lost.

A table, and the loop that goes through it. What a connection is, the subclasses know
(`backend/remote_worker.py`, `backend/upstream_server.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from backend.catalog import Catalog, FingerprintError, MisfitError
from backend.replica import CLOSED, CONNECTING, DRAINING, LOADING, READY, REFUSED, STALLED
from pipeline.errors import EngineFault, WorkerStalled

logger = logging.getLogger(__name__)

REFUSAL_LOG_S: Final = 60.0  # one that is refused comes back every few seconds; its reason is told this often
MAX_LOSSES_TOLD: Final = 8  # reasons why it is not there, until it was; more are told as rarely
LIFECYCLE: Final[dict[str, dict[str, str]]] = {
    CONNECTING: {"load": LOADING, "refuse": REFUSED, "lost": CONNECTING, "stalled": STALLED, "close": CLOSED},
    LOADING: {
        "load": LOADING,
        "accept": READY,
        "refuse": REFUSED,
        "lost": CONNECTING,
        "stalled": STALLED,
        "close": CLOSED,
    },
    READY: {
        "drain": DRAINING,
        "refuse": REFUSED,
        "lost": CONNECTING,
        "stalled": STALLED,
        "close": CLOSED,
    },
    DRAINING: {"accept": READY, "lost": CONNECTING, "stalled": STALLED, "close": CLOSED},
    STALLED: {"retry": CONNECTING, "close": CLOSED},
    REFUSED: {"retry": CONNECTING, "close": CLOSED},
    CLOSED: {"close": CLOSED},
}


class RefusedError(Exception):
    """The server does not take this gateway; the message says why, and what to do."""


class ReplicaLife(ABC):
    """Keeps one replica connected. `on_change` is called when it has become ready, or is no longer."""

    def __init__(
        self,
        key: str,
        catalog: Catalog,
        rng: random.Random,
        backoff_s: tuple[float, float],
        on_change: Callable[[], None],
    ) -> None:
        self.key = key
        self.state = CONNECTING
        self.reason = "not yet tried"
        self.num_connects = 0
        # Served, failed, or said that it loads: there is nothing to wait for at once.
        self.has_answered = False
        self.misfit: str | None = None  # why it does not fit this gateway's settings, while it is refused so
        self._catalog = catalog
        self._rng = rng
        self._min_backoff_s, self._max_backoff_s = backoff_s
        self._on_change = on_change
        self._has_ended = False  # the present connection, or the attempt at one
        self._refusal_told = ("", -REFUSAL_LOG_S)  # the last one that was logged, and when
        self._losses_told: deque[str] = deque(maxlen=MAX_LOSSES_TOLD)  # since it was ready
        self._loss_told_s = -REFUSAL_LOG_S

    @abstractmethod
    async def _serve(self) -> None:
        """Connect, load, serve. Returns never; raises what ended it."""

    @abstractmethod
    def _hang_up(self) -> None:
        """The connection is over: let go of what is left of it. Called also where there was none."""

    async def run(self) -> None:
        """Stay connected until cancelled."""
        num_failures = 0
        try:
            while True:
                began_s = time.monotonic()
                await self._visit()
                # One that broke at once is a failure too: a worker that dies at its first step flaps.
                lasted = time.monotonic() - began_s > self._max_backoff_s
                num_failures = 0 if lasted else num_failures + 1
                await asyncio.sleep(self._backoff_s(num_failures))
                if self.state in (STALLED, REFUSED):
                    self._advance("retry", self.reason)
        finally:
            self._advance("close", "the gateway has closed it")

    async def _visit(self) -> None:
        """One connection; says in `state` and `reason` how it ended."""
        self._has_ended = False
        try:
            await self._serve()
        except (FingerprintError, MisfitError, RefusedError) as error:
            self._refuse(error)
        except TimeoutError as error:
            self._leave("lost", str(error) or "no connection in time")
        except (OSError, EngineFault) as error:
            self._lose(error)
        except Exception as error:  # on_model may raise anything; the replica is tried again
            reason = f"its model cannot be used: {type(error).__name__}: {error}"
            if reason not in self._losses_told:
                logger.exception("the model of worker %s cannot be used", self.key)
            self._leave("lost", reason)
        finally:
            self._has_ended = True
            self._hang_up()
            self._catalog.leave(self)

    def _lose(self, error: Exception) -> None:
        """Known at once, so that a sink that submits again when it is told finds this replica gone."""
        self._leave("stalled" if isinstance(error, WorkerStalled) else "lost", str(error))

    def _refuse(self, error: Exception) -> None:
        reason, now_s = str(error), time.monotonic()
        self.misfit = reason if isinstance(error, MisfitError) else None
        told, told_s = self._refusal_told
        if reason != told or now_s - told_s >= REFUSAL_LOG_S:
            self._refusal_told = reason, now_s
            logger.error("refusing a worker: %s", reason)
        self._leave("refuse", reason)

    def _leave(self, event: str, reason: str) -> None:
        """Once per connection: what comes after its end is only an echo."""
        if self._has_ended:
            return
        self._has_ended = self.has_answered = True
        if event != "refuse":
            self.misfit = None
            if self._is_news(reason):
                # A worker that was never there is still starting, as under `serve`.
                level = logging.WARNING if self.num_connects else logging.INFO
                logger.log(level, "worker %s: %s", self.key, reason)
        self._advance(event, reason)

    def _is_news(self, reason: str) -> bool:
        """Whether to log a loss: once while it is away, however often it is tried.

        Some reasons are never the same, say where a name has addresses in changing order.
        """
        now_s = time.monotonic()
        is_full = len(self._losses_told) == MAX_LOSSES_TOLD and now_s - self._loss_told_s < REFUSAL_LOG_S
        if reason in self._losses_told or is_full:
            return False
        self._losses_told.append(reason)
        self._loss_told_s = now_s
        return True

    def _advance(self, event: str, reason: str) -> None:
        before, self.state = self.state, LIFECYCLE[self.state][event]
        self.reason = reason
        if self.state is READY:
            self._losses_told.clear()
        if before is not self.state and READY in (before, self.state):
            self._on_change()

    def _backoff_s(self, num_failures: int) -> float:
        """Twice as long after each failure, and jittered, so that many gateways do not come back at once."""
        longest = self._max_backoff_s
        if self.state is not REFUSED:
            longest = min(longest, self._min_backoff_s * 2.0 ** min(num_failures, 32))
        return longest * self._rng.uniform(0.5, 1.0)
