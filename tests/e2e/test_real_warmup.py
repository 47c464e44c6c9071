"""A warm document is in the real engine's prefix cache before anybody asks about it.

How much sooner the first token comes is measured elsewhere; here it is what the engine says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e import prompts
from tests.e2e.resting import at_rest, ready, wait_for
from tests.e2e.test_real_prefix_cache import usage_of
from tests.stack import Gateway, Worker

pytestmark = pytest.mark.engine


async def test_first_use_of_a_warm_document_finds_it_in_the_cache(
    engine_worker: Worker, gateway: Callable[..., Gateway], embedded_model: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    document, stranger = (prompts.long_text("english", tokenizer, seed=seed) for seed in (2001, 2002))
    warm = {"messages": [{"role": "system", "content": document}], "cache_salts": [None, "tenant"]}
    config = tmp_path / "headrace.yaml"
    config.write_text(json.dumps({"warm": [warm]}))  # JSON is YAML
    front = gateway([engine_worker], "--config", str(config))

    def rows() -> list[dict[str, object]]:
        return ready(front)[1]["warm"][0]["prompts"]  # type: ignore[no-any-return]

    wait_for(front, lambda: [row["state"] for row in rows()] == ["warm", "warm"], "warm")
    (warmed_tokens,) = {row["warmed_tokens"] for row in rows()}
    assert isinstance(warmed_tokens, int)
    assert warmed_tokens > prompts.LONG_TOKENS - 2 * 128
    assert [row["cached_tokens"] for row in rows()] == [0, 0], "another test has sent it"

    async def cached(system: str, salt: str | None = None) -> int:
        fields = {} if salt is None else {"cache_salt": salt}
        usage = await usage_of(front, system, "What is a mill?", stream=True, **fields)
        num_cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return num_cached

    assert await cached(document) >= warmed_tokens
    assert await cached(document, "tenant") >= warmed_tokens
    assert await cached(document, "nobody") == 0
    assert await cached(stranger) == 0
    assert [(row["state"], row["num_warmups"]) for row in rows()] == [("warm", 1), ("warm", 1)]
    assert front.metric("headrace_warmups_total") == 2
    at_rest(front, [engine_worker])
