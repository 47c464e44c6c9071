"""Steps recorded together against the same steps recorded by vLLM one by one, into vLLM's own metrics."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.backend.vllm_parts import import_vllm


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    import_vllm()


class Clock:
    """Wall-clock time as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        for module in ("vllm.v1.metrics.stats", "backend.vllm_metrics"):
            monkeypatch.setattr(f"{module}.time", SimpleNamespace(time=lambda: self.now_s))


def manager(*more: Any) -> Any:
    """vLLM's manager of stat loggers with its Prometheus one; takes the place of the last in the registry."""
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerManager

    config = VllmConfig()
    names = SimpleNamespace(served_model_name="m", max_model_len=4096, is_diffusion=False)
    object.__setattr__(config, "model_config", names)
    return StatLoggerManager(config, custom_stat_loggers=list(more), enable_default_loggers=True)


def exposition() -> dict[Any, float]:
    """Every sample of vLLM's metrics but the times at which the objects were made."""
    import prometheus_client

    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("vllm:") and not sample.name.endswith("_created")
    }


def recorder(stats: Any) -> Any:
    from backend.vllm_metrics import StepRecorder

    return StepRecorder(
        SimpleNamespace(logger_manager=stats, renderer=SimpleNamespace(stat_mm_cache=lambda: None))
    )


def request(stats: Any, arrival_s: float) -> Any:
    """What the recorder needs of one."""
    params = SimpleNamespace(max_tokens=20)
    return SimpleNamespace(figures=stats.request(arrival_s), num_prompt=100, num_cached=16, params=params)


class Script:
    """A seeded run of an engine: steps with tokens, prompts, preemptions, finishes, and quiet ones."""

    def __init__(self, seed: int, num_steps: int = 120) -> None:
        self._random = random.Random(seed)
        self._running: dict[str, int] = {}
        self._numbers = iter(range(10_000))
        self.batches = [self._batch(number) for number in range(num_steps)]

    def _batch(self, number: int) -> Any:
        from vllm.v1.engine import EngineCoreOutputs

        chance = self._random.random
        at_s = 50.0 + 0.02 * number + (0.005 * chance() if chance() < 0.1 else 0.0)
        items = [self._item(each, at_s) for each in list(self._running) if chance() < 0.9]
        fresh = [str(next(self._numbers)) for _ in range(self._random.choice((0, 0, 0, 1, 3)))]
        items += [self._first(each, at_s) for each in fresh]
        stats = None if chance() < 0.1 else self._scheduler(len(fresh))
        return EngineCoreOutputs(outputs=items, scheduler_stats=stats, timestamp=at_s)

    def _first(self, request_id: str, at_s: float) -> Any:
        from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput
        from vllm.v1.metrics.stats import PrefillStats

        self._running[request_id] = self._random.randrange(1, 20)
        events = [
            EngineCoreEvent(EngineCoreEventType.QUEUED, at_s - 0.5),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, at_s - 0.25),
        ]
        prefill = PrefillStats()
        prefill.set(100, self._random.choice((0, 16, 96)), 0)
        return EngineCoreOutput(
            request_id=request_id, new_token_ids=[1], events=events, prefill_stats=prefill
        )

    def _item(self, request_id: str, at_s: float) -> Any:
        from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason

        self._running[request_id] -= 1
        is_last = self._running[request_id] <= 0
        if is_last:
            del self._running[request_id]
        events = None
        if self._random.random() < 0.05:
            events = [EngineCoreEvent(EngineCoreEventType.PREEMPTED, at_s - 0.01)]
        ids = [2] * self._random.choice((1, 1, 1, 2, 5))  # more than one with speculative decoding
        reason = FinishReason(self._random.randrange(2)) if is_last else None
        return EngineCoreOutput(request_id=request_id, new_token_ids=ids, finish_reason=reason, events=events)

    def _scheduler(self, num_fresh: int) -> Any:
        from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

        prefix = PrefixCacheStats(requests=num_fresh, queries=100 * num_fresh, hits=16 * num_fresh)
        prefix.reset = self._random.random() < 0.03
        return SchedulerStats(
            num_running_reqs=len(self._running),
            num_waiting_reqs=self._random.randrange(3),
            kv_cache_usage=self._random.random(),
            prefix_cache_stats=prefix,
        )

    def play(self, stats: Any, clock: Clock) -> None:
        """Through the recorder, as `vllm_steps` does."""
        requests: dict[str, Any] = {}
        for batch in self.batches:
            clock.now_s = 1000.0 + batch.timestamp
            outputs = []
            for item in batch.outputs:
                is_first = item.request_id not in requests
                own = requests.setdefault(item.request_id, request(stats, clock.now_s - 1.0))
                outputs.append((item, own, is_first))
            stats.step(batch, outputs)


