"""The text side of the embedded model: real vocabulary, real template."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pipeline.detokenizer import open_detokenizer
from pipeline.encoding import pack_ids
from pipeline.inbound import Inbound, InboundOptions
from pipeline.model_text import FILES, ModelText
from pipeline.needs import served
from pipeline.token_buffer import BufferPool
from pipeline.token_cache import TokenCache
from pipeline.tokenizing import TokenStore
from pipeline.values import ModelInfo
from tests.pipeline import small_tokenizers
from tests.pipeline.requests import chat
from tests.pipeline.splits import random_split

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def text(embedded_model: Path) -> ModelText:
    return ModelText.from_files(
        {name: (embedded_model / name).read_bytes() for name in FILES if (embedded_model / name).exists()}
    )


def test_prompt_of_a_chat_is_hugging_faces(text: ModelText, embedded_model: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(embedded_model)
    store = TokenStore(TokenCache(1 << 20), BufferPool(1 << 20))
    inbound = Inbound(text, ModelInfo("m", 8192, 16, {}, ""), InboundOptions(), store)
    rng = random.Random(1)
    for num_words in (1, 5, 50, 500):
        messages = [
            {"role": role, "content": small_tokenizers.text(rng, num_words)}
            for role in ("system", "user", "assistant", "user")[rng.randint(0, 1) :]
        ]
        ready = served(inbound.prepare(chat(messages=messages), 0.0))
        expected: Any = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert bytes(ready.prompts[0].ids) == pack_ids(expected)


@pytest.mark.parametrize("skip", [True, False])
def test_stream_of_random_ids_equals_the_whole_decode(text: ModelText, skip: bool) -> None:
    rng = random.Random(2)
    vocabulary = text.vocabulary
    pools = [range(len(vocabulary) + 20), list(vocabulary.fragments), sorted(vocabulary.special_ids)]
    for _ in range(1000):
        ids = [rng.choice(rng.choices(pools, (8, 8, 1))[0]) for _ in range(rng.randint(0, 30))]
        detokenizer = open_detokenizer(vocabulary, skip)
        pieces = [detokenizer.feed(piece) for piece in random_split(ids, rng)]
        assert "".join([*pieces, detokenizer.flush()]) == text.tokenizer.decode(ids, skip_special_tokens=skip)


def test_model_ends_with_its_end_of_turn_token(text: ModelText) -> None:
    assert text.tokenizer.token_to_id("<|im_end|>") in text.eos_ids
    assert text.eos_ids <= text.special_ids
