"""The real engine with the embedded model, on both token paths. One start for the module."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from io import StringIO
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import pytest_asyncio

from backend.link import Stats
from backend.model_files import read_model_files
from backend.ports import Job
from backend.progress import StreamProgress
from backend.vllm_config import VllmConfigError, VllmOptions, engine_config
from backend.vllm_engine import VllmEngine, is_tested
from tests.backend.vllm_parts import Heard, import_vllm, pack
from tests.stack import STEP_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = [[1, 520, 198, 504, 3575, 282, 4649, 314], list(range(100, 160)), [30000, 2, 1, 17]]
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_tokens": 2000, "ignore_eos": True}


class Engine:
    """The engine, what it reports, and what `AsyncLLM.generate` itself gives for the prompts."""

    def __init__(self, engine: VllmEngine, heard: Heard, progress: StringIO) -> None:
        self.engine = engine
        self.heard = heard
        self.progress = progress
        self.path = engine.info.engine_path
        self.reference: list[list[int]] = []
        self._num_keys = 0

    def start(self, ids: list[int], priority: int = 0, salt: str | None = None, **sampling: Any) -> str:
        return self.submit(Job(pack(ids), sampling, priority, salt))

    def submit(self, job: Job) -> str:
        self._num_keys += 1
        key = f"{self.engine.info.engine_path}-{self._num_keys}"
        self.engine.submit(key, job)
        return key

    async def answer(self, prompt: str | list[int], ended: bool | None, **arguments: Any) -> str:
        """Greedy, with a grammar that allows "yes" and "no"."""
        tokenizer = self.engine._llm.get_tokenizer()
        ids = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
        sampling = {"temperature": 0.0, "max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}}
        key = self.submit(
            Job(pack(ids), sampling, reasoning_ended=ended, reasoning_parser_kwargs=arguments or None)
        )
        await self.heard.end(key)
        text: str = tokenizer.decode(self.heard.ids(key), skip_special_tokens=True)
        return text

    async def run(self, ids: list[int], salt: str | None = None, **sampling: Any) -> str:
        key = self.start(ids, salt=salt, **sampling)
        await self.heard.end(key)
        return key

    async def idle(self) -> Stats:
        """The figures once nothing runs and nothing waits. They come with steps, so one is made first."""
        await self.run([1], max_tokens=1)
        async with asyncio.timeout(60):
            while (stats := self.engine.stats()).running or stats.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return stats


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(embedded_model: Path) -> AsyncIterator[Engine]:
    import_vllm()
    heard, shown = Heard(), StringIO()
    # Of all of vLLM's parsers the one that takes a tokenizer without a token for </think>.
    arguments = ("--reasoning-parser", "olmo3", "--max-num-batched-tokens", str(STEP_TOKENS))
    options = VllmOptions(str(embedded_model), ("tiny", "small"), arguments)
    engine = VllmEngine(options, StreamProgress(shown))
    try:
        await engine.start(heard.events)
        yield Engine(engine, heard, shown)
    finally:
        await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["steps", "generate"])
async def engine(request: pytest.FixtureRequest, started: Engine) -> Engine:
    """The engine on each path in turn. It starts on the steps path, of itself."""
    if request.param != started.engine.info.engine_path:
        from backend.vllm_generate import GeneratePath

        assert started.engine._path is not None
        await started.engine._path.close()
        await started.engine._use(GeneratePath)
        started.reference = [await _generated(started.engine._llm, ids) for ids in PROMPTS]
    return started


async def _generated(llm: Any, ids: list[int]) -> list[int]:
    """Greedy ids as vLLM's public way gives them, detokenizing and all."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt, params = TokensPrompt(prompt_token_ids=ids), SamplingParams(**GREEDY)
    results = [result async for result in llm.generate(prompt, params, f"reference-{ids[0]}")]
    return list(results[-1].outputs[0].token_ids)


_GREEDY_IDS: dict[str, list[list[int]]] = {}


async def test_start_takes_the_step_path_and_tells_its_stages(started: Engine) -> None:
    assert started.path == "steps"
    shown = started.progress.getvalue()
    stages = ("importing vLLM", "reading the model's config", "loading weights", "warming up")
    assert [stage for stage in stages if stage in shown] == list(stages)


