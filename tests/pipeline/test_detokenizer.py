"""The reference is decoding everything at once: same text for every sequence of ids and every split of it."""

from __future__ import annotations

import contextlib
import random
from array import array
from functools import cache
from itertools import product, takewhile

import pytest
from tokenizers import Tokenizer

from pipeline.decoder_kind import DecoderKind
from pipeline.detokenizer import Detokenizer, Piece, Vocabulary, open_detokenizer
from tests.pipeline import small_decoders, small_tokenizers
from tests.pipeline.splits import random_split, splits

TRAINED = tuple(small_tokenizers.all_tokenizers())
NAMES = (*TRAINED, *small_decoders.CHAINS)
every_tokenizer = pytest.mark.parametrize("name", NAMES)
with_and_without_special = pytest.mark.parametrize("skip", [True, False], ids=["skip", "keep"])


@cache
def vocabulary(name: str) -> Vocabulary:
    if name in TRAINED:
        return Vocabulary(small_tokenizers.all_tokenizers()[name])
    tokenizer = small_decoders.tokenizer(name)
    return Vocabulary(tokenizer, [tokenizer.token_to_id("<think>")])


def stream(detokenizer: Detokenizer, chunks: list[list[int]]) -> str:
    return "".join([*map(detokenizer.feed, chunks), detokenizer.flush()])


def stream_of_pieces(detokenizer: Detokenizer, chunks: list[list[int]]) -> list[Piece]:
    return [piece for chunk in chunks for piece in detokenizer.pieces(chunk)] + detokenizer.flush_pieces()


def common_beginning(texts: list[str]) -> str:
    """What all of them begin with."""
    same = takewhile(lambda chars: len(set(chars)) == 1, zip(*texts, strict=False))
    return "".join(chars[0] for chars in same)


def random_ids(vocabulary: Vocabulary, rng: random.Random, max_ids: int = 24) -> list[int]:
    """Any ids, parts of characters, added tokens and ids beyond the vocabulary, in changing proportions."""
    tokenizer = vocabulary.tokenizer
    pools = [
        list(vocabulary.tokens),
        list(vocabulary.partial_ids or vocabulary.fragments) or [0],
        list(tokenizer.get_added_tokens_decoder()) or [0],
        tokenizer.encode(small_tokenizers.text(rng), add_special_tokens=False).ids,
        [len(vocabulary), len(vocabulary) + 17, 2**31 - 1],
        rng.choices(list(vocabulary.tokens), k=3),
    ]
    weights = [rng.random() ** 3 for _ in pools]
    chosen = rng.choices(pools, weights, k=rng.randint(0, max_ids))
    return [rng.choice(pool) for pool in chosen if pool]


# -- the same text as the whole decode ---------------------------------------------------------------------


@with_and_without_special
@every_tokenizer
def test_stream_equals_whole_decode_for_random_ids(name: str, skip: bool) -> None:
    check_random_ids(vocabulary(name), random.Random(f"{name}{skip}"), skip, num_cases=20)


@pytest.mark.long
@with_and_without_special
@every_tokenizer
def test_stream_equals_whole_decode_for_many_random_ids(name: str, skip: bool) -> None:
    check_random_ids(vocabulary(name), random.Random(f"long{name}{skip}"), skip, num_cases=400)


def check_random_ids(vocabulary: Vocabulary, rng: random.Random, skip: bool, num_cases: int) -> None:
    for _ in range(num_cases):
        ids = random_ids(vocabulary, rng)
        whole = vocabulary.tokenizer.decode(ids, skip_special_tokens=skip)
        pieces = stream_of_pieces(open_detokenizer(vocabulary, skip), [ids])
        check_pieces(pieces, ids, whole, vocabulary)
        for chunks in splits(ids, rng):
            assert stream(open_detokenizer(vocabulary, skip), chunks) == whole, (ids, chunks)
            assert stream_of_pieces(open_detokenizer(vocabulary, skip), chunks) == pieces, (ids, chunks)
            check_mixed(open_detokenizer(vocabulary, skip), open_detokenizer(vocabulary, skip), chunks, rng)


def check_pieces(pieces: list[Piece], ids: list[int], whole: str, vocabulary: Vocabulary) -> None:
    assert "".join(piece.text for piece in pieces) == whole, ids
    assert [token_id for piece in pieces for token_id in piece.ids] == ids
    for piece in pieces if vocabulary.kind is not DecoderKind.WHOLE else ():
        assert piece.control == (vocabulary.controls.get(piece.ids[0], "") if len(piece.ids) == 1 else "")


