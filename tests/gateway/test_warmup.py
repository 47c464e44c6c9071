"""Warm-up against workers driven by hand: who is warmed when, in what order, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway import warmup as warmup_module
from gateway.metrics import Metrics
from gateway.prompt_settings import WarmPrompt
from gateway.turns import Turns
from gateway.warm_request import WARM_PRIORITY
from gateway.warmup import PrefixIds, WarmLimits, Warmup
from pipeline.errors import EngineRejected, HeadraceError, QueueFull, WorkerLost
from pipeline.ports import Sink
from pipeline.values import EngineCall, FirstToken, TemplateUse
from tests.backend.linked import until

BLOCK = 4
SHOP = WarmPrompt(messages=({"role": "system", "content": "shop"},))
DOCUMENT = WarmPrompt(messages=({"role": "system", "content": "document"},))
IDS = {"shop": list(range(1, 10)), "document": list(range(1, 9)) + list(range(20, 30))}


def packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


async def prefix_ids(model: str, prompt: WarmPrompt) -> bytes:
    return packed(IDS[prompt.messages[0]["content"]])


@dataclass
class Welcome:
    worker: str = "w-1"
    model_names: list[str] = field(default_factory=lambda: ["m"])
    max_model_len: int = 1000
    block_size: int = BLOCK
    fingerprint: str = "f"


@dataclass
class Submitted:
    """A call that a worker was given."""

    call: EngineCall
    sink: Sink
    worker: str
    aborted: bool = False

    def abort(self) -> None:
        self.aborted = True

    def finish(self, cached: int | None = 0, finish: str = "length") -> None:
        self.sink.tokens([7], finish, None, FirstToken(cached), None, 0.0)


class FakeWorker:
    """A worker whose every word is the test's. `fails` is raised by the next submit."""

    def __init__(self, key: str = "tcp://w:1", **introduction: Any) -> None:
        self.key = key
        self.state = "connecting"
        self.welcome: Welcome | None = Welcome(**introduction)
        self.calls: list[Submitted] = []
        self.fails: HeadraceError | None = None

    def submit_background(self, call: EngineCall, sink: Sink) -> Submitted:
        if self.fails is not None:
            raise self.fails
        assert self.welcome is not None
        self.calls.append(Submitted(call, sink, self.welcome.worker))
        return self.calls[-1]

    async def answer(self, number: int, cached: int | None = 0) -> Submitted:
        """Wait for the call of this number and finish it."""
        await until(lambda: len(self.calls) > number)
        self.calls[number].finish(cached)
        return self.calls[number]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Site:
    """A warm-up and the workers that it has been told of."""

    warmup: Warmup
    metrics: Metrics
    clock: Clock

    def ready(self, worker: FakeWorker) -> None:
        worker.state = "ready"
        self.warmup.worker_changed(worker)

    def gone(self, worker: FakeWorker, state: str = "connecting") -> None:
        worker.state = state
        self.warmup.worker_changed(worker)

    def states(self) -> list[str]:
        return [row["state"] for site in self.warmup.report() for row in site["prompts"]]

    async def all_in(self, *states: str) -> None:
        await until(lambda: self.states() == list(states))

    def observe(
        self, ids: Sequence[int], cached: int | None, worker: str = "w-1", salt: str | None = None
    ) -> None:
        first = FirstToken(cached)
        self.warmup.observe(worker, memoryview(packed(ids)), salt, first, self.clock.now_s)

    def sample(self, name: str, **labels: str) -> float | None:
        self.warmup.publish()
        text = self.metrics.exposition().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return None


@asynccontextmanager
async def warming(
    *prompts: WarmPrompt,
    limits: WarmLimits | None = None,
    ids: PrefixIds = prefix_ids,
    turns: Turns | None = None,
) -> AsyncIterator[Site]:
    metrics, clock = Metrics(), Clock()
    warmup = Warmup(prompts, ids, metrics, limits, turns, clock=clock)
    try:
        yield Site(warmup, metrics, clock)
    finally:
        await warmup.stop()


# -- who and when ------------------------------------------------------------------------------------------


