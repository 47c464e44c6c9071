"""The prefix cache works through the gateway, and its users can see that it does.

How much sooner the first token comes is measured by `benchmarks/bench_prefix_cache.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e import prompts
from tests.e2e.asking import CHAT
from tests.e2e.resting import at_rest, statuses
from tests.stack import Gateway, Worker
from tests.wire import connect

pytestmark = pytest.mark.engine

MODEL = "smollm2-135m-instruct"
BLOCK_TOKENS = 128  # the engine's block is this or smaller: what a repeated prompt may still have to compute


@pytest.fixture
def system_prompt(embedded_model: Path) -> str:
    """Text that no other test sends, of more than one step."""
    return prompts.long_text(
        "english", Tokenizer.from_file(str(embedded_model / "tokenizer.json")), seed=1001
    )


async def usage_of(gateway: Gateway, system: str, question: str, stream: bool, **fields: Any) -> Any:
    """The usage of a chat with this system prompt."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 2, **fields}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with connect(gateway.port) as wire:
        head = await wire.post(CHAT, body)
        assert head.status == 200
        if not stream:
            return (await wire.json())["usage"]
        *_, last, done = [frame for frame in await wire.frames() if not frame.is_comment]
        assert done.is_done
        return last.data["usage"]


async def test_the_second_request_finds_the_system_prompt_in_the_cache(
    engine_worker: Worker, engine_gateway: Gateway, system_prompt: str
) -> None:
    at_rest(engine_gateway, [engine_worker])
    hits = engine_worker.metric("vllm:prefix_cache_hits_total")

    first = await usage_of(engine_gateway, system_prompt, "What is a mill?", stream=True)
    assert first["prompt_tokens"] > prompts.LONG_TOKENS
    assert first["prompt_tokens_details"]["cached_tokens"] == 0

    num_cached = []
    for stream in (True, False):
        usage = await usage_of(engine_gateway, system_prompt, "And what is a wheel?", stream)
        num_cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert usage["prompt_tokens"] - 2 * BLOCK_TOKENS < num_cached[-1] < usage["prompt_tokens"]

    # A salt of its own shares nothing with anybody.
    salted = await usage_of(
        engine_gateway, system_prompt, "And what is a wheel?", stream=False, cache_salt="tenant"
    )
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0

    at_rest(engine_gateway, [engine_worker])
    assert engine_worker.metric("vllm:prefix_cache_hits_total") == hits + sum(num_cached)
    (status,) = statuses(engine_gateway)
    assert status["prefix_hits"] == engine_worker.metric("vllm:prefix_cache_hits_total")