async def test_every_figure_is_as_if_recorded_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.metrics.loggers import StatLoggerBase

    from backend.vllm_merging import Merging

    class Stranger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, *_: Any) -> None: ...
        def record(self, *_: Any, **__: Any) -> None: ...
        def log_engine_initialized(self) -> None: ...

    clock = Clock(monkeypatch)
    for seed in range(4):
        script = Script(seed)
        one_by_one = manager(Stranger)
        assert Merging.of(one_by_one) is None
        script.play(recorder(one_by_one), clock)
        expected = exposition()
        assert expected["vllm:iteration_tokens_total_count", ("engine", "0"), ("model_name", "m")] > 50

        script = Script(seed)  # the batches are changed when their figures are added up
        together = manager()
        records = _count_records(together)
        merging = recorder(together)
        for batch in script.batches:  # as they come off the socket
            batch.scheduler_stats = msgspec.Raw(msgspec.msgpack.encode(batch.scheduler_stats))
        script.play(merging, clock)
        assert len(records) < len(script.batches) / 2
        merging.close()
        assert exposition() == pytest.approx(expected, rel=1e-9)


def _count_records(stats: Any) -> list[Any]:
    records: list[Any] = []
    record = stats.record

    def counted(**figures: Any) -> None:
        records.append(figures)
        record(**figures)

    stats.record = counted
    return records


class Live:
    """A recorder over vLLM's manager, fed by hand; `value` reads a sample."""

    def __init__(self) -> None:
        self.stats = recorder(manager())
        self.own = request(self.stats, 1.0)

    def step(self, is_first: bool = False, running: int = 1, **scheduler: Any) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        from vllm.v1.metrics.stats import SchedulerStats

        item = EngineCoreOutput(request_id="a", new_token_ids=[1])
        figures = SchedulerStats(num_running_reqs=running, **scheduler)
        batch = EngineCoreOutputs(outputs=[item], scheduler_stats=figures, timestamp=5.0)
        self.stats.step(batch, [(item, self.own, is_first)])

    def value(self, name: str = "generation_tokens_total") -> float:
        return exposition()[f"vllm:{name}", ("engine", "0"), ("model_name", "m")]


async def test_steps_wait_until_somebody_asks() -> None:
    live = Live()
    live.step(is_first=True)
    live.step()
    assert live.value() == 0
    live.stats.flush()
    live.stats.flush()
    assert (live.value(), live.value("num_requests_running")) == (2, 1)


async def test_only_so_many_steps_wait_to_be_counted() -> None:
    from backend.vllm_metrics import MAX_OUTPUTS

    live = Live()
    live.step(is_first=True)
    for _ in range(3 * MAX_OUTPUTS):
        live.step()
        assert len(live.stats._steps) < MAX_OUTPUTS
    live.stats.flush()
    assert live.value() == 3 * MAX_OUTPUTS + 1


