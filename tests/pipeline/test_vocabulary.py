"""The tables per token."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, models

from pipeline.vocabulary import Vocabulary
from tests.pipeline import small_tokenizers


def test_byte_level_is_recognized_by_its_decoder() -> None:
    is_byte_level = {
        name: Vocabulary(tokenizer).is_byte_level
        for name, tokenizer in small_tokenizers.all_tokenizers().items()
    }
    assert [name for name, value in is_byte_level.items() if value] == [
        "byte level",
        "byte level in a sequence",
    ]


def test_bytes_of_byte_level_tokens_join_to_the_text() -> None:
    tokenizer = small_tokenizers.byte_level()
    vocabulary = Vocabulary(tokenizer)
    rng = random.Random(3)
    for _ in range(50):
        text = small_tokenizers.text(rng)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(map(vocabulary.token_bytes, ids)) == text.encode()


def test_text_of_each_byte_level_token_is_its_own_decode() -> None:
    tokenizer = small_tokenizers.byte_level()
    vocabulary = Vocabulary(tokenizer)
    for token_id in [*vocabulary.tokens, len(vocabulary)]:
        assert vocabulary.token_text(token_id) == tokenizer.decode([token_id], skip_special_tokens=False)


def test_bytes_of_byte_fallback_tokens_join_to_the_text() -> None:
    tokenizer = small_tokenizers.byte_fallback()
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode("the 敏感词 👋 price", add_special_tokens=False).ids
    assert b"".join(map(vocabulary.token_bytes, ids)) == " the 敏感词 👋 price".encode()
    assert vocabulary.token_bytes(len(vocabulary)) == b""


def test_special_ids_are_found_by_content() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    vocabulary = Vocabulary(tokenizer)
    assert {vocabulary.tokens[token_id] for token_id in vocabulary.special_ids} == {"<s>", "</s>"}


@pytest.mark.parametrize("name", ["byte level", "metaspace"])
def test_length_is_one_more_than_the_highest_id(name: str) -> None:
    tokenizer = small_tokenizers.all_tokenizers()[name]
    assert len(Vocabulary(tokenizer)) == max(tokenizer.get_vocab().values()) + 1