async def test_info_describes_model_and_engine(started: Engine, embedded_model: Path) -> None:
    info = started.engine.info
    assert list(info.model_names) == ["tiny", "small"]
    assert (info.max_model_len, info.block_size, info.max_running) == (8192, 32, 128)
    assert info.fingerprint == read_model_files(embedded_model).fingerprint
    assert {each.name for each in info.files} >= {"tokenizer.json", "chat_template.jinja", "config.json"}
    assert info.default_sampling == {}  # this model's generation_config sets none
    assert info.versions["vllm"]
    assert info.reasoning_parser == "olmo3"
    assert not info.scripted


async def test_scheduling_options_are_on(started: Engine) -> None:
    config = started.engine._config
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.policy == "priority"


async def test_greedy_ids_are_those_of_generate(engine: Engine) -> None:
    found = [engine.heard.ids(await engine.run(ids, **GREEDY)) for ids in PROMPTS]
    assert [len(ids) for ids in found] == [8, 8, 8]
    _GREEDY_IDS[engine.engine.info.engine_path] = found
    if engine.reference:  # both paths have run by then
        assert {"steps": engine.reference, "generate": engine.reference} == _GREEDY_IDS


async def test_first_delta_has_durations_and_the_last_one_the_finish(engine: Engine) -> None:
    key = await engine.run(PROMPTS[0], **GREEDY)
    outputs = engine.heard.outputs[key]
    first = outputs[0].extra
    assert first is not None
    assert first.is_first
    assert 0 <= first.queue_ms < 60_000
    assert 0 < first.prefill_ms < 60_000
    assert [output.finish for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
    assert all(output.extra is None for output in outputs[1:])


async def test_stop_token_ends_with_its_id(engine: Engine) -> None:
    (second, *_) = engine.heard.ids(await engine.run(PROMPTS[0], **GREEDY))[1:]
    key = await engine.run(PROMPTS[0], **GREEDY, stop_token_ids=[second])
    last = engine.heard.outputs[key][-1]
    assert (last.finish, last.stop) == ("stop", second)


async def test_logprobs_are_of_the_sampled_token_then_the_best(engine: Engine) -> None:
    key = await engine.run(PROMPTS[1], **{**GREEDY, "temperature": 1.0}, seed=5, logprobs=3)
    ids = engine.heard.ids(key)
    positions = [
        position
        for output in engine.heard.outputs[key]
        if output.extra is not None
        for position in output.extra.logprobs or ()
    ]
    assert len(positions) == len(ids)
    for token_id, (token_ids, logprobs, rank) in zip(ids, positions, strict=True):
        assert len(token_ids) == len(logprobs) == 4
        assert token_ids[0] == token_id
        assert logprobs[1:] == sorted(logprobs[1:], reverse=True)
        assert all(math.isfinite(value) and value <= 0 for value in logprobs)
        if rank <= 3:
            assert token_ids[rank] == token_id


async def test_seeds_repeat_and_differ(engine: Engine) -> None:
    sampling = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True}
    runs = [engine.heard.ids(await engine.run(PROMPTS[0], **sampling, seed=seed)) for seed in (7, 8, 9, 7)]
    assert runs[0] == runs[3]
    assert len({tuple(ids) for ids in runs}) == 3


async def test_grammar_binds_at_once_where_the_prompt_has_ended_the_reasoning(engine: Engine) -> None:
    assert await engine.answer(PROMPTS[0], ended=True) in ("yes", "no")
    # Without a word the engine looks for the end in the prompt.
    assert await engine.answer("Is it so?</think>", ended=None) in ("yes", "no")


async def test_grammar_lets_the_reasoning_be(engine: Engine) -> None:
    free = engine.heard.ids(await engine.run(PROMPTS[0], **GREEDY))
    text = engine.engine._llm.get_tokenizer().decode(free)
    assert await engine.answer(PROMPTS[0], ended=False) == text
    assert await engine.answer(PROMPTS[0], ended=None) == text


