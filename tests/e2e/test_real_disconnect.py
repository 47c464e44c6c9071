"""A client that leaves the real engine's gateway, at each phase of its request: the engine stops.

The scripted worker has the thousand random ones (`test_disconnects.py`); here it is vLLM's own counts that
must be back at zero. No request here would end by itself: each asks for more tokens than anybody waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests import stack
from tests.e2e import prompts
from tests.e2e.asking import CHAT
from tests.e2e.resting import (
    assert_no_fault,
    at_rest,
    request_lines,
    statuses,
    wait_for,
    wait_until_held,
)
from tests.stack import Gateway, Worker
from tests.wire import Wire, connect

pytestmark = pytest.mark.engine

MODEL = "smollm2-135m-instruct"
COMPLETIONS = "/v1/completions"
ENDLESS = {"model": MODEL, "temperature": 0, "max_tokens": 4000, "ignore_eos": True}
HELD = "Ok" * 40  # what the engine is made to say to a rule that waits for one more character


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway with one rule before the real worker, and what it held before the test."""

    gateway: Gateway
    worker: Worker
    before: dict[str, float]
    num_lines: int  # in the request log

    async def wait_for_counts(self, running: int, waiting: int = 0) -> None:
        """Until vLLM says so itself."""
        kinds = {"running": running, "waiting": waiting}

        def are_true() -> bool:
            return all(self.worker.metric(f"vllm:num_requests_{kind}") == kinds[kind] for kind in kinds)

        await self.until(are_true, f"at {running} running and {waiting} waiting requests")

    async def until(self, is_true: Callable[[], bool], what: str) -> None:
        await asyncio.to_thread(wait_for, self.gateway, is_true, what)

    async def assert_all_given_back(self, num_requests: int = 1) -> list[dict[str, Any]]:
        """Engine, worker and gateway are as before; the log's lines of the requests, which all say why."""
        await self.wait_for_counts(0)
        await asyncio.to_thread(wait_until_held, self.gateway, [self.worker], self.before)
        num_lines = self.num_lines + num_requests
        await self.until(lambda: len(request_lines(self.gateway)) >= num_lines, "logging the requests")
        lines = request_lines(self.gateway)[self.num_lines :]
        assert [line["ended"] for line in lines] == ["client_closed"] * num_requests
        assert all(line["output_tokens"] < ENDLESS["max_tokens"] for line in lines)
        assert_no_fault(self.gateway)
        return lines


