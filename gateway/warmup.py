"""Keeps the prompts of `warm:` in every worker's prefix cache, by one-token requests of low priority.

Every gateway process warms every worker that becomes ready, one prompt at a time, and the processes of a
machine take turns at a worker (`gateway/turns.py`): whoever is first makes the engine compute a prompt, the
others find it cached, which costs a step, and know for themselves that it is warm. Several machines warm at
the same time, each prompt at most once per machine.

A warm-up is not a user's request: it has no line in the request log, no place in the queue bounds, no weight
in routing, and no part in TTFT. vLLM serves it after everything that waits with a smaller number, and
preempts it first. What its prefill has begun it finishes, so a user may wait for the rest of one prompt's
prefill; under `--scheduling-policy fcfs`, which is not our default, for all of it.

Here is what runs and when. What is known of each prompt is `gateway/warm_table.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from backend.replica import READY
from gateway.metrics import Metrics
from gateway.prompt_settings import WarmPrompt
from gateway.turns import Turns
from gateway.warm_request import Introduction, OneToken, Worker, call_for
from gateway.warm_table import RECONNECT, START, STATES, WarmKey, WarmRow, WarmTable
from pipeline.errors import EngineFailed, EngineRejected, HeadraceError, InvalidRequest
from pipeline.ports import Handle
from pipeline.values import FirstToken

logger = logging.getLogger("headrace.warmup")

MAX_WARMUP_S: Final = 600.0  # a busy engine serves users first, so it may take long; then it is a failure
MAX_SHOWN: Final = 200  # prompts per worker in /ready?verbose
_MAX_ERROR_CHARS: Final = 200

PrefixIds = Callable[[str, WarmPrompt], Awaitable[bytes | memoryview]]


@dataclass(frozen=True, slots=True)
class WarmLimits:
    """`rewarm_interval_s`: at least so long between two warm-ups of a prompt on a worker. `before_ready`:
    hold /ready back until the first workers have tried every prompt, at most `ready_limit_s`."""

    rewarm_interval_s: float = 10.0
    before_ready: bool = False
    ready_limit_s: float = 60.0


class _Site:
    """One worker: its table, and the task that works it off while the worker is ready."""

    def __init__(self, worker: Worker, shape: tuple[Any, ...], table: WarmTable) -> None:
        self.worker = worker
        self.shape = shape
        self.table = table
        self.is_mute = False  # it has not told how much of a prompt was cached
        self.name = ""  # the worker's own, of its present start
        self.wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Warmup:
    """Warms `prompts`. `await prefix_ids(model, prompt)` gives the ids, int32 little-endian, with which every
    request begins that begins with the prompt; what it raises marks the prompt failed.
    """

    def __init__(
        self,
        prompts: Sequence[WarmPrompt],
        prefix_ids: PrefixIds,
        metrics: Metrics,
        limits: WarmLimits | None = None,
        turns: Turns | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prompts = tuple(prompts)
        self._prefix_ids = prefix_ids
        self._metrics = metrics
        self._limits = limits or WarmLimits()
        self._turns = turns or Turns()
        self._clock = clock
        self._sites: dict[str, _Site] = {}  # by the worker's address
        self._by_name: dict[str, _Site] = {}  # ready ones, by the name that a handle tells
        self._ids: dict[tuple[str, str, int], asyncio.Task[bytes]] = {}  # by fingerprint, model, number
        self._ending: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._ready_since_s: float | None = None  # when the first worker was ready
        self._is_settled = not (self._limits.before_ready and self._prompts)

    # -- workers come and go -------------------------------------------------------------------------------

    def worker_changed(self, worker: Worker) -> None:
        """A worker has become ready, or is no longer (the pool's `on_change`)."""
        if self._is_over or not self._prompts:
            return
        site = self._sites.get(worker.key)
        if site is not None and site.task is not None:
            self._leave(site)
        if worker.state == READY:
            self._enter(worker)

    def _enter(self, worker: Worker) -> None:
        welcome = worker.welcome
        assert welcome is not None, "a ready worker has introduced itself"
        shape = (welcome.block_size, welcome.max_model_len, welcome.fingerprint, tuple(welcome.model_names))
        site = self._sites.get(worker.key)
        is_new = site is None
        if site is None or site.shape != shape:
            table = WarmTable(
                self._keys(welcome),
                max(1, welcome.block_size),
                welcome.max_model_len,
                self._limits.rewarm_interval_s,
            )
            site = self._sites[worker.key] = _Site(worker, shape, table)
        now_s = self._clock()
        self._ready_since_s = now_s if self._ready_since_s is None else self._ready_since_s
        site.name = welcome.worker[:200]  # as the link tells it
        self._by_name[site.name] = site
        site.table.begin(START if is_new else RECONNECT, now_s)
        site.task = asyncio.create_task(self._work_off(site), name=f"warm up {worker.key}")
        site.task.add_done_callback(_log_failure)

    def _leave(self, site: _Site) -> None:
        """What is under way is aborted in the engine by the cancelled task."""
        assert site.task is not None
        if self._by_name.get(site.name) is site:
            del self._by_name[site.name]
        site.task.cancel()
        self._ending.add(site.task)
        site.task.add_done_callback(self._ending.discard)
        site.task = None
        site.table.lose()

    def _keys(self, welcome: Introduction) -> list[WarmKey]:
        """The prompts that concern a worker. Names of one worker are one model: each is warmed once."""
        keys = []
        for number, prompt in enumerate(self._prompts):
            if prompt.model is None or prompt.model in welcome.model_names:
                model = prompt.model or welcome.model_names[0]
                keys += [
                    WarmKey(number, salt_number, model, salt, prompt.title)
                    for salt_number, salt in enumerate(prompt.cache_salts)
                ]
        return keys

    def cease(self) -> None:
        """Drain: nothing more is warmed, and what is under way is aborted."""
        self._is_over = True
        for site in self._sites.values():
            if site.task is not None:
                self._leave(site)
        for task in self._ids.values():
            task.cancel()

    async def stop(self) -> None:
        """`cease`, and wait for the end."""
        self.cease()
        await asyncio.gather(*self._ending, *self._ids.values(), return_exceptions=True)

    # -- one worker's warm-ups -----------------------------------------------------------------------------

    async def _work_off(self, site: _Site) -> None:
        """Warm what is due, one prompt at a time, until cancelled."""
        table = site.table
        while True:
            site.wake.clear()
            row = table.next(self._clock())
            if row is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(site.wake.wait(), table.due_in_s(self._clock()))
            elif row.ids is not None or await self._learn(site, row):
                async with self._turns.take(site.worker.key):
                    await self._warm(site, row)

    async def _learn(self, site: _Site, row: WarmRow) -> bool:
        """Find a row's ids; whether it can be warmed. Workers and salts of one model share them."""
        welcome = site.worker.welcome
        assert welcome is not None
        key = (welcome.fingerprint, row.key.model, row.key.number)
        task = self._ids.get(key)
        if task is None:
            task = self._ids[key] = asyncio.create_task(self._render(row.key))
        try:
            ids = await asyncio.shield(task)
        except Exception as error:  # a template or a tokenizer may raise anything
            self._ids.pop(key, None)  # tried again when the worker is ready anew
            site.table.give_up(row, _told(error))
            logger.error(
                "warm prompt %d (%s) cannot be rendered: %s", row.key.number, row.key.title, row.error
            )
            return False
        can_be_warmed = site.table.learn(row, ids)
        if not can_be_warmed:
            logger.warning("warm prompt %d (%s) is not warmed: %s", row.key.number, row.key.title, row.error)
        return can_be_warmed

    async def _render(self, key: WarmKey) -> bytes:
        return bytes(await self._prefix_ids(key.model, self._prompts[key.number]))

    async def _warm(self, site: _Site, row: WarmRow) -> None:
        """One request, to whatever end."""
        table, began_s = site.table, self._clock()
        call = call_for(row.key, table.start(row))
        sink = OneToken()
        handle: Handle | None = None
        try:
            handle = site.worker.submit_background(call, sink)
            async with asyncio.timeout(MAX_WARMUP_S):
                end = await sink.ended
        except TimeoutError:
            end = EngineFailed(f"not served within {MAX_WARMUP_S:g} s")
        except HeadraceError as error:
            end = error
        finally:
            if handle is not None:
                handle.abort()  # nothing, if it has ended
        now_s = self._clock()
        if isinstance(end, FirstToken):
            self._done(site, row, end, now_s, now_s - began_s)
            return
        table.failed(row, _told(end), not isinstance(end, EngineRejected | InvalidRequest), now_s)
        self._metrics.warmup_failures.labels(site.worker.key).inc()
        logger.warning("warming prompt %d on worker %s: %s", row.key.number, site.name, row.error)

    def _done(self, site: _Site, row: WarmRow, first: FirstToken, now_s: float, took_s: float) -> None:
        is_check = row.is_check
        site.table.done(row, first.cached_tokens, now_s)
        self._metrics.warmups.labels(site.worker.key, row.reason).inc()
        self._metrics.warmup.observe(took_s)
        if is_check and first.cached_tokens is not None and row.expected_tokens < row.warmed_tokens:
            logger.warning(
                "worker %s had %d of the %d tokens of warm prompt %d left, which it had just computed: "
                "is its prefix caching on, and its KV cache large enough?",
                *(site.name, first.cached_tokens, row.warmed_tokens, row.key.number),
            )
        if first.cached_tokens is None and not site.is_mute:
            site.is_mute = True
            logger.info(
                "worker %s does not tell how much of a prompt it had cached, so evictions are not noticed: "
                "a stock vLLM server tells it with --enable-prompt-tokens-details",
                site.name,
            )

    # -- what live requests tell ---------------------------------------------------------------------------

    def observe(
        self, worker: str, prompt_ids: memoryview, cache_salt: str | None, first: FirstToken, now_s: float
    ) -> None:
        """A user's request has its first token: does it show that a warm prompt was evicted?

        `worker` is `Handle.worker`, `prompt_ids` the prompt's ids and no more, `now_s` when the token came.
        Called once per choice: 0.1 us without warm prompts, 3 us with 100 of 4,000 tokens.
        """
        site = self._by_name.get(worker)
        if site is not None and first.cached_tokens is not None:
            # The engine looks a prompt up when it is scheduled; a warm-up may have ended since.
            looked_up_s = now_s - (first.prefill_ms or 0.0) / 1e3
            if site.table.observe(prompt_ids, cache_salt, first.cached_tokens, looked_up_s, now_s):
                site.wake.set()

    # -- for operators -------------------------------------------------------------------------------------

    def holds_ready(self) -> bool:
        """Whether /ready must wait. Once it need not, it never will: a worker that comes back is warmed
        while others serve."""
        if not self._is_settled:
            tables = [site.table for site in self._by_name.values()]
            self._is_settled = bool(tables) and not any(table.num_untried for table in tables)
        if not self._is_settled and self._ready_since_s is not None:
            limit_s = self._limits.ready_limit_s
            self._is_settled = self._clock() - self._ready_since_s >= limit_s
            if self._is_settled:
                logger.warning("ready, though not every warm prompt was tried within %g s", limit_s)
        return not self._is_settled

    def report(self) -> list[dict[str, Any]]:
        """The state of every worker and prompt, for /ready?verbose."""
        now_s = self._clock()
        return [
            {
                "worker": site.worker.key,
                "num_prompts": len(site.table.rows),
                "states": {state: site.table.counts[state] for state in STATES},
                "prompts": site.table.shown(now_s, MAX_SHOWN),
            }
            for site in self._sites.values()
        ]

    def publish(self) -> None:
        """Bring the gauges up to date."""
        for site in self._sites.values():
            for state in STATES:
                self._metrics.warm_prompts.labels(site.worker.key, state).set(site.table.counts[state])


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("warming up has stopped for a worker", exc_info=error)
