"""The reference is decoding everything at once: same text for every sequence of ids and every split of it."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from pipeline.detokenizer import Vocabulary, open_detokenizer
from tests.pipeline import small_tokenizers
from tests.pipeline.splits import random_split, splits

NAMES = sorted(small_tokenizers.all_tokenizers())


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, Vocabulary]:
    return {name: Vocabulary(tokenizer) for name, tokenizer in small_tokenizers.all_tokenizers().items()}


def stream(vocabulary: Vocabulary, pieces: list[list[int]], skip: bool) -> str:
    detokenizer = open_detokenizer(vocabulary, skip)
    return "".join([*map(detokenizer.feed, pieces), detokenizer.flush()])


def random_ids(vocabulary: Vocabulary, rng: random.Random) -> list[int]:
    """Any ids, parts of characters, added tokens and ids beyond the vocabulary, in changing proportions."""
    tokenizer = vocabulary.tokenizer
    pools = [
        list(vocabulary.tokens),
        list(vocabulary.partial_ids or vocabulary.fragments) or [0],
        list(tokenizer.get_added_tokens_decoder()) or [0],
        tokenizer.encode(small_tokenizers.text(rng), add_special_tokens=False).ids,
        [len(vocabulary), len(vocabulary) + 17, 2**31 - 1],
    ]
    weights = [rng.random() ** 3 for _ in pools]
    chosen = rng.choices(pools, weights, k=rng.randint(0, 24))
    return [rng.choice(pool) for pool in chosen if pool]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_stream_equals_whole_decode_for_random_ids(vocabularies: dict, name: str, skip: bool) -> None:
    check_random_ids(vocabularies[name], random.Random(f"{name}{skip}"), skip, num_cases=40)


@pytest.mark.long
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_stream_equals_whole_decode_for_many_random_ids(vocabularies: dict, name: str, skip: bool) -> None:
    check_random_ids(vocabularies[name], random.Random(f"long{name}{skip}"), skip, num_cases=4000)


def check_random_ids(vocabulary: Vocabulary, rng: random.Random, skip: bool, num_cases: int) -> None:
    for _ in range(num_cases):
        ids = random_ids(vocabulary, rng)
        whole = vocabulary.tokenizer.decode(ids, skip_special_tokens=skip)
        for pieces in splits(ids, rng):
            assert stream(vocabulary, pieces, skip) == whole, (ids, pieces)


@pytest.mark.parametrize("name", NAMES)
def test_every_token_alone_and_after_another_equals_whole_decode(vocabularies: dict, name: str) -> None:
    vocabulary = vocabularies[name]
    decode = vocabulary.tokenizer.decode
    some = next(iter(vocabulary.tokens))
    for token_id in vocabulary.tokens:
        for skip in (True, False):
            assert stream(vocabulary, [[token_id]], skip) == decode([token_id], skip_special_tokens=skip)
            pair = [some, token_id]
            assert stream(vocabulary, [pair[:1], pair[1:]], skip) == decode(pair, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_encoded_text_comes_back(vocabularies: dict, name: str) -> None:
    rng = random.Random(name)
    vocabulary = vocabularies[name]
    for _ in range(30):
        text = small_tokenizers.text(rng)
        ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        assert stream(vocabulary, random_split(ids, rng), skip=True) == text


def ids_of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Byte-level ids, one a byte."""
    spelled = {Vocabulary(tokenizer).token_bytes(token_id): token_id for token_id in range(3, 259)}
    return [spelled[bytes([byte])] for byte in data]


def test_incomplete_character_is_held_and_then_replaced(vocabularies: dict) -> None:
    vocabulary = vocabularies["byte level"]
    first, second, third = ids_of_bytes(vocabulary.tokenizer, "敏".encode())
    detokenizer = open_detokenizer(vocabulary)
    assert [detokenizer.feed([first]), detokenizer.feed([second])] == ["", ""]
    assert detokenizer.is_mid_character
    assert detokenizer.feed([third]) == "敏"
    assert not detokenizer.is_mid_character
    assert detokenizer.feed([first]) == ""
    assert detokenizer.flush() == "�"


def test_byte_fallback_run_is_held_until_it_ends(vocabularies: dict) -> None:
    vocabulary = vocabularies["byte fallback"]
    token_ids = vocabulary.tokenizer.get_vocab()
    run = [token_ids[f"<0x{byte:02X}>"] for byte in "敏".encode()]
    detokenizer = open_detokenizer(vocabulary)
    assert [detokenizer.feed([token_id]) for token_id in run] == ["", "", ""]
    assert detokenizer.is_mid_character
    assert detokenizer.feed([token_ids["e"]]) == "敏e"
    assert not detokenizer.is_mid_character
    detokenizer.feed([*run, token_ids["<0xFF>"]])
    assert detokenizer.flush() == "����"


def test_text_leaves_with_the_token_that_completes_it(vocabularies: dict) -> None:
    vocabulary = vocabularies["byte level"]
    detokenizer = open_detokenizer(vocabulary)
    shown = ""
    ids = vocabulary.tokenizer.encode("the product 你好 👋 ships", add_special_tokens=False).ids
    for num_ids, token_id in enumerate(ids, 1):
        shown += detokenizer.feed([token_id])
        assert shown == vocabulary.tokenizer.decode(ids[:num_ids]).rstrip("�")


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_stream_refuses_more_after_its_end(vocabularies: dict, name: str) -> None:
    detokenizer = open_detokenizer(vocabularies[name])
    detokenizer.feed([5])
    detokenizer.flush()
    with pytest.raises(RuntimeError, match="flushed"):
        detokenizer.feed([5])
    with pytest.raises(RuntimeError, match="flushed"):
        detokenizer.flush()
    assert not detokenizer.is_mid_character


def test_window_stays_short_for_tokens_without_text(vocabularies: dict) -> None:
    vocabulary = vocabularies["strip"]
    space = vocabulary.tokenizer.token_to_id(" ")
    detokenizer = open_detokenizer(vocabulary)
    shown = "".join(detokenizer.feed([space]) for _ in range(200))
    assert shown + detokenizer.flush() == vocabulary.tokenizer.decode([space] * 200)
    assert len(detokenizer._window or ()) < 10