async def test_figures_that_a_later_step_would_replace_are_recorded_by_themselves() -> None:
    from vllm.v1.metrics.stats import PrefixCacheStats

    live = Live()
    live.step(is_first=True)
    live.step(connector_prefix_cache_stats=PrefixCacheStats(requests=1, queries=30, hits=20))
    live.step(connector_prefix_cache_stats=PrefixCacheStats(requests=1, queries=30, hits=1))
    live.stats.flush()
    assert (live.value(), live.value("external_prefix_cache_hits_total")) == (3, 21)


async def test_scheduler_figures_that_this_version_does_not_name_are_recorded_by_themselves() -> None:
    """Only what is known to be replaced or added up waits: a field that vLLM adds does not get lost."""
    from dataclasses import fields

    from vllm.v1.metrics.stats import SchedulerStats

    from backend.vllm_merging import _REPLACED

    live = Live()
    names = {field.name for field in fields(SchedulerStats)}
    assert names >= _REPLACED
    assert set(live.stats._merging._extras) == names - _REPLACED


async def test_many_finished_answers_do_not_wait_for_each_other() -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    from backend.vllm_metrics import MAX_FINISHED

    live = Live()
    item = EngineCoreOutput(request_id="a", new_token_ids=[1], finish_reason=FinishReason.STOP)
    records = _count_records(live.stats._manager)
    for _ in range(3):
        batch = EngineCoreOutputs(outputs=[item] * MAX_FINISHED, timestamp=5.0)
        live.stats.step(batch, [(item, request(live.stats, 1.0), True) for _ in range(MAX_FINISHED)])
    live.stats.flush()
    assert [len(record["iteration_stats"].finished_requests) for record in records] == [MAX_FINISHED] * 3
    assert live.value() == 3 * MAX_FINISHED


async def test_close_records_the_rest_and_leaves_vllms_logger_as_it_was() -> None:
    from prometheus_client import Histogram

    live = Live()
    live.step(is_first=True)
    live.stats.close()
    live.stats.close()
    (prometheus,) = (
        logger for logger in live.stats._manager.stat_loggers if hasattr(logger, "histogram_iteration_tokens")
    )
    assert live.value() == 1
    assert type(prometheus.histogram_iteration_tokens[0]) is Histogram


async def test_unknown_insides_of_a_histogram_cost_only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from backend import vllm_merging

    monkeypatch.setattr(vllm_merging, "_parts", lambda histogram: histogram._no_such)
    live = Live()
    live.step(is_first=True)
    for _ in range(3):
        live.step()
    live.stats.flush()
    assert live.value("inter_token_latency_seconds_count") == 3
    monkeypatch.setattr(
        vllm_merging, "_parts", lambda histogram: (histogram._sum, [2.0, 1.0, 9.0], histogram._buckets)
    )
    assert not vllm_merging._is_understood()


def test_the_insides_of_this_prometheus_client_are_understood() -> None:
    from backend.vllm_merging import _is_understood

    assert _is_understood()


async def test_other_stat_loggers_and_several_engines_get_each_step() -> None:
    from backend.vllm_merging import Merging

    several = manager()
    several.engine_indexes = [0, 1]
    assert Merging.of(several) is None
    assert Merging.of(None) is None
    assert Merging.of(manager()) is not None


async def test_queries_before_a_reset_of_the_prefix_cache_are_not_counted_after_it() -> None:
    from vllm.v1.metrics.stats import PrefixCacheStats

    live = Live()
    records = _count_records(live.stats._manager)
    live.step(is_first=True, prefix_cache_stats=PrefixCacheStats(requests=1, queries=30, hits=20))
    live.step(prefix_cache_stats=PrefixCacheStats(reset=True, requests=1, queries=40))
    live.stats.flush()
    figures = [record["scheduler_stats"].prefix_cache_stats for record in records]
    assert [(each.reset, each.queries) for each in figures] == [(False, 30), (True, 40)]
    assert (live.value(), live.value("prefix_cache_queries_total")) == (2, 70)
