import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import repeat
from time import monotonic
from typing import Any

import pytest

from backend.http_client import HttpClient
from gateway.bench import run
from gateway.bench.client import BenchClient
from gateway.bench.conversation import Conversation, Turn
from gateway.bench.plan import Plan
from gateway.bench.run import Load
from gateway.bench.target import CHAT, BodyMaker, parse_target
from tests.gateway.bench.fake_server import Answer, Asked, Server, answer_well, plain, serving, until


def one_turn() -> Iterator[Conversation]:
    return repeat(Conversation((Turn(({"role": "user", "content": "a b"},), 2, 2),)))


@asynccontextmanager
async def loading(
    answer: Answer, plan: Plan, conversations: Iterator[Conversation] | None = None
) -> AsyncIterator[tuple[Load, Server]]:
    async with serving(answer) as server:
        http = HttpClient()
        client = BenchClient(http, parse_target(server.url, CHAT), monotonic(), 60.0)
        try:
            yield Load(client, BodyMaker("tiny"), plan, conversations or one_turn()), server
        finally:
            await http.close()


class Gate:
    """Holds answers back until a test says so, and knows how many it holds."""

    def __init__(self, opens_at: int) -> None:
        self._opens_at = opens_at
        self._opened = asyncio.Event()
        self.num_held = 0
        self.peak = 0

    def open(self) -> None:
        self._opened.set()

    async def __call__(self, asked: Asked) -> None:
        self.num_held += 1
        self.peak = max(self.peak, self.num_held)
        if self.num_held >= self._opens_at:
            self.open()
        await self._opened.wait()
        self.num_held -= 1
        await answer_well(asked)


async def test_an_open_loop_sends_on_schedule_while_no_answer_has_come() -> None:
    gate = Gate(opens_at=30)  # a closed loop, or a cap, would wait forever
    plan = Plan(rate=300.0, arrivals="constant", num_requests=30)
    async with loading(gate, plan) as (load, _):
        await load.run()
    assert [sample.error for sample in load.samples] == [None] * 30
    samples = sorted(load.samples, key=lambda sample: sample.number)
    assert [round(sample.due_s * 300, 6) for sample in samples] == list(range(30))
    assert all(sample.sent_s >= sample.due_s for sample in samples)
    assert load.last_begun_s == samples[-1].due_s


async def test_an_open_loop_sends_poisson_arrivals_of_the_seed() -> None:
    dues_s = []
    for seed in (1, 1, 2):
        async with loading(answer_well, Plan(rate=1000.0, num_requests=10, seed=seed)) as (load, _):
            await load.run()
        dues_s.append(sorted(sample.due_s for sample in load.samples))
    assert dues_s[0] == dues_s[1] != dues_s[2]


async def test_a_cap_bounds_what_is_in_flight_and_lateness_shows() -> None:
    gate = Gate(opens_at=99)
    plan = Plan(rate=1000.0, arrivals="constant", num_requests=12, max_concurrency=4)
    async with loading(gate, plan) as (load, server):
        running = asyncio.ensure_future(load.run())
        await until(lambda: load.last_begun_s == 0.011 and gate.num_held == 4)
        await asyncio.sleep(0.02)  # time for a fifth, which must not come
        assert len(server.asked) == 4
        gate.open()
        await running
    assert (gate.peak, len(server.asked), len(load.samples)) == (4, 12, 12)
    # Requests that waited for a place keep the time at which they were due.
    assert [sample.due_s for sample in sorted(load.samples, key=lambda each: each.number)] == sorted(
        sample.due_s for sample in load.samples
    )
    assert max(sample.sent_s - sample.due_s for sample in load.samples) > 0


async def test_a_closed_loop_keeps_its_users_busy() -> None:
    gate = Gate(opens_at=5)  # fewer at once would wait forever
    async with loading(gate, Plan(users=5, num_requests=23, warm_up_requests=6)) as (load, server):
        await load.run()
    assert (gate.peak, len(server.asked)) == (5, 29)
    assert [sample.is_warm_up for sample in sorted(load.samples, key=lambda each: each.number)] == [
        number < 6 for number in range(29)
    ]


