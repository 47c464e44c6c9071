"""The loops of a load test: conversations begin when the plan says, turns follow each other, samples collect.

In an open loop they begin at their due times whatever the server does, in a closed loop whenever a user is
free. Not here: one request (`gateway/bench/client.py`), what is asked (`gateway/bench/workload.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any, Final

from gateway.bench.arrivals import arrivals
from gateway.bench.client import BenchClient
from gateway.bench.conversation import Conversation, Message, Turn
from gateway.bench.plan import Part, Plan, Quota
from gateway.bench.sample import Sample
from gateway.bench.target import BodyMaker

# Of a user in a closed loop, so that a server that is down is not asked as fast as the client can.
_PAUSE_AFTER_FAILURE_S: Final = 0.05
# An open loop that is further behind its schedule leaves out what it has missed: else it would go on sending
# for as long as it takes, at a rate that is the client's own.
MAX_BEHIND_S: Final = 5.0
_MOST_LEFT_OUT: Final = 1024  # before it looks at its events again


class Load:
    """One run. `samples` are in the order in which the requests ended."""

    def __init__(
        self, client: BenchClient, maker: BodyMaker, plan: Plan, conversations: Iterator[Conversation]
    ) -> None:
        self.samples: list[Sample] = []
        self.last_begun_s = 0.0  # when the last conversation was due
        self.num_left_out = 0  # conversations of an open loop, which were due too long ago
        self._client = client
        self._maker = maker
        self._plan = plan
        self._conversations = conversations
        self._quota = Quota(plan)
        self._num_sent = 0
        self._num_warming = 0  # conversations of the warm-up that are under way
        self._is_warm = asyncio.Event()
        self._is_warm.set()
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
        dues_s = arrivals(plan.arrivals, plan.rate, plan.ramp_s, Random(f"arrivals {plan.seed}"))
        from_s = 0.0
        while await self._begin_due(dues_s, from_s):
            await self._all_ended()
            if not self._quota.has_more:
                return
            from_s = self._client.now_s()  # conversations that failed have left turns to others

    async def _begin_due(self, dues_s: Iterator[float], from_s: float) -> bool:
        """Begin conversations as they are due from then on, up to the quota. False if there was none."""
        has_begun = False
        for due_s in dues_s:
            if due_s < from_s:
                continue
            oldest_s = self._client.now_s() - MAX_BEHIND_S
            if self._quota.is_over(max(due_s, oldest_s)):
                break
            if due_s < oldest_s:
                self.num_left_out += 1
                if self.num_left_out % _MOST_LEFT_OUT == 0:
                    await asyncio.sleep(0)
                continue
            conversation = next(self._conversations)  # made before it is due, not when
            part = self._quota.begin(due_s, len(conversation.turns))
            if part is None:
                break
            # Also where it is behind: answers have to be read, and a stop has to be heard.
            await asyncio.sleep(0)
            await self._sleep_until(due_s)
            self._begin(self._converse(conversation, due_s, part))
            has_begun = True
        return has_begun

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
        # Where the warm-up has fewer conversations than there are users, the rest would meet a cold server.
        while self._quota.has_begun_warm_up and not self._is_warm.is_set():
            await self._is_warm.wait()
        while True:
            conversation = next(self._conversations)
            due_s = self._client.now_s()
            part = self._quota.begin(due_s, len(conversation.turns))
            if part is None:
                return
            if not await self._converse(conversation, due_s, part):
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async def _converse(self, conversation: Conversation, due_s: float, part: Part) -> bool:
        """The part's turns; False if one failed, with which the conversation ends."""
        self.last_begun_s = due_s
        history: list[Message] = []
        with self._warming(part.is_warm_up):
            for at, turn in enumerate(conversation.turns[: part.num_turns]):
                if at:
                    due_s = self._client.now_s() + self._plan.turn_gap_s
                    await self._sleep_until(due_s)
                sample = self._sample(turn, due_s, part.is_warm_up, at)
                history += turn.messages
                num_left = part.num_turns - at - 1
                body = self._maker.body(history, turn.output_tokens)
                async with self._place():
                    answer = await self._ask(body, sample, keeps_text=num_left > 0)
                if sample.error is not None:
                    self._quota.give_back(part, num_left)
                    return False
                history.append({"role": "assistant", "content": answer})
        return True

    @contextmanager
    def _warming(self, is_warm_up: bool) -> Iterator[None]:
        """Count a conversation of the warm-up while it is under way."""
        if not is_warm_up:
            yield
            return
        self._num_warming += 1
        self._is_warm.clear()
        try:
            yield
        finally:
            self._num_warming -= 1
            if not self._num_warming:
                self._is_warm.set()

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