def check_mixed(
    detokenizer: Detokenizer, other: Detokenizer, chunks: list[list[int]], rng: random.Random
) -> None:
    """`feed` and `pieces` in turns give what `pieces` gives: ids that `feed` took and holds are not lost."""
    for chunk in chunks:
        pieces = other.pieces(chunk)
        if rng.random() < 0.5:
            assert detokenizer.feed(chunk) == "".join(piece.text for piece in pieces)
        else:
            assert detokenizer.pieces(chunk) == pieces
    assert detokenizer.flush_pieces() == other.flush_pieces()


@every_tokenizer
def test_every_token_alone_and_after_another_equals_whole_decode(name: str) -> None:
    decode = vocabulary(name).tokenizer.decode
    some = next(iter(vocabulary(name).tokens))
    for token_id in vocabulary(name).tokens:
        for skip in (True, False):
            for ids in ([token_id], [some, token_id], [token_id, token_id]):
                chunks = [[each] for each in ids]
                assert stream(open_detokenizer(vocabulary(name), skip), chunks) == decode(
                    ids, skip_special_tokens=skip
                )


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_encoded_text_comes_back(name: str) -> None:
    rng = random.Random(name)
    for _ in range(30):
        text = small_tokenizers.text(rng)
        ids = vocabulary(name).tokenizer.encode(text, add_special_tokens=False).ids
        assert stream(open_detokenizer(vocabulary(name)), random_split(ids, rng)) == text


# WordPiece puts a space before a run of bytes, which is certain before the run is: that space waits with it.
@pytest.mark.parametrize(
    "name", sorted(set(small_decoders.CHAINS) - {*small_decoders.WHOLE, "word pieces with bytes"})
)
def test_text_leaves_as_soon_as_no_later_token_can_change_it(name: str) -> None:
    """All that the whole decodes have in common, over every next token: no more, and no less."""
    words, rng = vocabulary(name), random.Random(name)
    decode = words.decode
    tokens = ("æ", "ķ", "ı") if words.is_byte_level else ("<0x9F>", "<0x95>", "<0x8F>")
    parts = [words.tokenizer.token_to_id(token) for token in tokens]  # which can end any character
    following = [
        *([token_id] for token_id in words.tokens),
        *product(parts, parts),
        *product(parts, parts, parts),
    ]
    for _ in range(20):
        ids = [token_id for token_id in random_ids(words, rng, 6) if token_id in words.tokens]
        detokenizer = open_detokenizer(words, skip_special_tokens=False)
        shown = "".join(map(detokenizer.feed, [[token_id] for token_id in ids]))
        certain = common_beginning([decode(ids), *(decode([*ids, *more]) for more in following)])
        assert shown == certain, ids
        assert detokenizer.is_mid_character == (shown != decode(ids))


@with_and_without_special
@every_tokenizer
def test_texts_now_are_what_feed_gives(name: str, skip: bool) -> None:
    words, rng = vocabulary(name), random.Random(f"now{name}{skip}")
    num_known = 0
    for _ in range(20):
        detokenizer = open_detokenizer(words, skip)
        for token_id in random_ids(words, rng, 40):
            now = detokenizer.texts_now
            known = None
            if now is not None:
                with contextlib.suppress(IndexError):
                    known = now[token_id]
            shown = detokenizer.feed([token_id])
            assert known in (None, shown)
            num_known += bool(known)
        detokenizer.flush()
        assert detokenizer.texts_now is None
    assert num_known > 20 or words.kind in (DecoderKind.WHOLE, DecoderKind.REPEATS, DecoderKind.SUFFIX)


def test_decoder_that_looks_at_the_whole_text_gives_it_at_the_end() -> None:
    for name in small_decoders.WHOLE:
        detokenizer = open_detokenizer(vocabulary(name))
        assert detokenizer.feed([7, 8]) == ""
        assert detokenizer.is_mid_character
        assert detokenizer.flush() == vocabulary(name).decode([7, 8])


def test_run_of_bytes_that_is_stripped_at_the_beginning_does_not_join_the_next() -> None:
    words = vocabulary("llama 2")
    space, nothing, broken = map(words.tokenizer.token_to_id, ("<0x20>", "", "<0xFF>"))
    for ids in ([space, nothing, space, broken], [space, space, broken], [space, nothing, nothing, space]):
        assert stream(open_detokenizer(words), [[each] for each in ids]) == words.decode(ids)


# -- after a prompt ----------------------------------------------------------------------------------------


