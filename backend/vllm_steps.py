"""The step path: the engine core's batches, read directly. 7 us per token; `generate` takes 23.

The engine core (a process of its own) sends one batch per step with every stream's new tokens. vLLM's own
front end unpacks it into one queue and one task per stream; here the batch goes to the link as it is. The
names used are semi-internal, so the path is used only for versions that were tested and after a probe; see
`vllm_engine`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any, Final

from backend.link import Extra
from backend.ports import EngineEvents, Job, Key, Output
from backend.vllm_media import MediaReader
from backend.vllm_metrics import Counted, StepRecorder
from backend.vllm_outputs import Outputs, open_outputs
from backend.vllm_request import LONG_PACKED_TOKENS, Reasoning, engine_request, is_slow, refusal

logger = logging.getLogger(__name__)

_QUEUED: Final = 1  # EngineCoreEventType
_SCHEDULED: Final = 2


class StepRequest:
    """One job in the engine's hands. Mutable: touched once per token."""

    __slots__ = (
        "figures",
        "is_first",
        "is_resent",
        "is_sent",
        "job",
        "key",
        "num_cached",
        "num_prompt",
        "params",
    )

    def __init__(self, key: Key, job: Job, figures: Any) -> None:
        self.key = key
        self.job: Job | None = job  # until its first output: it may have to be sent again
        self.num_prompt = len(job.ids) // 4  # more with media, once they are in the prompt
        self.figures = figures  # vLLM's RequestStateStats
        self.params: Any = None  # vLLM's SamplingParams, once prepared
        self.is_first = True  # no output yet
        self.is_sent = False
        self.is_resent = False
        self.num_cached = 0