async def test_grammar_binds_when_the_reasoning_ends(engine: Engine) -> None:
    """A prompt after which the model closes its last element, as it would go on with the list."""
    prompt = "<bold>one</bold>\n<word>two</word>\n<think>three"
    assert await engine.answer(prompt, ended=False) in ("</think>yes", "</think>no")


async def test_arguments_that_the_reasoning_parser_does_not_take_are_refused(engine: Engine) -> None:
    """The engine core would die of them, and every stream with it."""
    sampling = {"max_tokens": 2, "structured_outputs": {"choice": ["yes", "no"]}}
    key = engine.submit(Job(pack([1]), sampling, reasoning_parser_kwargs={"tokenizer": 1}))
    last = await engine.heard.end(key)
    assert last[2] == "rejected"
    assert last[3].startswith("reasoning_parser_kwargs: ")
    assert await engine.answer(PROMPTS[0], ended=True, chat_template_kwargs={"thinking": 1}) in ("yes", "no")


@pytest.mark.parametrize(
    ("ids", "sampling", "named"),
    [
        ([1], {"temperature": "hot"}, "temperature"),
        ([1], {"top_p": 0}, "top_p"),
        ([1], {"nonsense": 1}, "nonsense"),
        ([1], {"logprobs": 500}, "logprobs"),
        ([1], {"stop_token_ids": [49152]}, "stop_token_ids"),
        ([1], {"structured_outputs": {"regex": "(("}}, "regex"),
        ([], {}, "prompt"),
        ([49152], {}, "49152"),
        ([-1], {}, "-1"),
        ([1] * 8193, {}, "8193"),
    ],
)
async def test_bad_job_is_rejected_and_says_what_is_wrong(
    engine: Engine, ids: list[int], sampling: dict[str, Any], named: str
) -> None:
    key = engine.start(ids, **sampling)
    last = await engine.heard.end(key)
    assert last[:3] == ("failed", key, "rejected")
    assert named in last[3]


async def test_prefix_hit_reports_cached_tokens(engine: Engine) -> None:
    salt = engine.engine.info.engine_path  # the other path must not have filled the cache for this one
    prompt = list(range(1000, 1200))
    keys = [await engine.run(prompt, salt=salt, max_tokens=1) for _ in range(2)]
    extras = [engine.heard.outputs[key][0].extra for key in keys]
    assert [extra.cached_tokens for extra in extras if extra is not None] == [0, 192]  # whole blocks of 32
    other = await engine.run(prompt, salt=f"another user on {salt}", max_tokens=1)
    assert (await engine.idle()).prefix_hits > 0
    extra = engine.heard.outputs[other][0].extra
    assert extra is not None
    assert extra.cached_tokens == 0


async def test_abort_before_the_engine_has_it_frees_everything(engine: Engine) -> None:
    key = engine.start(PROMPTS[0], **LONG)
    engine.engine.abort([key])
    assert await engine.heard.end(key) == ("closed", key)
    assert engine.heard.ids(key) == []
    await engine.idle()


async def test_abort_during_prefill_frees_everything(engine: Engine) -> None:
    salt = engine.engine.info.engine_path
    num_tokens = 4 * STEP_TOKENS  # steps of most of a second each
    key = engine.start(list(range(2000, 2000 + num_tokens)), salt=salt, **LONG)
    await asyncio.sleep(0.1)
    engine.engine.abort([key])
    assert await engine.heard.end(key) == ("closed", key)
    assert engine.heard.ids(key) == []
    await engine.idle()


async def test_abort_during_decode_frees_everything_and_nothing_follows(engine: Engine) -> None:
    keys = [engine.start(ids, **LONG) for ids in PROMPTS]
    await engine.heard.until(lambda: all(len(engine.heard.ids(key)) > 1 for key in keys))
    engine.engine.abort(keys)
    for key in keys:
        assert await engine.heard.end(key) == ("closed", key)
    seen = [engine.heard.ids(key) for key in keys]
    await engine.idle()
    assert [engine.heard.ids(key) for key in keys] == seen