@with_and_without_special
@every_tokenizer
def test_text_after_a_prompt_is_what_its_ids_add_to_the_prompts(name: str, skip: bool) -> None:
    words, rng = vocabulary(name), random.Random(f"prompt{name}{skip}")
    parts = words.partial_ids or words.fragments.keys()
    decode = words.tokenizer.decode
    for _ in range(40):
        ids, prompt = random_ids(words, rng), random_ids(words, rng, rng.choice((2, 10, 100)))
        while prompt and prompt[-1] in parts:
            del prompt[-1]
        before = decode(prompt, skip_special_tokens=skip)
        whole = decode([*prompt, *ids], skip_special_tokens=skip)
        if not whole.startswith(before) or before.endswith("�"):
            continue  # the answer would change the prompt
        for prompt_ids in (prompt, memoryview(array("i", prompt))):
            detokenizer = open_detokenizer(words, skip, prompt_ids)
            assert stream(detokenizer, random_split(ids, rng)) == whole[len(before) :], (prompt, ids)


def test_space_after_a_prompt_stays() -> None:
    tokenizer = small_decoders.tokenizer("llama 2")
    foo, start = tokenizer.token_to_id("▁foo"), tokenizer.token_to_id("<s>")
    texts = {
        prompt: stream(open_detokenizer(vocabulary("llama 2"), True, prompt), [[foo]])
        for prompt in ((), (start,), (start, foo), (foo, start, start))
    }
    assert list(texts.values()) == ["foo", "foo", " foo", " foo"]


def test_space_that_the_prompt_has_lost_is_not_lost_again() -> None:
    """Two spaces, of which the decoder drops three: the answer's first is the third."""
    token_id = small_decoders.tokenizer("strip of three").token_to_id("▁")
    words = vocabulary("strip of three")
    assert stream(open_detokenizer(words, True, [token_id] * 2), [[token_id], [token_id]]) == " "


def test_long_prompt_without_text_costs_no_more_than_its_end() -> None:
    words = vocabulary("llama 2")
    start, foo = words.tokenizer.token_to_id("<s>"), words.tokenizer.token_to_id("▁foo")
    assert stream(open_detokenizer(words, True, [start] * 1024), [[foo]]) == "foo"
    assert stream(open_detokenizer(words, True, [start] * 1025), [[foo]]) == " foo"


# -- what a token costs ------------------------------------------------------------------------------------


class Counter:
    """Counts the ids that are decoded on behalf of a vocabulary's streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_ids = self.num_calls = 0
        decode = Vocabulary.decode

        def counted(words: Vocabulary, ids: list[int]) -> str:
            self.num_calls += 1
            self.num_ids += len(ids)
            return decode(words, ids)

        monkeypatch.setattr(Vocabulary, "decode", counted)


FLOODS = [
    ["a"],
    ["▁"],
    [" "],
    [""],
    ["", "▁"],
    ["<0xE6>"],
    ["<0x41>", ""],
    ["<0x20>"],
    ["<0x20>", ""],
    ["<s>"],
]
FLOODS += [["<0xE6>", "<s>"], ["<pad>"], ["a", ""], ["</w>"], ["a</w>b"], ["<0x20>", "<s>", ""]]


@every_tokenizer
def test_no_flood_of_tokens_is_decoded_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    words, num_rounds = vocabulary(name), 500
    counter = Counter(monkeypatch)
    for flood in FLOODS:
        ids = [words.tokenizer.token_to_id(token) for token in flood] * num_rounds
        ids = [token_id for token_id in ids if token_id is not None]
        for take in ("feed", "pieces"):
            detokenizer = open_detokenizer(words)
            counter.num_calls = counter.num_ids = 0
            for token_id in ids:
                getattr(detokenizer, take)([token_id])
            detokenizer.flush()
            assert counter.num_ids <= 3 * len(ids) + 60, (flood, take)
            if words.kind is DecoderKind.MID_TEXT and not words.partial_ids.intersection(ids):
                assert counter.num_calls <= 20, (flood, take)  # nothing is asked twice


# -- characters in parts -----------------------------------------------------------------------------------


def ids_of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Byte-level ids, one a byte."""
    spelled = {Vocabulary(tokenizer).token_bytes(token_id): token_id for token_id in range(3, 259)}
    return [spelled[bytes([byte])] for byte in data]


def test_incomplete_character_is_held_and_then_replaced() -> None:
    words = vocabulary("byte level")
    first, second, third = ids_of_bytes(words.tokenizer, "敏".encode())
    detokenizer = open_detokenizer(words)
    assert [detokenizer.feed([first]), detokenizer.feed([second])] == ["", ""]
    assert detokenizer.is_mid_character
    assert detokenizer.feed([third]) == "敏"
    assert not detokenizer.is_mid_character
    assert detokenizer.feed([first]) == ""
    assert detokenizer.flush() == "�"


