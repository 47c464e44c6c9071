"""Serves `Encode` needs away from the event loop, in a bounded pool of threads.

* Texts that come in one turn of the loop, or while every thread is busy, are encoded together: one call per
  encoder and kind, for `tokenizers` spreads a batch over the cores and lets go of the GIL.
* Texts that are too long for a batch leave one thread to the others, which would wait for seconds.
* A text that is being encoded for one request is awaited by others, not encoded again.
* A request that is cancelled takes nothing from others, and a text that cannot be encoded fails only those
  who wait for it. What nobody waits for any more is not started.
* Characters that wait are bounded; more is `QueueFull`. A text alone is always taken: bodies have a limit of
  their own.

Before encoding, segments are looked up in the second levels of the token cache (`gateway/shared_tokens.py`,
`gateway/redis_tokens.py`), and offered to them afterwards. Not here: what is encoded where
(`pipeline/tokenizing.py`), and the cache itself (`pipeline/token_cache.py`).
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from pipeline.errors import QueueFull
from pipeline.needs import Encode, TextEncoder

# Texts that wait go into one batch up to so many characters, a longer one goes alone: 25 ms of one core. So a
# short text waits for no more than that once it is its turn.
MAX_BATCH_CHARS: Final = 65_536
Pairs = Sequence[tuple[str, bytes]]


class NearTokens(Protocol):
    """A second level that answers at once. `gateway.shared_tokens.SharedTokens` is one."""

    def get(self, fingerprint: str, segment: str) -> bytes | None: ...

    def offer(self, fingerprint: str, pairs: Pairs) -> None:
        """Keep what is worth it. Quick: called on the event loop."""


class FarTokens(Protocol):
    """A second level that takes time. `gateway.redis_tokens.RedisTokens` is one. Neither method raises."""

    async def get(self, fingerprint: str, segments: Sequence[str]) -> Mapping[str, bytes]: ...

    def offer(self, fingerprint: str, pairs: Pairs) -> None: ...


class _Request:
    """One `encode` call: how many of its texts are still missing."""

    __slots__ = ("future", "num_missing")

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future
        self.num_missing = 0

    def got_one(self) -> None:
        self.num_missing -= 1
        if not self.num_missing and not self.future.done():
            self.future.set_result(None)

    def failed(self, error: BaseException) -> None:
        if self.future.done():
            return
        if isinstance(error, asyncio.CancelledError):
            self.future.cancel()
        else:
            self.future.set_exception(error)


class _Job:
    """One text on its way, and the requests that wait for it."""

    __slots__ = ("ids", "requests", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.ids = b""
        self.requests: list[_Request] = []


class _Lane:
    """The texts of one encoder and kind: those that wait, and all that are in flight."""

    __slots__ = ("add_special_tokens", "encoder", "fingerprint", "is_long", "jobs", "key", "waiting")

    def __init__(self, need: Encode) -> None:
        self.encoder: TextEncoder = need.encoder  # held, so that its id stays its own
        self.add_special_tokens = need.add_special_tokens
        self.key = _lane_key(need)
        _, _, self.fingerprint, self.is_long = self.key
        self.jobs: dict[str, _Job] = {}
        self.waiting: OrderedDict[str, _Job] = OrderedDict()

    def take_batch(self) -> list[_Job]:
        """The next texts in order, at least one."""
        batch = [self.waiting.popitem(last=False)[1]]
        num_chars = len(batch[0].text)
        while self.waiting:
            num_chars += len(next(iter(self.waiting)))
            if num_chars > MAX_BATCH_CHARS:
                break
            batch.append(self.waiting.popitem(last=False)[1])
        return batch

    def run(self, texts: tuple[str, ...]) -> list[bytes | Exception]:
        """Encode, in any thread. If that fails, one by one: texts of several requests are in a batch."""
        try:
            return list(Encode(self.encoder, texts, self.add_special_tokens).run())
        except Exception as error:
            if len(texts) == 1:
                return [error]
            return [self.run((text,))[0] for text in texts]


_LaneKey = tuple[int, bool | None, str, bool]


class Encoders:
    """The pool of one process. Lives on the event loop; only `_Lane.run` runs in threads."""

    def __init__(
        self,
        max_queue_chars: int = 16_000_000,
        near: NearTokens | None = None,
        far: FarTokens | None = None,
        num_threads: int | None = None,
    ) -> None:
        self._num_free = num_threads or max(2, os.cpu_count() or 1)
        self._num_free_for_long = max(1, self._num_free - 1)
        self.executor = ThreadPoolExecutor(self._num_free, thread_name_prefix="encode")
        self._max_queue_chars = max_queue_chars
        self._near = near
        self._far = far
        self._lanes: OrderedDict[_LaneKey, _Lane] = OrderedDict()  # the one that is next comes first
        self._batches: set[asyncio.Task[None]] = set()
        self._is_starting = False
        self.num_queue_chars = 0
        self.num_batches = 0
        self.num_texts = 0

    async def encode(self, need: Encode) -> list[bytes]:
        """The packed ids of each text. Raises `QueueFull`, and whatever the encoder raised."""
        found = self._found_near(need)
        missing = [text for text in dict.fromkeys(need.texts) if text not in found]
        if missing:
            jobs, request = self._join(need, missing)
            try:
                await request.future
            except BaseException:
                self._leave(need, jobs, request)
                raise
            found |= {job.text: job.ids for job in jobs}
        return [found[text] for text in need.texts]

    def offer(self, fingerprint: str, pairs: Pairs) -> None:
        """Tell the second levels of new segments, also of those that were encoded on the event loop."""
        if not fingerprint or not pairs:
            return
        if self._near is not None:
            self._near.offer(fingerprint, pairs)
        if self._far is not None:
            self._far.offer(fingerprint, pairs)

    def close(self) -> None:
        """Start nothing more. Who still waits is cancelled."""
        for task in self._batches:
            task.cancel()
        for lane in self._lanes.values():
            _fail(lane, list(lane.waiting.values()), asyncio.CancelledError())
            lane.waiting.clear()
        self._lanes.clear()
        self.num_queue_chars = 0
        self.executor.shutdown(wait=False, cancel_futures=True)

    def _found_near(self, need: Encode) -> dict[str, bytes]:
        if self._near is None or need.add_special_tokens is not None or not need.fingerprint:
            return {}
        get, fingerprint = self._near.get, need.fingerprint
        return {
            text: ids for text in dict.fromkeys(need.texts) if (ids := get(fingerprint, text)) is not None
        }

    # -- the queue -----------------------------------------------------------------------------------------

    def _join(self, need: Encode, texts: list[str]) -> tuple[list[_Job], _Request]:
        """Wait for these texts, with others that wait for them."""
        lane = self._lanes.get(_lane_key(need)) or _Lane(need)
        new = [text for text in texts if text not in lane.jobs]
        num_chars = sum(map(len, new))
        if self.num_queue_chars and self.num_queue_chars + num_chars > self._max_queue_chars:
            raise QueueFull(
                f"{self.num_queue_chars} characters wait to be encoded, and this request has {num_chars}; "
                f"the limit is {self._max_queue_chars}."
            )
        self._lanes[lane.key] = lane
        self.num_queue_chars += num_chars
        for text in new:
            lane.jobs[text] = lane.waiting[text] = _Job(text)
        jobs = [lane.jobs[text] for text in texts]
        request = _Request(asyncio.get_running_loop().create_future())
        request.num_missing = len(jobs)
        for job in jobs:
            job.requests.append(request)
        self._start_soon()
        return jobs, request

    def _leave(self, need: Encode, jobs: list[_Job], request: _Request) -> None:
        """A request ended early: what only it waited for is dropped, if it has not started."""
        lane = self._lanes.get(_lane_key(need))
        for job in jobs:
            if request in job.requests:
                job.requests.remove(request)
            if not job.requests and lane is not None and lane.waiting.get(job.text) is job:
                del lane.waiting[job.text], lane.jobs[job.text]
                self.num_queue_chars -= len(job.text)
        if lane is not None:
            self._drop_empty(lane)

    def _start_soon(self) -> None:
        """At the end of this turn of the loop, so that what comes in it goes together."""
        if not self._is_starting:
            self._is_starting = True
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        """Give every free thread a batch, lane by lane in turn."""
        self._is_starting = False
        while self._num_free:
            waiting = (lane for lane in self._lanes.values() if lane.waiting)
            lane = next((lane for lane in waiting if not lane.is_long or self._num_free_for_long), None)
            if lane is None:
                return
            self._lanes.move_to_end(lane.key)
            batch = lane.take_batch()
            self.num_queue_chars -= sum(len(job.text) for job in batch)
            self._num_free -= 1
            self._num_free_for_long -= lane.is_long
            task = asyncio.create_task(self._run(lane, batch), name="encode")
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    # -- a batch -------------------------------------------------------------------------------------------

    async def _run(self, lane: _Lane, batch: list[_Job]) -> None:
        try:
            found, new = await self._encode(lane, batch)
        except BaseException as error:
            _fail(lane, batch, error)
            if not isinstance(error, Exception):  # of the others only those who wait want to know
                raise
        else:
            self._keep(lane.fingerprint, found, new)
        finally:
            self._num_free += 1
            self._num_free_for_long += lane.is_long
            self._drop_empty(lane)
            self._start_soon()

    async def _encode(
        self, lane: _Lane, batch: list[_Job]
    ) -> tuple[dict[str, bytes], list[tuple[str, bytes]]]:
        """Settle a batch. What came from elsewhere, and what is new."""
        texts = tuple(job.text for job in batch)
        found: dict[str, bytes] = {}
        if self._far is not None and lane.fingerprint:
            found |= await self._far.get(lane.fingerprint, texts)
        new = tuple(text for text in texts if text not in found)
        encoded: list[bytes | Exception] = []
        if new:
            loop = asyncio.get_running_loop()
            encoded = await loop.run_in_executor(self.executor, lane.run, new)
            self.num_batches += 1
            self.num_texts += len(new)
        _settle(lane, batch, {**found, **dict(zip(new, encoded, strict=True))})
        return found, [(text, ids) for text, ids in zip(new, encoded, strict=True) if isinstance(ids, bytes)]

    def _keep(self, fingerprint: str, found: Mapping[str, bytes], new: Pairs) -> None:
        """The far level hears of what is new, the near one also of what came from there."""
        self.offer(fingerprint, new)
        if self._near is not None and found:
            self._near.offer(fingerprint, list(found.items()))

    def _drop_empty(self, lane: _Lane) -> None:
        if not lane.jobs and self._lanes.get(lane.key) is lane:
            del self._lanes[lane.key]


def _lane_key(need: Encode) -> _LaneKey:
    """Only segments have a second level, so only theirs has a fingerprint."""
    fingerprint = need.fingerprint if need.add_special_tokens is None else ""
    is_long = any(len(text) > MAX_BATCH_CHARS for text in need.texts)
    return id(need.encoder), need.add_special_tokens, fingerprint, is_long


def _settle(lane: _Lane, batch: Sequence[_Job], results: Mapping[str, bytes | Exception]) -> None:
    """Each text's ids, or what is wrong with it, go to all who wait for it."""
    for job in batch:
        del lane.jobs[job.text]
        result = results[job.text]
        if isinstance(result, bytes):
            job.ids = result
        for request in job.requests:
            if isinstance(result, bytes):
                request.got_one()
            else:
                request.failed(result)


def _fail(lane: _Lane, batch: Sequence[_Job], error: BaseException) -> None:
    """Nobody gets these texts."""
    for job in batch:
        if lane.jobs.get(job.text) is job:
            del lane.jobs[job.text]
        for request in job.requests:
            request.failed(error)
