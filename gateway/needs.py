"""Serves what requests need on their way in (`pipeline/needs.py`): encoding elsewhere, pauses, buffers, and
media."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from gateway.encoders import Encoders
from pipeline.errors import InvalidRequest, QueueFull
from pipeline.needs import Compute, Encode, LoadMedia, Pause, Result, Steps, Wait
from pipeline.token_buffer import BufferPool
from pipeline.values import MediaRef, Medium

_POLL_S: Final = 0.01  # between two looks for a free buffer: none is waited for unless the pool is exhausted

Served = TypeVar("Served")
Load = Callable[[Sequence[MediaRef]], Awaitable[tuple[Medium, ...]]]


async def no_media(refs: Sequence[MediaRef]) -> tuple[Medium, ...]:
    """For gateways that take text only."""
    raise InvalidRequest(f"{refs[0].path}: this server takes text only.", refs[0].path)


class NeedServer:
    """Runs the steps of requests. `wait_limit_s`: how long a request waits for token buffers, in all.

    Those that wait are served in their order, or small prompts would take every buffer before a large one.
    """

    def __init__(
        self, encoders: Encoders, pool: BufferPool, wait_limit_s: float, load_media: Load = no_media
    ) -> None:
        self._load_media = load_media
        self._encoders = encoders
        self._pool = pool
        self._wait_limit_s = wait_limit_s
        self._waiting = asyncio.Lock()

    async def serve(
        self,
        steps: Steps[Result],
        unless_gone: Callable[[Awaitable[Any]], Awaitable[Any]] | None = None,
    ) -> Result:
        """The result of the steps. `unless_gone` gives a wait up when nobody is left to answer.

        Raises what the steps raise, `QueueFull`, and what `unless_gone` raises.
        """
        answer: Any = None
        waits = _Waits(self._wait_limit_s)
        try:
            while True:
                need = steps.send(answer)
                if isinstance(need, Pause):
                    answer = None
                    await asyncio.sleep(0)
                else:
                    work = self._served(need, waits)
                    answer = await (work if unless_gone is None else unless_gone(work))
        except StopIteration as done:
            result: Result = done.value
            return result
        finally:
            steps.close()

    async def _served(self, need: Encode | Compute | Wait | LoadMedia, waits: _Waits) -> Any:
        if isinstance(need, Encode):
            return await self._encoders.encode(need)
        if isinstance(need, Compute):
            return await asyncio.get_running_loop().run_in_executor(self._encoders.executor, need.run)
        if isinstance(need, LoadMedia):
            return await self._load_media(need.refs)
        return await self._wait(need, waits)

    async def _wait(self, need: Wait, waits: _Waits) -> None:
        """Until a buffer seems free, and at least for a moment: it was not, just now."""
        try:
            async with asyncio.timeout_at(waits.until_s()), self._waiting:
                await asyncio.sleep(_POLL_S)
                while not self._pool.can_acquire(need.num_tokens):  # noqa: ASYNC110 - views tell nobody
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise QueueFull(
                f"No token buffer for {need.num_tokens} tokens became free within {self._wait_limit_s:g} s."
            ) from None


class _Waits:
    """The time that one request may wait, from its first wait on."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until_s: float | None = None

    def until_s(self) -> float:
        if self._until_s is None:
            self._until_s = asyncio.get_running_loop().time() + self._limit_s
        return self._until_s