def test_byte_fallback_run_is_held_until_it_ends() -> None:
    words = vocabulary("byte fallback")
    token_ids = words.tokenizer.get_vocab()
    run = [token_ids[f"<0x{byte:02X}>"] for byte in "敏".encode()]
    detokenizer = open_detokenizer(words)
    assert [detokenizer.feed([token_id]) for token_id in run] == ["", "", ""]
    assert detokenizer.is_mid_character
    assert detokenizer.feed([token_ids["e"]]) == "敏e"
    assert not detokenizer.is_mid_character
    assert detokenizer.feed([*run, *run, run[0]]) == ""
    assert detokenizer.flush() == "�" * 7


def test_byte_fallback_run_that_is_broken_waits_no_longer() -> None:
    words = vocabulary("byte fallback")
    token_ids = words.tokenizer.get_vocab()
    run, broken = [token_ids[f"<0x{byte:02X}>"] for byte in "敏".encode()], token_ids["<0xFF>"]
    detokenizer = open_detokenizer(words)
    assert [detokenizer.feed([token_id]) for token_id in [*run, broken, run[0]]] == ["", "", "", "����", "�"]
    assert not detokenizer.is_mid_character
    assert detokenizer.pieces([run[1], token_ids["e"], *run]) == [
        Piece("�", (run[1],)),
        Piece("e", (token_ids["e"],)),
    ]
    assert detokenizer.flush() == "敏"


# -- pieces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_control_token_is_a_piece_of_its_own(name: str) -> None:
    tokenizer = vocabulary(name).tokenizer
    special = tokenizer.token_to_id("<|im_end|>") or tokenizer.token_to_id("</s>")
    string = vocabulary(name).tokens[special]
    first, *rest = bytes_of_a_character(name)
    e = tokenizer.token_to_id("e")
    kept = open_detokenizer(vocabulary(name), skip_special_tokens=False)
    assert kept.pieces([e, special, first]) == [Piece("e", (e,)), Piece(string, (special,), string)]
    assert kept.pieces([special]) == [Piece("�", (first,)), Piece(string, (special,), string)]
    skipped = open_detokenizer(vocabulary(name))
    assert skipped.pieces([special, first]) == [Piece("", (special,), string)]
    assert skipped.pieces([special]) == []
    assert skipped.pieces([*rest, special, e])[:1] == [Piece("敏", (first, special, *rest))]


def test_character_that_another_breaks_off_is_a_piece_of_its_own() -> None:
    first, second, third = bytes_of_a_character("byte level")
    detokenizer = open_detokenizer(vocabulary("byte level"))
    assert detokenizer.pieces([first, first, second]) == [Piece("�", (first,))]
    assert detokenizer.pieces([third, second]) == [Piece("敏", (first, second, third)), Piece("�", (second,))]


def bytes_of_a_character(name: str) -> list[int]:
    tokenizer = vocabulary(name).tokenizer
    if name == "byte level":
        return ids_of_bytes(tokenizer, "敏".encode())
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "敏".encode()]


def test_control_token_after_an_incomplete_character_is_not_lost() -> None:
    for name, special in (("byte level", "<|im_end|>"), ("byte fallback", "</s>")):
        special_id = vocabulary(name).tokenizer.token_to_id(special)
        first = bytes_of_a_character(name)[0]
        detokenizer = open_detokenizer(vocabulary(name))
        assert detokenizer.pieces([first, special_id]) == []
        assert detokenizer.flush_pieces() == [Piece("�", (first,)), Piece("", (special_id,), special)]


def test_control_token_that_is_not_special_is_marked_if_it_is_named() -> None:
    tokenizer = small_tokenizers.byte_level()
    think = tokenizer.token_to_id("<think>")
    for control_ids, control in (((think,), "<think>"), ((), "")):
        detokenizer = open_detokenizer(Vocabulary(tokenizer, control_ids))
        assert detokenizer.pieces([think]) == [Piece("<think>", (think,), control)]


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "ctc", "suffix", "pattern across tokens"])
def test_stream_refuses_more_after_its_end(name: str) -> None:
    for end in ("flush", "flush_pieces"):
        detokenizer = open_detokenizer(vocabulary(name))
        detokenizer.feed([5])
        getattr(detokenizer, end)()
        for refused in (lambda d: d.feed([5]), lambda d: d.pieces([5]), lambda d: d.flush()):
            with pytest.raises(RuntimeError, match="flushed"):
                refused(detokenizer)
        assert not detokenizer.is_mid_character
