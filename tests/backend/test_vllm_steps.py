"""The step path against an engine core that does what the test says. The real one: test_vllm_engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from backend.ports import Job
from backend.vllm_media import MediaReader
from pipeline.values import Medium
from tests.backend.linked import until
from tests.backend.vllm_parts import FakeLlm, Heard, import_vllm, pack

PROMPT = pack([1, 2, 3])


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    import_vllm()


class Setup:
    def __init__(self) -> None:
        from backend.vllm_steps import StepPath

        self.llm = FakeLlm()
        self.core = self.llm.engine_core
        self.heard = Heard()
        self.path = StepPath(self.llm, self.heard.events, MediaReader(self.llm, 1000))

    async def submit(self, key: str, **sampling: Any) -> str:
        """Submit and wait until the core has it; the request id."""
        before = len(self.core.added)
        self.path.submit(key, Job(PROMPT, sampling))
        await settle()
        assert len(self.core.added) == before + 1
        return self.core.added[-1]


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    await made.path.start()
    yield made
    await made.path.close()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


def output(request_id: str, ids: list[int], finish: int | None = None, **fields: Any) -> Any:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    reason = None if finish is None else FinishReason(finish)
    return EngineCoreOutput(request_id=request_id, new_token_ids=ids, finish_reason=reason, **fields)


async def test_one_step_is_one_call_for_all_streams(setup: Setup) -> None:
    calls: list[list[Any]] = []
    setup.path.events.step = lambda outputs: calls.append([(each.key, each.ids) for each in outputs])
    first, second = await setup.submit("a"), await setup.submit("b")
    setup.core.give(output(first, [7]), output(second, [8, 9]))
    await settle()
    assert calls == [[("a", [7]), ("b", [8, 9])]]


@pytest.mark.parametrize(
    ("reason", "name"), [(0, "stop"), (1, "length"), (2, "abort"), (3, "error"), (4, "repetition")]
)
async def test_finish_reasons_are_vllms_strings(setup: Setup, reason: int, name: str) -> None:
    request_id = await setup.submit("a")
    setup.core.give(output(request_id, [7], reason, stop_reason=42))
    await settle()
    (only,) = setup.heard.outputs["a"]
    assert (only.finish, only.stop) == (name, 42)


async def test_key_may_be_used_again_after_its_finish(setup: Setup) -> None:
    first = await setup.submit("a")
    setup.core.give(output(first, [7], 1))
    await settle()
    second = await setup.submit("a")
    setup.core.give(output(first, [99]), output(second, [8], 1))  # a late one of the first reaches nobody
    await settle()
    assert setup.heard.ids("a") == [7, 8]


async def test_first_output_carries_cached_tokens_and_durations(setup: Setup) -> None:
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType
    from vllm.v1.metrics.stats import PrefillStats

    request_id = await setup.submit("a")
    events = [
        EngineCoreEvent(EngineCoreEventType.QUEUED, 9.0),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 9.25),
        EngineCoreEvent(EngineCoreEventType.PREEMPTED, 9.5),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 9.75),
    ]
    stats = PrefillStats(num_prompt_tokens=3, num_cached_tokens=2)
    setup.core.give(output(request_id, [7], events=events, prefill_stats=stats), timestamp=10.0)
    setup.core.give(output(request_id, [8], 1), timestamp=10.5)
    await settle()
    first, second = setup.heard.outputs["a"]
    assert first.extra is not None
    assert first.extra.is_first
    assert (first.extra.cached_tokens, first.extra.queue_ms, first.extra.prefill_ms) == (2, 250.0, 750.0)
    assert second.extra is None


async def test_first_output_without_events_has_zero_durations(setup: Setup) -> None:
    request_id = await setup.submit("a")  # an engine with --disable-log-stats sends no events
    setup.core.give(output(request_id, [7]))
    await settle()
    extra = setup.heard.outputs["a"][0].extra
    assert extra is not None
    assert (extra.queue_ms, extra.prefill_ms, extra.cached_tokens) == (0.0, 0.0, 0)


async def test_logprobs_are_cut_to_what_this_request_asked_for(setup: Setup) -> None:
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    request_id = await setup.submit("a", logprobs=1)
    arrays = LogprobsLists(  # as wide as another request of the batch wanted
        np.array([[5, 4, 3, 2], [6, 6, 7, 8]]),
        np.array([[-2.0, -0.5, -1.0, -3.0], [-0.25, -0.25, -1.0, -2.0]]),
        np.array([3, 1]),
    )
    setup.core.give(output(request_id, [5, 6], new_logprobs=arrays))
    await settle()
    extra = setup.heard.outputs["a"][0].extra
    assert extra is not None
    assert extra.logprobs == [([5, 4], [-2.0, -0.5], 3), ([6, 6], [-0.25, -0.25], 1)]


async def test_abort_is_told_to_the_core_before_closed_and_nothing_follows(setup: Setup) -> None:
    request_id = await setup.submit("a")
    setup.core.give(output(request_id, [7]))
    await settle()
    setup.path.abort(["a"])
    setup.core.give(output(request_id, [8]), output(request_id, [], 2))
    await settle()
    assert setup.core.sent[-1] == ("abort", [request_id])
    assert setup.heard.log == [("output", "a", None), ("closed", "a")]


async def test_abort_before_the_request_was_sent_sends_nothing(setup: Setup) -> None:
    setup.path.submit("a", Job(PROMPT, {}))
    setup.path.abort(["a"])
    await settle()
    assert setup.core.sent == []
    assert setup.heard.log == [("closed", "a")]


async def test_abort_while_a_long_prompt_is_prepared_sends_nothing(setup: Setup) -> None:
    from backend.vllm_request import LONG_PACKED_TOKENS

    entered, leave = threading.Event(), threading.Event()
    process = setup.llm.input_processor.process_inputs

    def slow(*args: Any, **options: Any) -> Any:
        entered.set()
        assert leave.wait(10)
        return process(*args, **options)

    setup.llm.input_processor.process_inputs = slow
    setup.path.submit("long", Job(pack([1] * (LONG_PACKED_TOKENS + 1)), {}))
    assert await asyncio.to_thread(entered.wait, 10)
    short_id = await asyncio.wait_for(_added(setup), 10)  # the loop is free meanwhile
    setup.path.abort(["long"])
    leave.set()
    await setup.heard.end("long")
    await asyncio.sleep(0.05)
    assert setup.core.sent == [("add", short_id)]
    assert ("closed", "long") in setup.heard.log


async def _added(setup: Setup) -> str:
    process = setup.llm.input_processor.process_inputs
    setup.llm.input_processor.process_inputs = setup.llm._process
    setup.path.submit("short", Job(PROMPT, {}))
    await settle()
    setup.llm.input_processor.process_inputs = process
    return setup.core.added[-1]


async def test_abort_of_an_unknown_key_is_not_answered(setup: Setup) -> None:
    setup.path.abort(["nobody"])
    await settle()
    assert (setup.heard.log, setup.core.sent) == ([], [])


async def test_bad_sampling_fails_the_one_job_and_names_the_field(setup: Setup) -> None:
    setup.path.submit("bad", Job(PROMPT, {"temperature": "hot"}))
    good = await setup.submit("good")
    setup.core.give(output(good, [7], 1))
    await settle()
    failed = setup.heard.last("bad")
    assert failed is not None
    assert failed[2] == "rejected"
    assert failed[3].startswith("temperature:")
    assert setup.heard.ids("good") == [7]


async def test_lost_images_are_sent_once_more(setup: Setup) -> None:
    first = await setup.submit("a")
    setup.core.give(output(first, [], 3, mm_cache_miss_hashes=["h1", "h2"]))
    await settle()
    assert setup.llm.invalidated == ["h1", "h2"]
    second = setup.core.added[-1]
    assert second != first
    assert setup.heard.log == []
    setup.core.give(output(second, [7], 1))
    await settle()
    assert setup.heard.ids("a") == [7]


async def test_job_with_media_is_sent_once_more_with_them(setup: Setup, monkeypatch: Any) -> None:
    prepared: list[Job] = []

    async def prompt(job: Job, is_wanted: Any) -> Any:
        assert is_wanted()
        prepared.append(job)
        return {"prompt_token_ids": [1, 2, 2, 2, 3]}

    monkeypatch.setattr(setup.path._media, "prompt", prompt)
    job = Job(PROMPT, {}, media=(Medium("image", b"png", "png", ""),))
    setup.path.submit("a", job)
    await until(lambda: len(setup.core.added) == 1)
    setup.core.give(output(setup.core.added[-1], [], 3, mm_cache_miss_hashes=["h1"]))
    await until(lambda: len(setup.core.added) == 2)
    assert prepared == [job, job]
    setup.core.give(output(setup.core.added[-1], [7]))
    await settle()
    (first,) = setup.heard.outputs["a"]
    assert first.extra is not None
    assert first.extra.prompt_tokens == 5
    assert setup.path._requests[setup.core.added[-1]].job is None  # its bytes are not needed any more
    setup.core.give(output(setup.core.added[-1], [8], 1))
    await settle()
    assert setup.llm.records[-1]["iteration_stats"].finished_requests[0].num_prompt_tokens == 5


async def test_media_of_an_aborted_job_are_not_sent(setup: Setup, monkeypatch: Any) -> None:
    wanted: list[bool] = []

    async def prompt(job: Job, is_wanted: Any) -> Any:
        setup.path.abort(["a"])
        wanted.append(is_wanted())
        return None

    monkeypatch.setattr(setup.path._media, "prompt", prompt)
    setup.path.submit("a", Job(PROMPT, {}, media=(Medium("image", b"png", "png", ""),)))
    await settle()
    assert wanted == [False]
    assert setup.core.sent == []
    assert setup.heard.log == [("closed", "a")]


async def test_images_lost_twice_end_the_job(setup: Setup) -> None:
    setup.core.give(output(await setup.submit("a"), [], 3, mm_cache_miss_hashes=["h1"]))
    await settle()
    setup.core.give(output(setup.core.added[-1], [], 3, mm_cache_miss_hashes=["h1"]))
    await settle()
    assert setup.heard.log == [("output", "a", "error")]
    assert len(setup.core.added) == 2


async def test_images_lost_after_an_abort_are_not_sent_again(setup: Setup) -> None:
    request_id = await setup.submit("a")
    setup.path.abort(["a"])
    setup.core.give(output(request_id, [], 3, mm_cache_miss_hashes=["h1"]))
    await settle()
    assert setup.core.added == [request_id]


async def test_dead_core_is_reported_once_with_its_reason(setup: Setup) -> None:
    await setup.submit("a")
    setup.core.batches.put_nowait(RuntimeError("core gone"))
    await settle()
    assert setup.heard.log == [("died", "RuntimeError: core gone")]


async def test_every_batch_is_recorded_also_one_without_outputs(setup: Setup) -> None:
    request_id = await setup.submit("a", max_tokens=2)
    setup.core.give(output(request_id, [7]))
    setup.core.give(output(request_id, [8], 1), timestamp=10.5)
    setup.core.give()
    await settle()
    first, second, empty = (record["iteration_stats"] for record in setup.llm.records)
    assert first.num_generation_tokens == 1
    assert len(first.time_to_first_tokens_iter) == 1
    assert second.inter_token_latencies_iter == [0.5]
    (finished,) = second.finished_requests
    counts = (finished.num_generation_tokens, finished.num_prompt_tokens, finished.max_tokens_param)
    assert counts == (2, 3, 2)
    assert empty is None


async def test_close_drops_jobs_without_a_word(setup: Setup) -> None:
    await setup.submit("a")
    await setup.path.close()
    assert setup.heard.log == []