class StepPath:
    """`vllm_path.TokenPath` over `AsyncLLM.engine_core`, whose own output handler must not run."""

    name = "steps"

    def __init__(self, llm: Any, events: EngineEvents, media: MediaReader) -> None:
        self.events = events
        self._media = media
        self._llm = llm
        self._core = llm.engine_core
        self._mm_cache = llm.renderer.mm_processor_cache  # None for a text model
        self._vocab_size = llm.model_config.get_vocab_size()
        self._reasoning = Reasoning(llm)
        self._recorder = StepRecorder(llm)
        self._numbers = itertools.count()
        self._ids: dict[Key, str] = {}
        self._requests: dict[str, StepRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._outputs: Outputs | None = None

    async def start(self) -> None:
        self._outputs = await open_outputs(self._core, self._take, self._broken)

    def submit(self, key: Key, job: Job) -> None:
        request_id = self._ids[key] = str(next(self._numbers))
        self._requests[request_id] = StepRequest(key, job, self._recorder.request(time.time()))
        self._spawn(self._send(request_id))

    def abort(self, keys: Sequence[Key]) -> None:
        """From now on nothing is reported for these but `closed`, once the engine core was told."""
        known = [key for key in keys if key in self._ids]
        request_ids = [self._ids.pop(key) for key in known]
        sent = [request_id for request_id in request_ids if self._requests.pop(request_id).is_sent]
        self._spawn(self._tell_abort(known, sent))

    def flush(self) -> None:
        self._recorder.flush()

    async def close(self) -> None:
        tasks = list(self._tasks)
        self._ids.clear()
        self._requests.clear()
        for task in tasks:
            task.cancel()
        if self._outputs is not None:
            await self._outputs.close()
        self._recorder.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- to the engine -------------------------------------------------------------------------------------

    async def _send(self, request_id: str) -> None:
        entry = self._requests.get(request_id)
        if entry is None or entry.job is None:  # aborted before it began
            return
        try:
            request = await self._prepare(request_id, entry.job)
        except Exception as error:
            self._fail(request_id, "rejected", refusal(error))
            return
        if request_id in self._requests:
            entry.params = request.sampling_params
            if entry.job.media:
                entry.num_prompt = len(request.prompt_token_ids)
            entry.is_sent = True  # before the wait: messages to the core keep their order
            await self._core.add_request_async(request)

    async def _prepare(self, request_id: str, job: Job) -> Any:
        """vLLM's request; None for one with media that was aborted meanwhile."""
        prompt = None
        if job.media:
            prompt = await self._media.prompt(job, lambda: request_id in self._requests)
            if prompt is None:
                return None
        else:
            self._media.check(job)
        arguments = (self._llm, request_id, job, self._vocab_size, self._reasoning, prompt)
        if job.media or is_slow(job, LONG_PACKED_TOKENS):
            return await asyncio.to_thread(engine_request, *arguments)
        return engine_request(*arguments)

    async def _tell_abort(self, keys: list[Key], request_ids: list[str]) -> None:
        if request_ids:
            await self._core.abort_requests_async(request_ids)
        if keys:
            self.events.closed(keys)

    def _fail(self, request_id: str, kind: str, message: str) -> None:
        entry = self._requests.pop(request_id, None)
        if entry is not None:
            del self._ids[entry.key]
            self.events.failed(entry.key, kind, message)

    # -- from the engine -----------------------------------------------------------------------------------

    def _take(self, batch: Any) -> None:
        outputs = self._sort(batch)
        if outputs:
            self.events.step(outputs)

    def _sort(self, batch: Any) -> list[Output]:
        """A step's outputs by key. Outputs of aborted requests are nobody's any more."""
        outputs: list[Output] = []
        counted: list[Counted] = []
        for item in batch.outputs:
            entry = self._requests.get(item.request_id)
            if entry is None or (item.mm_cache_miss_hashes and self._resend(item, entry)):
                continue
            counted.append((item, entry, entry.is_first))
            extra = _first(item, entry, batch.timestamp) if entry.is_first else None
            if item.new_logprobs is not None:
                extra = extra or Extra()
                extra.logprobs = _logprobs(item.new_logprobs, entry.params.logprobs)
            finish = None
            if item.finish_reason is not None:
                finish = str(item.finish_reason)
                del self._requests[item.request_id], self._ids[entry.key]
            outputs.append(Output(entry.key, item.new_token_ids, finish, item.stop_reason, extra))
        self._recorder.step(batch, counted)
        return outputs

    def _resend(self, item: Any, entry: StepRequest) -> bool:
        """The engine has lost images that went by hash only: forget that it had them, send once more."""
        for digest in item.mm_cache_miss_hashes:
            self._mm_cache.invalidate(digest)
        if entry.is_resent:
            return False
        logger.info("the engine has lost %d cached images; sending again", len(item.mm_cache_miss_hashes))
        entry.is_resent = True
        request_id = self._ids[entry.key] = str(next(self._numbers))
        del self._requests[item.request_id]
        self._requests[request_id] = entry
        entry.is_sent = False
        self._spawn(self._send(request_id))
        return True

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """Whatever a task could not handle means that the engine, or what we know of it, is broken."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken(error)

    def _broken(self, error: BaseException) -> None:
        self.events.died(f"{type(error).__name__}: {refusal(error)}")


def _first(item: Any, entry: StepRequest, step_s: float) -> Extra:
    """What comes with the first output. Both clocks are the engine core's, so the differences are sound."""
    has_media = entry.job is not None and bool(entry.job.media)
    entry.is_first, entry.job = False, None
    if item.prefill_stats is not None:
        entry.num_cached = item.prefill_stats.num_cached_tokens
    times = {int(event.type): event.timestamp for event in reversed(item.events or ())}
    scheduled_s = times.get(_SCHEDULED, step_s)
    return Extra(
        cached_tokens=entry.num_cached,
        queue_ms=1e3 * (scheduled_s - times.get(_QUEUED, scheduled_s)),
        prefill_ms=1e3 * (step_s - scheduled_s),
        is_first=True,
        prompt_tokens=entry.num_prompt if has_media else None,
    )


def _logprobs(arrays: Any, num_wanted: int | None) -> list[tuple[list[int], list[float], int]]:
    """Per position: ids and logprobs of the sampled token, then of the best; and the sampled one's rank.

    The arrays are as wide as the widest request of the batch.
    """
    width = None if num_wanted is None or num_wanted < 0 else num_wanted + 1
    return list(
        zip(
            arrays.logprob_token_ids[:, :width].tolist(),
            arrays.logprobs[:, :width].tolist(),
            arrays.sampled_token_ranks.tolist(),
            strict=True,
        )
    )
