"""Ids as packed int32."""

from __future__ import annotations

import random
import struct

import pytest

from pipeline.encoding import Encoder, pack_ids
from tests.pipeline import small_tokenizers


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_ids_are_the_tokenizers(name: str, add_special_tokens: bool) -> None:
    tokenizer = small_tokenizers.all_tokenizers()[name]
    encoder = Encoder(tokenizer)
    rng = random.Random(name)
    texts = [small_tokenizers.text(rng) for _ in range(40)]
    texts += ["", " ", "<|im_start|>user\n<think></s>", "x" * 5000]
    packed = encoder.encode_batch(texts, add_special_tokens)
    for text, ids in zip(texts, packed, strict=True):
        reference = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        assert ids == struct.pack(f"<{len(reference)}i", *reference)
        assert encoder.encode(text, add_special_tokens) == ids


def test_empty_batch_is_empty() -> None:
    assert Encoder(small_tokenizers.byte_level()).encode_batch([], add_special_tokens=True) == []


def test_pack_ids_is_little_endian_and_refuses_more_than_32_bits() -> None:
    assert pack_ids([1, 258]) == b"\1\0\0\0\2\1\0\0"
    with pytest.raises(OverflowError):
        pack_ids([2**31])