@pytest.mark.parametrize(("warm_up", "num_turns"), [(2, 1), (6, 3)])
async def test_users_wait_for_a_warm_up_that_not_all_of_them_take_part_in(
    warm_up: int, num_turns: int
) -> None:
    gate = Gate(opens_at=99)
    turns = (Turn(({"role": "user", "content": "a"},), 1, 1),) * num_turns
    plan = Plan(users=5, num_requests=10, warm_up_requests=warm_up)
    async with loading(gate, plan, repeat(Conversation(turns))) as (load, server):
        running = asyncio.ensure_future(load.run())
        await until(lambda: gate.num_held == 2)
        await asyncio.sleep(0.02)  # time for a third, which must not come
        assert len(server.asked) == 2
        gate.open()
        await running
    assert len(load.samples) == warm_up + 10
    warm_ups = [sample for sample in load.samples if sample.is_warm_up]
    assert len(warm_ups) == warm_up
    ended_s = min(sample.ended_s or 0 for sample in warm_ups)
    assert all(sample.sent_s >= ended_s for sample in load.samples if not sample.is_warm_up)


async def test_a_warm_up_whose_requests_fail_does_not_hold_the_load_up() -> None:
    async def answer(asked: Asked) -> None:
        await (answer_well(asked) if len(server.asked) > 3 else asked.send(plain(503, b"{}")))

    async with loading(answer, Plan(users=4, num_requests=6, warm_up_requests=2)) as (load, server):
        await load.run()
    assert sum(not sample.is_warm_up for sample in load.samples) == 6


async def test_a_conversation_sends_the_servers_own_answers() -> None:
    turns = tuple(Turn(({"role": "user", "content": f"question {at}"},), 2, at + 1) for at in range(3))
    plan = Plan(users=1, num_requests=3)
    async with loading(answer_well, plan, repeat(Conversation(turns))) as (load, server):
        await load.run()
    histories: list[Any] = [asked.body["messages"] for asked in server.asked]
    assert [[message["content"] for message in history] for history in histories] == [
        ["question 0"],
        ["question 0", "w0 ", "question 1"],
        ["question 0", "w0 ", "question 1", "w0 w1 ", "question 2"],
    ]
    assert [message["role"] for message in histories[2]] == ["user", "assistant", "user", "assistant", "user"]
    assert [(sample.turn, sample.output_tokens) for sample in load.samples] == [(0, 1), (1, 2), (2, 3)]
    assert load.samples[1].due_s >= (load.samples[0].ended_s or 0)


async def test_turns_keep_their_distance() -> None:
    turns = (Turn(({"role": "user", "content": "a"},), 1, 1),) * 2
    plan = Plan(users=1, num_requests=2, turn_gap_s=0.05)
    async with loading(answer_well, plan, repeat(Conversation(turns))) as (load, _):
        await load.run()
    first, second = load.samples
    assert first.ended_s is not None
    assert second.due_s >= first.ended_s + 0.05
    assert second.sent_s >= second.due_s


async def test_a_failed_turn_ends_its_conversation_and_not_the_load() -> None:
    async def answer(asked: Asked) -> None:
        if len(asked.body["messages"]) == 3:
            await asked.send(plain(503, b"{}"))
        else:
            await answer_well(asked)

    turns = (Turn(({"role": "user", "content": "a"},), 1, 1),) * 3
    # What it did not ask is asked in others: as many requests are measured as were wanted.
    for plan in (Plan(users=1, num_requests=6), Plan(rate=900.0, num_requests=6, max_concurrency=1)):
        async with loading(answer, plan, repeat(Conversation(turns))) as (load, _):
            await load.run()
        told = [(sample.turn, sample.error) for sample in sorted(load.samples, key=lambda each: each.number)]
        assert sorted(told) == sorted([(0, None), (1, "http_503")] * 3)