async def test_ready_worker_gets_every_prompt_one_at_a_time() -> None:
    async with warming(SHOP, DOCUMENT) as site:
        worker = FakeWorker()
        site.ready(worker)
        await until(lambda: worker.calls)
        await asyncio.sleep(0.02)
        assert len(worker.calls) == 1
        assert site.states() == ["warming", "pending"]
        await worker.answer(0)
        await worker.answer(1, cached=8)
        await site.all_in("warm", "warm")
        calls = [each.call for each in worker.calls]
        # The whole blocks, and one id more.
        assert [bytes(call.prompt.ids) for call in calls] == [
            packed(IDS["shop"][:9]),
            packed(IDS["document"][:17]),
        ]
        for call in calls:
            assert (call.model, call.max_tokens, call.priority) == ("m", 1, WARM_PRIORITY)
            assert (call.sampling, call.cache_salt) == ({"temperature": 0.0}, None)
            assert call.prompt.num_tokens == call.prompt.ids.nbytes // 4
        rows = site.warmup.report()[0]["prompts"]
        assert [row["cached_tokens"] for row in rows] == [0, 8]
        assert [row["warmed_tokens"] for row in rows] == [8, 16]
        assert site.sample("headrace_warmups_total", worker="tcp://w:1", reason="start") == 2
        assert site.sample("headrace_warm_prompts", worker="tcp://w:1", state="warm") == 2
        assert site.sample("headrace_warm_prompts", worker="tcp://w:1", state="pending") == 0
        assert site.sample("headrace_warmup_seconds_count") == 2


async def test_each_salt_is_warmed_for_itself() -> None:
    salted = WarmPrompt(messages=SHOP.messages, cache_salts=(None, "a", "b"))
    async with warming(salted) as site:
        worker = FakeWorker()
        site.ready(worker)
        for number in range(3):
            await worker.answer(number)
        await site.all_in("warm", "warm", "warm")
        assert [each.call.cache_salt for each in worker.calls] == [None, "a", "b"]
        shown = site.warmup.report()[0]["prompts"]
        assert [row["salt"] for row in shown] == [None, 1, 2]


async def test_only_the_workers_of_its_model_are_warmed() -> None:
    of_m = WarmPrompt(messages=SHOP.messages, model="m")
    asked = []

    async def ids(model: str, prompt: WarmPrompt) -> bytes:
        asked.append(model)
        return await prefix_ids(model, prompt)

    async with warming(of_m, DOCUMENT, ids=ids) as site:
        one = FakeWorker("tcp://w:1", model_names=["alias", "m"])
        other = FakeWorker("tcp://w:2", worker="w-2", model_names=["n"], fingerprint="g")
        site.ready(one)
        site.ready(other)
        await one.answer(0)
        await one.answer(1)
        await other.answer(0)
        await site.all_in("warm", "warm", "warm")
        assert [each.call.model for each in one.calls] == ["m", "alias"]
        assert [each.call.model for each in other.calls] == ["n"]
        assert sorted(asked) == ["alias", "m", "n"]


async def test_workers_of_one_model_are_warmed_side_by_side_from_one_rendering() -> None:
    asked = []

    async def ids(model: str, prompt: WarmPrompt) -> bytes:
        asked.append(model)
        return await prefix_ids(model, prompt)

    async with warming(SHOP, ids=ids) as site:
        workers = [FakeWorker(f"tcp://w:{number}", worker=f"w-{number}") for number in range(3)]
        for worker in workers:
            site.ready(worker)
        await until(lambda: all(worker.calls for worker in workers))
        assert asked == ["m"]


async def test_worker_that_comes_back_is_warmed_again() -> None:
    async with warming(SHOP) as site:
        worker = FakeWorker()
        site.ready(worker)
        await worker.answer(0)
        await site.all_in("warm")
        site.gone(worker)
        assert site.states() == ["pending"]
        worker.welcome = Welcome(worker="w-1-again")
        site.ready(worker)
        await worker.answer(1)
        await site.all_in("warm")
        assert site.sample("headrace_warmups_total", reason="start") == 1
        assert site.sample("headrace_warmups_total", reason="reconnect") == 1
        assert site.warmup.report()[0]["prompts"][0]["num_warmups"] == 2


