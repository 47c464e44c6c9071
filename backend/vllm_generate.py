"""The generate path: `AsyncLLM.generate`, vLLM's public way, one task per stream. 23 us per token.

The fallback for vLLM versions whose engine core batches have not been tested; see `vllm_steps`.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from collections.abc import Sequence
from typing import Any

from backend.link import Extra
from backend.ports import EngineEvents, Job, Key, Output
from backend.vllm_media import MediaReader
from backend.vllm_request import (
    LONG_LIST_TOKENS,
    Reasoning,
    engine_prompt,
    is_slow,
    prompt_ids,
    refusal,
    sampling_params,
)

logger = logging.getLogger(__name__)


class GeneratePath:
    """`vllm_path.TokenPath` over `AsyncLLM.generate`."""

    name = "generate"

    def __init__(self, llm: Any, events: EngineEvents, media: MediaReader) -> None:
        self.events = events
        self._media = media
        self._llm = llm
        self._vocab_size = llm.model_config.get_vocab_size()
        self._reasoning = Reasoning(llm)
        self._takes_reasoning = "reasoning_parser_kwargs" in inspect.signature(llm.generate).parameters
        self._numbers = itertools.count()
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._step: list[Output] = []  # what came since the loop last turned: about one engine step

    async def start(self) -> None:
        """Nothing reads before the first job."""

    def submit(self, key: Key, job: Job) -> None:
        self._tasks[key] = asyncio.create_task(self._run(key, job))

    def abort(self, keys: Sequence[Key]) -> None:
        known = [key for key in keys if key in self._tasks]
        task = asyncio.create_task(self._end(known, [self._tasks.pop(key) for key in known]))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def flush(self) -> None:
        """vLLM records each step by itself here."""

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._aborts]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end(self, keys: list[Key], tasks: list[asyncio.Task[None]]) -> None:
        """Cancelling a generator aborts its request in the engine."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._flush()  # nothing may follow `closed`
        if keys:
            self.events.closed(keys)

    async def _run(self, key: Key, job: Job, is_resent: bool = False) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            prompt, params, options = await self._prepare(job)
        except Exception as error:
            self._fail(key, "rejected", error)
            return
        try:
            is_lost = await self._stream(key, prompt, params, options, bool(job.media), is_resent)
        except EngineDeadError as error:
            self.events.died(f"EngineDeadError: {refusal(error)}")
        except EngineGenerateError as error:
            self._fail(key, "engine", error.__cause__ or error)
        except Exception as error:  # vLLM's own validation
            self._fail(key, "rejected", error)
        else:
            if is_lost:
                logger.info("the engine has lost cached images; sending again")
                await self._run(key, job, is_resent=True)

    async def _prepare(self, job: Job) -> tuple[Any, Any, dict[str, Any]]:
        if job.media:
            prompt = await self._media.prompt(job)
        else:
            self._media.check(job)
            prompt = None

        def prepare() -> tuple[Any, Any, dict[str, Any]]:
            whole = prompt if prompt is not None else engine_prompt(self._llm, job, prompt_ids(job.ids))
            reasoning = self._reasoning.fields(job) if self._takes_reasoning else {}
            options = {"priority": job.priority, **reasoning}
            return whole, sampling_params(job.sampling, self._vocab_size), options

        return await asyncio.to_thread(prepare) if is_slow(job, LONG_LIST_TOKENS) else prepare()

    async def _stream(
        self, key: Key, prompt: Any, params: Any, options: dict[str, Any], has_media: bool, is_resent: bool
    ) -> bool:
        """True if nothing came, since the engine has lost images that went by hash only: vLLM has seen that
        too, so they go whole the next time."""
        request_id = str(next(self._numbers))
        is_first = True
        async for result in self._llm.generate(prompt, params, request_id, **options):
            choice = result.outputs[0]
            if has_media and not is_resent and is_first and choice.finish_reason == "error":
                return True
            extra = _first(result, has_media) if is_first else None
            is_first = False
            if choice.logprobs:
                extra = extra or Extra()
                extra.logprobs = [
                    _position(token_id, position, params.logprobs)
                    for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True)
                ]
            output = Output(key, list(choice.token_ids), choice.finish_reason, choice.stop_reason, extra)
            if self._tasks.get(key) is not asyncio.current_task():
                return False  # aborted: this output is nobody's
            if output.finish is not None:
                del self._tasks[key]
            self._add(output)
        return False

    def _add(self, output: Output) -> None:
        if not self._step:
            asyncio.get_running_loop().call_soon(self._flush)
        self._step.append(output)

    def _flush(self) -> None:
        outputs, self._step = self._step, []
        if outputs:
            self.events.step(outputs)

    def _fail(self, key: Key, kind: str, error: BaseException) -> None:
        if self._tasks.pop(key, None) is not None:
            self.events.failed(key, kind, refusal(error))


def _first(result: Any, has_media: bool) -> Extra:
    extra = Extra(cached_tokens=result.num_cached_tokens or 0, is_first=True)
    if has_media:
        extra.prompt_tokens = len(result.prompt_token_ids)
    times = result.metrics  # None with --disable-log-stats
    if times is not None and times.scheduled_ts:
        extra.queue_ms = 1e3 * (times.scheduled_ts - times.queued_ts)
        extra.prefill_ms = 1e3 * (times.first_token_ts - times.scheduled_ts)
    return extra


def _position(token_id: int, position: Any, num_wanted: int | None) -> tuple[list[int], list[float], int]:
    """One position's mapping {id: Logprob} as the link has it: the sampled token, then the best, by rank."""
    sampled = position[token_id]
    best = sorted(position.items(), key=lambda item: item[1].rank)
    if num_wanted is not None and num_wanted >= 0:
        best = best[:num_wanted]
    return (
        [token_id, *(other for other, _ in best)],
        [sampled.logprob, *(entry.logprob for _, entry in best)],
        sampled.rank,
    )