async def test_the_last_conversation_is_cut_to_the_requests_that_were_wanted() -> None:
    turns = (Turn(({"role": "user", "content": "a"},), 1, 1),) * 3
    for plan in (Plan(users=2, num_requests=7), Plan(rate=900.0, num_requests=7, warm_up_requests=1)):
        async with loading(answer_well, plan, repeat(Conversation(turns))) as (load, _):
            await load.run()
        assert sum(not sample.is_warm_up for sample in load.samples) == 7


async def test_an_open_loop_that_is_behind_still_reads_its_answers() -> None:
    """All arrivals are due at once: the first answer must not wait until the last request has been sent."""
    async with loading(answer_well, Plan(rate=1e5, arrivals="constant", num_requests=3000)) as (load, _):
        running = asyncio.ensure_future(load.run())
        await until(lambda: len(load.samples) > 0)
        num_begun = load.last_begun_s * 1e5
        load.stop()
        await running
    assert num_begun < 2900
    assert load.last_begun_s * 1e5 < 2999  # and a stop is heard


async def test_an_open_loop_leaves_out_what_it_has_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_BEHIND_S", 0.005)
    # 1,000 can be sent a second, where 10,000 are due.
    slow = (time.sleep(0.001) or each for each in one_turn())  # noqa: ASYNC251
    plan = Plan(rate=10_000.0, arrivals="constant", duration_s=0.05)
    async with loading(answer_well, plan, slow) as (load, _):
        await load.run()
    assert load.num_left_out > 0
    first_s = min(sample.due_s for sample in load.samples)
    assert len(load.samples) + load.num_left_out <= 501 + first_s * plan.rate


async def test_an_open_loop_that_has_missed_all_the_rest_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loading(answer_well, Plan(rate=100.0, duration_s=1000.0)) as (load, _):
        running = asyncio.ensure_future(load.run())
        await until(lambda: len(load.samples) > 0)
        monkeypatch.setattr(run, "MAX_BEHIND_S", -2000.0)
        await running
    assert load.num_left_out == 0


async def test_a_load_that_is_stopped_tells_what_was_under_way() -> None:
    gate = Gate(opens_at=99)

    async def answer(asked: Asked) -> None:
        await (answer_well if len(server.asked) <= 2 else gate)(asked)

    async with loading(answer, Plan(users=2, duration_s=1000.0)) as (load, server):
        running = asyncio.ensure_future(load.run())
        await until(lambda: gate.num_held == 2)
        load.stop()
        await running
    assert load.was_stopped
    assert sorted(str(sample.error) for sample in load.samples) == [
        "None",
        "None",
        "interrupted",
        "interrupted",
    ]
    assert all(sample.ended_s is not None for sample in load.samples)


async def test_an_open_load_that_is_stopped_before_it_has_sent_has_no_samples() -> None:
    async with loading(answer_well, Plan(rate=0.001, num_requests=5)) as (load, _):
        running = asyncio.ensure_future(load.run())
        await asyncio.sleep(0)
        load.stop()
        await running
    assert load.samples == []


async def test_a_fault_of_our_own_ends_the_load_with_it() -> None:
    def broken() -> Iterator[Conversation]:
        yield next(one_turn())
        raise RuntimeError("no more")

    for plan in (Plan(users=1, num_requests=5), Plan(rate=1000.0, num_requests=5)):
        async with loading(answer_well, plan, broken()) as (load, _):
            caught: list[Exception] = []
            try:
                await load.run()
            except RuntimeError as error:
                caught.append(error)
        assert [str(error) for error in caught] == ["no more"]


async def test_a_ramp_lets_users_in_one_by_one() -> None:
    async with loading(Gate(opens_at=4), Plan(users=4, num_requests=4, ramp_s=0.08)) as (load, _):
        await load.run()
    dues_s = sorted(sample.due_s for sample in load.samples)
    assert all(due_s >= 0.02 * number for number, due_s in enumerate(dues_s))
