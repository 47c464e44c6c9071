"""The generate path against a stand-in for `AsyncLLM.generate`. The real one: test_vllm_engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
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


class Llm(FakeLlm):
    """`generate` gives what the test puts into the queue of the request; None ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.queues: list[asyncio.Queue[Any]] = []
        self.num_cancelled = 0
        self.reasoning: list[tuple[bool | None, Any]] = []
        structured = SimpleNamespace(reasoning_parser="olmo3")
        self.vllm_config = SimpleNamespace(structured_outputs_config=structured)

    async def generate(
        self,
        prompt: Any,
        params: Any,
        request_id: str,
        *,
        priority: int,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Any = None,
    ) -> AsyncIterator[Any]:
        self.reasoning.append((reasoning_ended, reasoning_parser_kwargs))
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.queues.append(queue)
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


class Setup:
    def __init__(self) -> None:
        from backend.vllm_generate import GeneratePath

        self.llm = Llm()
        self.heard = Heard()
        self.path = GeneratePath(self.llm, self.heard.events, MediaReader(self.llm, 1000))

    async def submit(self, key: str, **sampling: Any) -> asyncio.Queue[Any]:
        self.path.submit(key, Job(PROMPT, sampling))
        await settle()
        return self.llm.queues[-1]


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    await made.path.start()
    yield made
    await made.path.close()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def result(ids: list[int], finish: str | None = None, **fields: Any) -> Any:
    choice = SimpleNamespace(
        token_ids=ids, finish_reason=finish, stop_reason=None, logprobs=fields.pop("logprobs", None)
    )
    return SimpleNamespace(outputs=[choice], num_cached_tokens=0, metrics=None, **fields)


async def test_results_of_one_loop_turn_are_one_step(setup: Setup) -> None:
    calls: list[list[Any]] = []
    setup.path.events.step = lambda outputs: calls.append([(each.key, each.ids) for each in outputs])
    first, second = await setup.submit("a"), await setup.submit("b")
    first.put_nowait(result([7]))
    second.put_nowait(result([8], "length"))
    await settle()
    assert calls == [[("a", [7]), ("b", [8])]]


async def test_abort_ends_the_generator_before_closed(setup: Setup) -> None:
    queue = await setup.submit("a")
    queue.put_nowait(result([7]))
    await settle()
    setup.path.abort(["a"])
    queue.put_nowait(result([8]))
    await settle()
    assert setup.llm.num_cancelled == 1
    assert setup.heard.log == [("output", "a", None), ("closed", "a")]


@pytest.mark.parametrize("is_lost_again", [False, True])
async def test_job_with_media_is_sent_once_more_when_the_engine_has_lost_them(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, is_lost_again: bool
) -> None:
    prepared: list[Job] = []

    async def prompt(job: Job) -> Any:
        prepared.append(job)
        return {"prompt_token_ids": [1, 2, 2, 2, 3]}

    monkeypatch.setattr(setup.path._media, "prompt", prompt)
    job = Job(PROMPT, {}, media=(Medium("image", b"png", "png", ""),))
    setup.path.submit("a", job)
    await settle()
    for _ in range(1 + is_lost_again):
        setup.llm.queues[-1].put_nowait(result([], "error", prompt_token_ids=[1, 2, 2, 2, 3]))
        setup.llm.queues[-1].put_nowait(None)
        await settle()
    assert prepared == [job, job]
    if is_lost_again:
        assert setup.heard.log == [("output", "a", "error")]
        return
    setup.llm.queues[-1].put_nowait(result([7], "length", prompt_token_ids=[1, 2, 2, 2, 3]))
    await settle()
    (only,) = setup.heard.outputs["a"]
    assert (only.ids, only.finish, only.extra and only.extra.prompt_tokens) == ([7], "length", 5)


async def test_logprobs_have_the_sampled_token_first_then_the_best(setup: Setup) -> None:
    def entry(logprob: float, rank: int) -> Any:
        return SimpleNamespace(logprob=logprob, rank=rank)

    queue = await setup.submit("a", logprobs=2)
    rare = {9: entry(-5.0, 40), 4: entry(-0.5, 1), 3: entry(-1.0, 2)}
    best = {4: entry(-0.25, 1), 3: entry(-2.0, 2)}
    queue.put_nowait(result([9, 4], "length", logprobs=[rare, best]))
    await settle()
    extra = setup.heard.outputs["a"][0].extra
    assert extra is not None
    assert extra.logprobs == [
        ([9, 4, 3], [-5.0, -0.5, -1.0], 40),
        ([4, 4, 3], [-0.25, -0.25, -2.0], 1),
    ]


async def test_dead_engine_is_reported(setup: Setup) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    queue = await setup.submit("a")
    queue.put_nowait(EngineDeadError())
    await settle()
    assert [what[0] for what in setup.heard.log] == ["died"]


@pytest.mark.parametrize("kind", ["rejected", "engine"])
async def test_fault_of_one_request_fails_only_it(setup: Setup, kind: str) -> None:
    from vllm.v1.engine.exceptions import EngineGenerateError

    error: Exception = ValueError("top_p is odd")
    if kind == "engine":
        error = EngineGenerateError()
        error.__cause__ = RuntimeError("top_p is odd")
    bad, good = await setup.submit("bad"), await setup.submit("good")
    bad.put_nowait(error)
    good.put_nowait(result([7], "stop"))
    await settle()
    assert setup.heard.last("bad") == ("failed", "bad", kind, "top_p is odd")
    assert setup.heard.ids("good") == [7]


async def test_bad_sampling_is_rejected_before_the_engine(setup: Setup) -> None:
    setup.path.submit("bad", Job(PROMPT, {"nonsense": 1}))
    await settle()
    failed = setup.heard.last("bad")
    assert failed is not None
    assert failed[2:] == ("rejected", "nonsense: this engine has no such sampling parameter")
    assert setup.llm.queues == []


async def test_reasoning_goes_with_a_grammar(setup: Setup) -> None:
    grammar = {"structured_outputs": {"json_object": True}}
    setup.path.submit("a", Job(PROMPT, grammar, reasoning_ended=False))
    await until(lambda: setup.llm.reasoning)  # a grammar is prepared in a thread
    setup.path.submit("b", Job(PROMPT, {}, reasoning_ended=False))
    await settle()
    assert setup.llm.reasoning == [(False, None), (None, None)]


async def test_version_that_knows_no_reasoning_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from backend.vllm_generate import GeneratePath

    given: list[dict[str, Any]] = []

    async def generate(prompt: Any, params: Any, request_id: str, *, priority: int) -> AsyncIterator[Any]:
        given.append({"priority": priority})
        return
        yield

    llm = Llm()
    monkeypatch.setattr(llm, "generate", generate)
    path = GeneratePath(llm, Heard().events, MediaReader(llm, 1000))
    path.submit("a", Job(PROMPT, {"structured_outputs": {"json_object": True}}, reasoning_ended=False))
    await until(lambda: given)
    assert given == [{"priority": 0}]
    await path.close()
