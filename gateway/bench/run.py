"""The loops of a load test: conversations begin when the plan says, turns follow each other, samples collect.

In an open loop they begin at their due times whatever the server does, in a closed loop whenever a user is
free. Not here: one request (`gateway/bench/client.py`), what is asked (`gateway/bench/workload.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final

from gateway.bench.arrivals import arrivals
from gateway.bench.client import BenchClient
from gateway.bench.conversation import Conversation, Message, Turn
from gateway.bench.plan import Plan, Quota
from gateway.bench.sample import Sample
from gateway.bench.target import BodyMaker

# Of a user in a closed loop, so that a server that is down is not asked as fast as the client can.
_PAUSE_AFTER_FAILURE_S: Final = 0.05


class Load:
    """One run. `samples` are in the order in which the requests ended."""

    def __init__(
        self, client: BenchClient, maker: BodyMaker, plan: Plan, conversations: Iterator[Conversation]
    ) -> None:
        self.samples: list[Sample] = []
        self.last_begun_s = 0.0  # when the last conversation was due
        self._client = client
        self._maker = maker
        self._plan = plan
        self._conversations = conversations
        self._quota = Quota(plan)
        self._num_sent = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        cap = plan.max_concurrency
        self._room = None if cap is None else asyncio.Semaphore(cap)

    @property
    def was_stopped(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Send no more, and abort what is on its way."""
        self._stopping.set()

    async def run(self) -> None:
        """Returns when all requests have ended, or after `stop`."""
        work = asyncio.ensure_future(self._open() if self._plan.is_open else self._closed())
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            ours = (work, stop, *self._tasks)
            for task in ours:
                task.cancel()
            await asyncio.gather(*ours, return_exceptions=True)

    async def _open(self) -> None:
        plan = self._plan
        assert plan.rate is not None
        random = Random(f"arrivals {plan.seed}")
        for due_s in arrivals(plan.arrivals, plan.rate, plan.ramp_s, random):
            conversation = next(self._conversations)  # made before it is due, not when
            is_warm_up = self._quota.begin(due_s, len(conversation.turns))
            if is_warm_up is None:
                break
            await self._sleep_until(due_s)
            self._begin(self._converse(conversation, due_s, is_warm_up))
        await self._all_ended()

    async def _closed(self) -> None:
        users = self._plan.users or 0
        for number in range(users):
            self._begin(self._user(self._plan.ramp_s * number / users))
        await self._all_ended()

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        # One that broke stays, so that `_all_ended` raises what it broke with.
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)

    async def _all_ended(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def _user(self, first_s: float) -> None:
        """One after another, until the quota is used up."""
        await self._sleep_until(first_s)
        while True:
            conversation = next(self._conversations)
            due_s = self._client.now_s()
            is_warm_up = self._quota.begin(due_s, len(conversation.turns))
            if is_warm_up is None:
                return
            if not await self._converse(conversation, due_s, is_warm_up):
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async def _converse(self, conversation: Conversation, due_s: float, is_warm_up: bool) -> bool:
        """All turns; False if one failed, with which the conversation ends."""
        self.last_begun_s = due_s
        history: list[Message] = []
        for at, turn in enumerate(conversation.turns):
            if at:
                due_s = self._client.now_s() + self._plan.turn_gap_s
                await self._sleep_until(due_s)
            sample = self._sample(turn, due_s, is_warm_up, at)
            history += turn.messages
            keeps_text = at + 1 < len(conversation.turns)
            body = self._maker.body(history, turn.output_tokens)
            async with self._place():
                answer = await self._ask(body, sample, keeps_text)
            if sample.error is not None:
                return False
            history.append({"role": "assistant", "content": answer})
        return True

    async def _ask(self, body: bytes, sample: Sample, keeps_text: bool) -> str:
        try:
            return await self._client.ask(body, sample, keeps_text)
        finally:
            self.samples.append(sample)

    def _sample(self, turn: Turn, due_s: float, is_warm_up: bool, at: int) -> Sample:
        number = self._num_sent
        self._num_sent += 1
        return Sample(
            number=number,
            due_s=due_s,
            is_warm_up=is_warm_up,
            turn=at,
            prompt_tokens_wanted=turn.prompt_tokens,
            output_tokens_wanted=turn.output_tokens or 0,
        )

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """A place among those that may be in flight at once."""
        if self._room is None:
            yield
            return
        async with self._room:
            yield

    async def _sleep_until(self, due_s: float) -> None:
        # uvloop rounds to whole milliseconds, so that one sleep may end too soon.
        while (wait_s := due_s - self._client.now_s()) > 0:  # noqa: ASYNC110 (time is what it waits for)
            await asyncio.sleep(wait_s)