async def test_worker_that_comes_back_with_other_blocks_is_measured_anew() -> None:
    async with warming(SHOP) as site:
        worker = FakeWorker()
        site.ready(worker)
        await worker.answer(0)
        await site.all_in("warm")
        site.gone(worker)
        worker.welcome = Welcome(block_size=2)
        site.ready(worker)
        await worker.answer(1)
        await site.all_in("warm")
        (row,) = site.warmup.report()[0]["prompts"]
        assert (row["warmed_tokens"], row["reason"]) == (8, "reconnect")
        site.gone(worker)
        worker.welcome = Welcome(block_size=100)
        site.ready(worker)
        await site.all_in("short")


@pytest.mark.parametrize("state", ["draining", "connecting", "stalled"])
async def test_warm_up_under_way_is_aborted_when_its_worker_goes(state: str) -> None:
    async with warming(SHOP) as site:
        worker = FakeWorker()
        site.ready(worker)
        await until(lambda: worker.calls)
        site.gone(worker, state)
        worker.calls[0].sink.failed(WorkerLost("gone"))  # the link tells it after the pool does
        await until(lambda: worker.calls[0].aborted)
        assert site.states() == ["pending"]
        site.ready(worker)
        await worker.answer(1)
        await site.all_in("warm")
        assert site.sample("headrace_warmup_failures_total") is None


async def test_drain_aborts_what_is_under_way_and_begins_nothing() -> None:
    async with warming(SHOP, DOCUMENT) as site:
        worker = FakeWorker()
        site.ready(worker)
        await until(lambda: worker.calls)
        site.warmup.cease()
        await site.warmup.stop()
        assert worker.calls[0].aborted
        site.ready(FakeWorker("tcp://w:2"))
        await asyncio.sleep(0.02)
        assert len(worker.calls) == 1
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("warm up")] == []


async def test_without_warm_prompts_nothing_runs() -> None:
    async with warming() as site:
        worker = FakeWorker()
        site.ready(worker)
        site.observe(IDS["shop"], 0)
        await asyncio.sleep(0.01)
        assert (worker.calls, site.warmup.report(), site.warmup.holds_ready()) == ([], [], False)


async def test_processes_take_turns_at_a_worker(tmp_path: Path) -> None:
    worker = FakeWorker()
    async with (
        warming(SHOP, turns=Turns(tmp_path)) as one,
        warming(SHOP, turns=Turns(tmp_path)) as other,
    ):
        one.ready(worker)
        await until(lambda: worker.calls)
        other.ready(worker)
        await asyncio.sleep(0.15)
        assert len(worker.calls) == 1
        assert other.states() == ["pending"]
        await worker.answer(0)
        await worker.answer(1, cached=8)
        await other.all_in("warm")


