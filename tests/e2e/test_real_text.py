"""The text that leaves is the text of the ids that the engine made: streamed, whole, and on both routes.

The reference is the whole decode, `Tokenizer.decode(ids)`. vLLM's own incremental detokenizer gives the same
text but for one case: where an answer is cut in mid-character it drops the incomplete character, and the
whole decode, as we do, shows U+FFFD for it.

Every answer is compared with its own ids. Ids of two runs are compared only where the engine repeats itself:
alone on an idle engine, with the same part of the prompt out of the prefix cache. A prompt that was computed
and one that came out of the cache differ in batch shapes, and with them in the last bits of the logits.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.e2e import prompts
from tests.e2e.recording import Answer, RecordingGateway, Run, recording_gateway
from tests.stack import Worker

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

MODEL = "smollm2-135m-instruct"
CHAT = "/v1/chat/completions"
SHORT = (*prompts.ENGLISH, *prompts.CHINESE, *prompts.CODE, *prompts.EMOJI)
MIXED = ("a😀龘é", pytest.param("a😀龘é🇫🇷", marks=pytest.mark.long))  # tokens of 1 to 3 bytes, cut everywhere


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    engine_worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RecordingGateway]:
    async with recording_gateway(engine_worker, tmp_path_factory.mktemp("cache")) as started:
        yield started


@pytest.fixture(scope="module")
def tokenizer(embedded_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(embedded_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def vllm_text(embedded_model: Path) -> Callable[[Run], str]:
    """What vLLM's own server would have shown for these ids, fed one at a time."""
    with warnings.catch_warnings(action="ignore"):  # torch's own, at import
        from transformers import PreTrainedTokenizerFast
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer

    tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded_model)

    def text(run: Run) -> str:
        request: Any = SimpleNamespace(
            sampling_params=SamplingParams(), prompt_token_ids=run.prompt_ids, request_id="r"
        )
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        assert isinstance(detokenizer, FastIncrementalDetokenizer)
        for position, token_id in enumerate(run.ids):
            is_stop = run.finish == "stop" and position == len(run.ids) - 1
            detokenizer.update([token_id], is_stop)
        shown: str = detokenizer.get_next_output_text(finished=True, delta=False)
        return shown

    return text


def body(content: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": max_tokens, **fields}


def assert_exact(answer: Answer, tokenizer: Tokenizer, vllm_text: Callable[[Run], str]) -> None:
    """The text is the whole decode of its ids, to the byte, and vLLM's but for a cut character."""
    ids = answer.run.shown_ids
    assert answer.text.encode() == tokenizer.decode(ids, skip_special_tokens=True).encode()
    reference = vllm_text(answer.run)
    assert answer.text.startswith(reference)
    assert set(answer.text[len(reference) :]) <= {"\ufffd"}
    assert answer.text == reference or answer.finish == "length"
    assert answer.usage["completion_tokens"] == len(answer.run.ids)
    assert answer.usage["prompt_tokens"] == len(answer.run.prompt_ids)


def assert_repeated(answers: list[Answer]) -> None:
    """Runs that computed the same part of one prompt made the same ids, and so the same text and finish."""
    groups: dict[int, set[tuple[Any, ...]]] = {}
    for answer in answers:
        num_cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        groups.setdefault(num_cached, set()).add((*answer.run.ids, answer.text, answer.finish))
    assert len(groups) < len(answers), "no two runs are alike"
    assert all(len(group) == 1 for group in groups.values()), groups


async def ask_three_ways(
    gateway: RecordingGateway, tokenizer: Tokenizer, content: str, max_tokens: int
) -> list[Answer]:
    """Streamed, whole, and as a raw completion of the rendered prompt, which comes to the same prompt ids."""
    request = body(content, max_tokens)
    streamed = await gateway.ask(CHAT, request, stream=True)
    whole = await gateway.ask(CHAT, request, stream=False)
    rendered = tokenizer.decode(streamed.run.prompt_ids, skip_special_tokens=False)
    raw = {"model": MODEL, "prompt": rendered, "add_special_tokens": False}
    options = {"temperature": 0, "max_tokens": max_tokens}
    completed = await gateway.ask("/v1/completions", raw | options, stream=max_tokens % 2 == 0)
    answers = [streamed, whole, completed]
    assert all(answer.run.prompt_ids == streamed.run.prompt_ids for answer in answers)
    return answers


@pytest.mark.parametrize(
    "index",
    [pytest.param(index, marks=pytest.mark.long) if index % 3 else index for index in range(len(SHORT))],
    ids=lambda index: SHORT[index][:20],
)
async def test_short_prompts_give_the_text_of_their_ids(
    gateway: RecordingGateway, tokenizer: Tokenizer, vllm_text: Callable[[Run], str], index: int
) -> None:
    answers = await ask_three_ways(gateway, tokenizer, SHORT[index], max_tokens=10 + index % 7)
    for answer in answers:
        assert answer.run.ids, "nothing was generated"
        assert_exact(answer, tokenizer, vllm_text)
    assert len(answers[0].pieces) > 1, "a stream in one piece"
    assert_repeated(answers)


@pytest.mark.parametrize("num_tokens", [prompts.LONG_TOKENS, pytest.param(3000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", prompts.KINDS)
async def test_long_prompts_give_the_text_of_their_ids(
    gateway: RecordingGateway,
    tokenizer: Tokenizer,
    vllm_text: Callable[[Run], str],
    kind: str,
    num_tokens: int,
) -> None:
    text = prompts.long_text(kind, tokenizer, num_tokens, num_tokens) + "\nWrite more of this."
    computed, *cached = await ask_three_ways(gateway, tokenizer, text, max_tokens=13)
    for answer in (computed, *cached):
        assert len(answer.run.prompt_ids) >= num_tokens
        assert_exact(answer, tokenizer, vllm_text)
    assert computed.usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert all(answer.usage["prompt_tokens_details"]["cached_tokens"] > 0 for answer in cached)
    assert_repeated([computed, *cached])


@pytest.mark.parametrize("said", MIXED)
async def test_cuts_in_mid_character_end_as_the_whole_decode_does(
    gateway: RecordingGateway, tokenizer: Tokenizer, vllm_text: Callable[[Run], str], said: str
) -> None:
    """The engine is made to say a text, and is cut after each of its tokens."""
    num_cut = 0
    for max_tokens in range(1, len(tokenizer.encode(said, add_special_tokens=False).ids) + 2):
        request = body("Say it.", max_tokens, structured_outputs={"choice": [said]})
        answer = await gateway.ask(CHAT, request, stream=max_tokens % 2 == 0)
        assert_exact(answer, tokenizer, vllm_text)
        num_cut += answer.text.endswith("\ufffd")
        assert said.startswith(answer.text.rstrip("\ufffd"))
        assert not any("\ufffd" in piece for piece in answer.pieces[:-1])
    assert num_cut > 3
    assert answer.text == said