@pytest.fixture(scope="module")
def gateway(engine_worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One that masks a word which is never complete, and holds what could become it without limit."""
    folder = tmp_path_factory.mktemp("real_disconnect")
    rules = folder / "words.txt"
    rules.write_text(HELD + "!\n")
    flags = ("--rules", str(rules), "--max-hold-s", "600")
    with ExitStack() as started:
        yield started.enter_context(stack.start_gateway(folder, [engine_worker], *flags))


@pytest.fixture
def served(gateway: Gateway, engine_worker: Worker) -> Served:
    before = at_rest(gateway, [engine_worker])
    return Served(gateway, engine_worker, before, len(request_lines(gateway)))


@pytest.fixture(scope="module")
def long_prompt(embedded_model: Path) -> str:
    """Four steps of prefill, of most of a second each."""
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    return prompts.long_text("english", tokenizer, seed=2002, num_tokens=4 * stack.STEP_TOKENS)


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {**ENDLESS, "messages": [{"role": "user", "content": content}], **fields}


def begin(wire: Wire, path: str, body: dict[str, Any]) -> asyncio.Task[Any]:
    """Send a request; its head comes with its first token, if ever."""
    return asyncio.create_task(wire.post(path, body))


async def leave(wire: Wire, asking: asyncio.Task[Any]) -> None:
    """Close the connection in the middle."""
    asking.cancel()
    await asyncio.wait([asking])
    await wire.close()


async def test_in_the_engines_queue(served: Served) -> None:
    """As many choices run as may; behind them wait a stream and an answer that is not streamed."""
    (status,) = statuses(served.gateway)
    num_running = status["max_running"]
    crowd = {**ENDLESS, "prompt": [[7]] * num_running}
    async with (
        connect(served.gateway.port) as first,
        connect(served.gateway.port) as second,
        connect(served.gateway.port) as third,
    ):
        running = begin(first, COMPLETIONS, crowd)
        await served.wait_for_counts(num_running, 0)
        waiting = [(second, begin(second, CHAT, chat("Hello", stream=True)))]
        waiting.append((third, begin(third, COMPLETIONS, {**ENDLESS, "prompt": "Hello"})))
        await served.wait_for_counts(num_running, 2)
        for wire, asking in waiting:
            await leave(wire, asking)
        await served.wait_for_counts(num_running, 0)
        await leave(first, running)
    *queued, ran = await served.assert_all_given_back(3)
    assert [line["output_tokens"] for line in queued] == [0, 0]
    assert {line["stream"] for line in queued} == {True, False}
    assert ran["output_tokens"] > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_in_prefill(served: Served, long_prompt: str, stream: bool) -> None:
    """After the first of four steps of a long prompt, which nothing in the cache shortens."""
    async with connect(served.gateway.port) as wire:
        asking = begin(wire, CHAT, chat(long_prompt, stream=stream, cache_salt=f"prefill {stream}"))
        await served.wait_for_counts(1)
        await leave(wire, asking)
    (line,) = await served.assert_all_given_back()
    assert line["prompt_tokens"] > 4 * stack.STEP_TOKENS
    assert (line["output_tokens"], line["ttft_ms"]) == (0, None)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("by_reset", [False, True], ids=["close", "reset"])
async def test_in_decode(served: Served, path: str, by_reset: bool) -> None:
    body = chat("Hello") if path == CHAT else {**ENDLESS, "prompt": "Once upon a time"}
    async with connect(served.gateway.port) as wire:
        assert (await wire.post(path, body | {"stream": True, "n": 1})).status == 200
        for _ in range(4):
            assert await wire.frame()
        await served.wait_for_counts(running=1)
        if by_reset:
            wire.reset()
    (line,) = await served.assert_all_given_back()
    assert line["output_tokens"] >= 3


async def test_in_decode_of_several_choices(served: Served) -> None:
    async with connect(served.gateway.port) as wire:
        body = chat("Hello", stream=True, n=3, temperature=1)
        assert (await wire.post(CHAT, body)).status == 200
        await served.wait_for_counts(running=3)
    await served.assert_all_given_back()


async def test_while_an_answer_that_is_not_streamed_is_made(served: Served) -> None:
    async with connect(served.gateway.port) as wire:
        asking = begin(wire, CHAT, chat("Hello"))
        await served.wait_for_counts(running=1)
        made = served.worker.metric("vllm:generation_tokens_total")
        await served.until(
            lambda: served.worker.metric("vllm:generation_tokens_total") > made + 3, "some tokens on"
        )
        await leave(wire, asking)
    (line,) = await served.assert_all_given_back()
    assert (line["stream"], line["output_tokens"] > 0) == (False, True)


async def test_while_the_filter_holds_text(served: Served) -> None:
    """Tokens flow from the engine, and none of their text has left when the client leaves."""
    before = served.worker.metric("vllm:generation_tokens_total")
    body = chat("Say it.", stream=True, ignore_eos=False, structured_outputs={"regex": f"({HELD})+"})
    async with connect(served.gateway.port) as wire:
        assert (await wire.post(CHAT, body)).status == 200
        opening = await wire.frame()
        assert opening
        assert opening.data["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        await served.until(
            lambda: served.worker.metric("vllm:generation_tokens_total") > before + 8, "some tokens on"
        )
    (line,) = await served.assert_all_given_back()
    assert line["undecided_characters"] > 4
    assert line["output_tokens"] > 4