# -- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False])
async def test_failure_is_shown_and_tried_again(at_once: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with warming(SHOP) as site:
        worker = FakeWorker()
        error = QueueFull("too many")
        worker.fails = error if at_once else None
        site.ready(worker)
        if not at_once:
            await until(lambda: worker.calls)
            worker.calls[0].sink.failed(error)
        await until(lambda: site.warmup.report()[0]["prompts"][0]["error"])
        (row,) = site.warmup.report()[0]["prompts"]
        assert (row["state"], row["error"]) == ("pending", "QueueFull: too many")
        assert site.sample("headrace_warmup_failures_total", worker="tcp://w:1") == 1
        assert "warming prompt 0 on worker w-1: QueueFull: too many" in caplog.text
        worker.fails = None
        site.clock.now_s += 1.0
        site.gone(worker)
        site.ready(worker)  # rather than a second of waiting
        await worker.answer(len(worker.calls))
        await site.all_in("warm")


async def test_retry_comes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.warm_table.FIRST_PAUSE_S", 0.0)
    async with warming(SHOP) as site:
        worker = FakeWorker()
        site.ready(worker)
        await until(lambda: worker.calls)
        worker.calls[0].sink.failed(QueueFull("too many"))
        await worker.answer(1)
        await site.all_in("warm")


@pytest.mark.parametrize("finish", ["abort", "error"])
async def test_end_without_a_token_is_a_failure(finish: str) -> None:
    async with warming(SHOP) as site:
        worker = FakeWorker()
        site.ready(worker)
        await until(lambda: worker.calls)
        worker.calls[0].finish(finish=finish)
        await until(lambda: finish in site.warmup.report()[0]["prompts"][0]["error"])


async def test_what_the_engine_refuses_is_not_tried_again() -> None:
    async with warming(SHOP, DOCUMENT) as site:
        worker = FakeWorker()
        site.ready(worker)
        await until(lambda: worker.calls)
        worker.calls[0].sink.failed(EngineRejected("no such id"))
        await worker.answer(1)
        await site.all_in("failed", "warm")
        assert site.warmup.report()[0]["prompts"][0]["error"] == "EngineRejected: no such id"


async def test_prompt_that_cannot_be_rendered_fails_alone_and_is_tried_when_its_worker_is_back() -> None:
    is_broken = True

    async def ids(model: str, prompt: WarmPrompt) -> bytes:
        if is_broken and prompt is SHOP:
            raise ValueError("no chat template")
        return await prefix_ids(model, prompt)

    async with warming(SHOP, DOCUMENT, ids=ids) as site:
        worker = FakeWorker()
        site.ready(worker)
        await worker.answer(0)
        await site.all_in("failed", "warm")
        assert site.warmup.report()[0]["prompts"][0]["error"] == "ValueError: no chat template"
        is_broken = False
        site.gone(worker)
        site.ready(worker)
        await worker.answer(1)
        await worker.answer(2)
        await site.all_in("warm", "warm")


async def test_warm_up_that_is_never_served_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup_module, "MAX_WARMUP_S", 0.01)
    async with warming(SHOP) as site:
        worker = FakeWorker()
        site.ready(worker)
        await until(lambda: "not served" in site.warmup.report()[0]["prompts"][0]["error"])
        assert worker.calls[0].aborted
        worker.calls[0].finish()  # too late, and nobody minds


# -- evictions ---------------------------------------------------------------------------------------------


async def test_use_that_finds_too_little_warms_again() -> None:
    async with warming(SHOP, DOCUMENT) as site:
        worker = FakeWorker()
        site.ready(worker)
        await worker.answer(0)
        await worker.answer(1)
        await site.all_in("warm", "warm")
        site.clock.now_s += 60.0
        site.observe([*IDS["document"], 99], 16)
        site.observe([99, *IDS["document"]], 0)
        site.observe([*IDS["document"], 99], 8, worker="w-0")
        await asyncio.sleep(0.02)
        assert len(worker.calls) == 2
        site.observe([*IDS["document"], 99], 8)
        await worker.answer(2, cached=16)
        await site.all_in("warm", "warm")
        assert bytes(worker.calls[2].call.prompt.ids) == bytes(worker.calls[1].call.prompt.ids)
        assert site.sample("headrace_warmups_total", reason="evicted") == 1
        assert site.warmup.report()[0]["prompts"][1]["reason"] == "evicted"


async def test_warm_ups_after_evictions_keep_their_distance() -> None:
    async with warming(SHOP, limits=WarmLimits(rewarm_interval_s=30.0)) as site:
        worker = FakeWorker()
        site.ready(worker)
        await worker.answer(0)
        await site.all_in("warm")
        site.clock.now_s += 10.0
        site.observe([*IDS["shop"], 99], 0)
        await asyncio.sleep(0.02)
        assert (site.states(), len(worker.calls)) == (["pending"], 1)


async def test_prefill_that_began_before_the_warm_up_ended_says_nothing() -> None:
    async with warming(SHOP) as site:
        worker = FakeWorker()
        site.ready(worker)
        await worker.answer(0)
        await site.all_in("warm")
        now_s = site.clock.now_s + 5.0
        view = memoryview(packed([*IDS["shop"], 99]))
        site.warmup.observe("w-1", view, None, FirstToken(0, prefill_ms=5100.0), now_s)
        assert site.states() == ["warm"]
        site.warmup.observe("w-1", view, None, FirstToken(0, prefill_ms=4900.0), now_s)
        assert site.states() == ["pending"]


