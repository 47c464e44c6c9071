"""The detokenizer on what real models say: as the whole decode has it, and as vLLM has it after a prompt."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.decoder_kind import DecoderKind
from pipeline.detokenizer import open_detokenizer
from pipeline.vocabulary import Vocabulary
from tests.components import TOKENIZERS
from tests.pipeline import recorded, small_tokenizers
from tests.pipeline.recorded import MODELS, every_split
from tests.pipeline.splits import random_split

every_model = pytest.mark.parametrize("model", MODELS)


def streamed(
    vocabulary: Vocabulary, chunks: list[list[int]], skip: bool, prompt: list[int] | None = None
) -> str:
    detokenizer = open_detokenizer(vocabulary, skip, prompt or [])
    return "".join([*map(detokenizer.feed, chunks), detokenizer.flush()])


@every_model
def test_recorded_answers_come_out_as_the_whole_decode_has_them(model: str) -> None:
    rng, words = random.Random(model), recorded.vocabulary(model)
    for _, ids in recorded.recorded(model):
        is_skipped = rng.random() < 0.5
        for skip in (True, False):
            whole = words.tokenizer.decode(ids, skip_special_tokens=skip)
            detokenizer = open_detokenizer(words, skip)
            pieces = detokenizer.pieces(ids) + detokenizer.flush_pieces()
            assert "".join(piece.text for piece in pieces) == whole
            assert [token_id for piece in pieces for token_id in piece.ids] == ids
            controls = [piece.control for piece in pieces if piece.control]
            assert controls == [words.controls[token_id] for token_id in ids if token_id in words.controls]
            for chunks in every_split(ids, rng) if skip == is_skipped else ():
                assert streamed(words, chunks, skip) == whole
                other = open_detokenizer(words, skip)
                assert [p for c in chunks for p in other.pieces(c)] + other.flush_pieces() == pieces


@every_model
def test_random_ids_come_out_as_the_whole_decode_has_them(model: str) -> None:
    rng, words = random.Random(model), recorded.vocabulary(model)
    parts = list(words.partial_ids or words.fragments)
    pools: list[Any] = [range(len(words) + 20), parts, list(words.controls)]
    for _ in range(300):
        weights = [rng.random() ** 2 for _ in pools]
        ids = [rng.choice(pool) for pool in rng.choices(pools, weights, k=rng.randint(0, 30))]
        for skip in (True, False):
            whole = words.tokenizer.decode(ids, skip_special_tokens=skip)
            assert streamed(words, random_split(ids, rng), skip) == whole, ids


@every_model
def test_no_real_tokenizer_is_decoded_otherwise_than_by_lookups(model: str) -> None:
    expected = DecoderKind.MID_TEXT if model == "gemma3" else DecoderKind.BYTE_LEVEL
    assert recorded.vocabulary(model).kind is expected


@every_model
def test_odd_tokens_have_the_same_text(model: str) -> None:
    decode = recorded.tokenizer(model).decode
    answers = {name: decode(ids, skip_special_tokens=False) for name, ids in recorded.recorded(model)}
    odd = [name for name in answers if name.endswith(" in odd tokens")]
    assert len(odd) > 15
    assert [name for name in odd if answers[name] != answers[name.removesuffix(" in odd tokens")]] == []


@every_model
def test_recorded_answers_are_of_all_kinds(model: str) -> None:
    assert all((recorded.prose(model), recorded.tool_calls(model), recorded.reasoning(model)))
    for name, ids in recorded.cut_in_mid_character(model):
        assert "�" in recorded.tokenizer(model).decode(ids), name


# -- after a prompt, as in vLLM ----------------------------------------------------------------------------


def vllm_text(wrapped: Any, prompt: list[int], ids: list[int], skip: bool) -> str:
    """What vLLM's detokenizer makes of the ids of a request with this prompt, step by step."""
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    request: Any = SimpleNamespace(
        request_id="r",
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(skip_special_tokens=skip),
    )
    detokenizer = FastIncrementalDetokenizer(wrapped, request)
    for token_id in ids:
        detokenizer.update([token_id], False)
    return detokenizer.output_text


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from importing vLLM
@pytest.mark.parametrize(
    "model",
    [
        *("embedded", "gemma3", "byte fallback", "metaspace", "word piece", "strip"),
        # To these the prompt does not matter, as to the embedded one.
        *(pytest.param(model, marks=pytest.mark.long) for model in TOKENIZERS if model != "gemma3"),
    ],
)
def test_text_after_a_prompt_is_vllms(model: str) -> None:
    """Prompts that end in special tokens, in plain ones, in the middle of a word or of white space."""
    from transformers import PreTrainedTokenizerFast

    is_real, rng = model in MODELS, random.Random(model)
    words = recorded.vocabulary(model) if is_real else Vocabulary(small_tokenizers.all_tokenizers()[model])
    encode, wrapped = words.tokenizer.encode, PreTrainedTokenizerFast(tokenizer_object=words.tokenizer)
    specials = sorted(words.special_ids)[:4]
    answers = [ids for _, ids in recorded.prose(model)[:8]] if is_real else []
    answers += [encode(small_tokenizers.text(rng), add_special_tokens=False).ids for _ in range(10)]
    for answer in answers:
        ids = answer[: rng.randint(1, 40)]
        while words.decode(ids).endswith("�"):
            del ids[-1]  # DecodeStream drops an incomplete character, and the space before it
        text = small_tokenizers.text(rng, 3)
        plain = encode(f"{text} hello", add_special_tokens=False).ids
        broken_off = encode(f"{text}hello\n ", add_special_tokens=False).ids
        for prompt in ([], specials, plain, [*plain, *specials], [specials[0], *broken_off]):
            for skip in (True, False):
                shown = streamed(words, [[each] for each in ids], skip, prompt)
                assert shown == vllm_text(wrapped, prompt, ids, skip), (prompt, ids)
