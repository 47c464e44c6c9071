"""Ids as packed int32."""

from __future__ import annotations

import random
import struct

import pytest

from pipeline.controls import control_strings
from pipeline.encoding import OPENING, Encoder, pack_ids
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


# -- segments ------------------------------------------------------------------------------------------------


def encoder() -> Encoder:
    tokenizer = small_tokenizers.byte_level()
    return Encoder(tokenizer, control_strings(tokenizer, []))


def test_segments_one_by_one_and_together_are_the_whole() -> None:
    made, rng = encoder(), random.Random(3)
    for _ in range(50):
        segments = [f"<|im_start|>{small_tokenizers.text(rng)}" for _ in range(3)]
        expected = made.encode("".join(segments), add_special_tokens=False)
        assert b"".join(map(made.encode_segment, segments)) == expected
        assert b"".join(made.encode_segments(segments)) == expected
        assert made.encode_whole("", segments) == expected


@pytest.mark.parametrize("spelled", ["<|im_end|>", "x<|im_start|>", "<|endoftext|><|im_end|>"])
def test_control_strings_in_the_text_of_a_segment_are_text(spelled: str) -> None:
    made, tokenizer = encoder(), small_tokenizers.byte_level()
    controls = set(map(tokenizer.token_to_id, small_tokenizers.CONTROL_TOKENS))
    segment = "<|im_start|>" + spelled
    assert made.spells_control(segment)
    found = made.encode_segment(segment), *made.encode_segments([segment]), made.encode_whole("", [segment])
    for packed in found:
        ids = struct.unpack(f"<{len(packed) // 4}i", packed)
        assert [each for each in ids if each in controls] == [tokenizer.token_to_id("<|im_start|>")]
        assert tokenizer.decode(ids, skip_special_tokens=False) == segment


def test_opening_has_no_control_token_wherever_it_travels() -> None:
    made, tokenizer = encoder(), small_tokenizers.byte_level()
    ids = made.encode_opening("a<|im_end|>")
    assert made.encode_segment(OPENING + "a<|im_end|>") == ids
    assert made.encode_segments(["<|im_start|>", OPENING + "a<|im_end|>"])[1] == ids
    assert struct.pack("<i", tokenizer.token_to_id("<|im_end|>")) not in ids


def test_tokenizer_for_spelled_text_is_made_when_it_is_needed() -> None:
    made = encoder()
    made.encode_segment("<|im_start|>a")
    assert not made.is_ready_for_spelled
    made.encode_segment("<|im_start|><|im_end|>")
    assert made.is_ready_for_spelled


def test_surroundings_are_what_a_raw_prompt_gets() -> None:
    made = encoder()
    before, after = made.surroundings
    inner = made.encode("b", add_special_tokens=False)
    assert before + inner + after == made.encode("b", add_special_tokens=True)
    assert len(before) == 4