async def test_engine_that_keeps_nothing_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with warming(SHOP) as site:
        worker = FakeWorker()
        site.ready(worker)
        await worker.answer(0)
        await site.all_in("warm")
        site.clock.now_s += 60.0
        site.observe([*IDS["shop"], 99], 0)
        await worker.answer(1, cached=0)
        await until(lambda: "is its prefix caching on" in caplog.text)
        assert "worker w-1 had 0 of the 8 tokens of warm prompt 0" in caplog.text
        site.clock.now_s += 6000.0
        site.observe([*IDS["shop"], 99], 0)
        await asyncio.sleep(0.02)
        assert len(worker.calls) == 2


async def test_engine_that_does_not_tell_what_was_cached_is_told_once_and_watched_no_further(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with warming(SHOP, DOCUMENT) as site:
        worker = FakeWorker()
        site.ready(worker)
        await worker.answer(0, cached=None)
        await worker.answer(1, cached=None)
        await site.all_in("warm", "warm")
        assert [row["cached_tokens"] for row in site.warmup.report()[0]["prompts"]] == [None, None]
        site.clock.now_s += 60.0
        site.observe([*IDS["shop"], 99], None)
        assert site.states() == ["warm", "warm"]
        assert caplog.text.count("--enable-prompt-tokens-details") == 1
        assert "worker w-1 does not tell" in caplog.text


# -- readiness ---------------------------------------------------------------------------------------------


async def test_ready_does_not_wait_unless_told() -> None:
    async with warming(SHOP) as site:
        assert not site.warmup.holds_ready()


async def test_ready_waits_until_every_prompt_was_tried_and_then_never_again() -> None:
    async with warming(SHOP, DOCUMENT, limits=WarmLimits(before_ready=True)) as site:
        worker = FakeWorker()
        assert site.warmup.holds_ready()
        site.ready(worker)
        assert site.warmup.holds_ready()
        await until(lambda: worker.calls)
        worker.calls[0].sink.failed(EngineRejected("no"))
        await until(lambda: len(worker.calls) == 2)
        assert site.warmup.holds_ready()
        await worker.answer(1)
        await until(lambda: not site.warmup.holds_ready())
        site.gone(worker)
        site.ready(worker)
        assert not site.warmup.holds_ready()


async def test_ready_waits_for_a_bounded_time(caplog: pytest.LogCaptureFixture) -> None:
    limits = WarmLimits(before_ready=True, ready_limit_s=5.0)
    async with warming(SHOP, limits=limits) as site:
        site.clock.now_s += 100.0  # without a worker: nothing can be warm yet
        assert site.warmup.holds_ready()
        site.ready(FakeWorker())
        site.clock.now_s += 4.9
        assert site.warmup.holds_ready()
        site.clock.now_s += 0.2
        assert not site.warmup.holds_ready()
        assert "within 5 s" in caplog.text


# -- what is shown -----------------------------------------------------------------------------------------


async def test_report_shows_no_text_and_no_salt() -> None:
    secret = WarmPrompt(messages=SHOP.messages, cache_salts=("tenant-secret", None))
    named = WarmPrompt(template=TemplateUse("qa", {"shop": "private"}), cache_salts=(None,))

    async def ids(model: str, prompt: WarmPrompt) -> bytes:
        return packed(IDS["shop"])

    async with warming(secret, named, ids=ids) as site:
        site.ready(FakeWorker())
        (worker,) = site.warmup.report()
        assert worker["worker"] == "tcp://w:1"
        assert sum(worker["states"].values()) == worker["num_prompts"] == 3
        assert [row["title"] for row in worker["prompts"]] == ["1 message", "1 message", "qa"]
        for text in ("tenant-secret", "private", "shop"):
            assert text not in str(worker)


async def test_failure_of_the_work_itself_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        async with warming(SHOP, turns=Turns(Path("/nowhere/at/all"))) as site:
            site.ready(FakeWorker())
            await until(lambda: "warming up has stopped for a worker" in caplog.text)