async def test_job_past_the_bound_is_busy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.engine, "_max_jobs", 1)
    first = engine.start(PROMPTS[0], **LONG)
    second = engine.start(PROMPTS[1], **GREEDY)
    last = await engine.heard.end(second)
    assert last[:3] == ("failed", second, "busy")
    assert "the limit is 1" in last[3]
    engine.engine.abort([first])
    await engine.heard.end(first)
    third = await engine.run(PROMPTS[1], **GREEDY)
    assert len(engine.heard.ids(third)) == 8


async def test_metrics_have_vllms_names_and_move(engine: Engine) -> None:
    def tokens() -> float:
        engine.engine.stats()  # as whoever shows them does
        value = prometheus_client.REGISTRY.get_sample_value("vllm:generation_tokens_total", labels)
        assert value is not None
        return value

    labels = {"engine": "0", "model_name": "tiny"}
    await engine.idle()
    before = tokens()
    await engine.run(PROMPTS[0], **GREEDY)
    assert tokens() == before + 8
    text = prometheus_client.generate_latest().decode()
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "request_success_total",
    ):
        assert f"vllm:{name}{{" in text


async def test_fallback_is_taken_for_an_untested_version(
    started: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = started.engine
    assert engine._path is not None
    await engine._path.close()
    monkeypatch.setattr("backend.vllm_engine.STEPS_VERSIONS", ((0, 99), (1, 0)))
    await engine._choose_path()
    assert engine.info.engine_path == "generate"
    assert "outside the tested range, 0.99 to below 1.0" in caplog.text


async def test_fallback_is_taken_when_the_probe_fails(
    started: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = started.engine
    assert engine._path is not None
    await engine._path.close()

    def broken(self: Any, batch: Any) -> Any:
        raise AttributeError("no such field in this version")

    monkeypatch.setattr("backend.vllm_steps.StepPath._sort", broken)
    engine._llm.output_handler.cancel()  # as if the engine had just been built
    engine._llm.output_handler = None
    await engine._choose_path()
    assert engine.info.engine_path == "generate"
    assert "the probe failed (ProbeError: AttributeError: no such field" in caplog.text
    assert len(started.heard.ids(await started.run(PROMPTS[0], **GREEDY))) == 8


async def test_killed_engine_core_is_noticed_and_refuses_jobs(started: Engine) -> None:
    """The last test of the module: nothing works after it."""
    key = started.start(PROMPTS[0], **LONG)
    await started.heard.until(lambda: started.heard.ids(key))
    os.kill(started.engine.process_ids[0], signal.SIGKILL)
    (died,) = await started.heard.until(lambda: [what for what in started.heard.log if what[0] == "died"])
    assert died[1].startswith("its process EngineCore ended")
    assert started.engine.stats() == Stats(engine_alive=False)
    late = started.start(PROMPTS[0], **GREEDY)
    assert (await started.heard.end(late))[2] == "engine"
    seen = started.heard.ids(key)
    await asyncio.sleep(0.2)
    assert started.heard.ids(key) == seen


@pytest.mark.parametrize(
    ("engine_args", "said"),
    [
        (["--max-num-seqs", "many"], "does not take its arguments: argument --max-num-seqs"),
        (["--no-such-argument"], "does not take its arguments: unrecognized arguments: --no-such-argument"),
        (["--reasoning-parser", "nonsense"], "Reasoning parser 'nonsense' not found"),
        (["--reasoning-parser", "deepseek_r1"], "could not locate think start/end tokens"),
        (["--max-model-len", "1000000"], r"cannot use (?s:.*)max_model_len \(1000000\) is greater"),
    ],
)
async def test_bad_engine_argument_is_refused_in_vllms_words(
    embedded_model: Path, engine_args: list[str], said: str
) -> None:
    import_vllm()
    with pytest.raises(VllmConfigError, match=said):
        engine_config(VllmOptions(str(embedded_model), engine_args=engine_args), is_cpu=True)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.31.9", False),
        ("0.32.0", True),
        ("0.32.1.post1", True),
        ("0.33.0", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
async def test_tested_versions(version: str, expected: bool) -> None:
    assert is_tested(version) is expected
