"""Which decoder chains are decoded token by token, and which only as a whole."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders

from pipeline.decoder_kind import DecoderKind, decoder_kind, has_byte_fallback
from tests.pipeline import small_decoders


@pytest.mark.parametrize("name", small_decoders.CHAINS)
def test_kind_of_each_chain(name: str) -> None:
    kinds = {"ctc": "repeats", "suffix": "suffix", "fused suffix": "suffix", "ctc without cleanup": "repeats"}
    kinds |= dict.fromkeys(("bytes", "bytes, fused twice"), "byte level")
    kinds |= dict.fromkeys(small_decoders.WHOLE, "whole")
    assert decoder_kind(small_decoders.tokenizer(name)).value == kinds.get(name, "mid-text")


def test_decoder_that_looks_from_the_end_is_whole() -> None:
    tokenizer = Tokenizer.from_str(small_decoders.tokenizer("none").to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    assert decoder_kind(tokenizer) is DecoderKind.WHOLE


def test_byte_fallback_is_found_in_inner_sequences() -> None:
    tokenizer = Tokenizer.from_str(small_decoders.tokenizer("none").to_str())
    inner = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), inner, decoders.Fuse()])
    assert has_byte_fallback(tokenizer)
    assert decoder_kind(tokenizer) is DecoderKind.MID_TEXT
    assert not has_byte_fallback(small_decoders.tokenizer("metaspace always"))
