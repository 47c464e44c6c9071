from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from gateway.bench.prompts import Measure, Texts, measured, words_of_one_token
from gateway.bench.word_list import WORDS
from tests.tokenizers import tokenizer_folder


def test_the_words_are_different_and_short() -> None:
    assert len(set(WORDS)) == len(WORDS) > 200
    assert all(word.isascii() and word.islower() and len(word) < 10 for word in WORDS)


@pytest.mark.parametrize("num_words", [1, 2, 12, 13, 500, 40_000])
def test_a_text_has_so_many_words_of_ours(num_words: int) -> None:
    text = Texts(seed=1).draw(Random(2), num_words)
    assert len(text.split(" ")) == num_words
    assert set(text.split()) <= set(WORDS)


def test_texts_depend_on_the_seed_and_share_no_beginning() -> None:
    texts, random = Texts(seed=1), Random(1)
    drawn = [texts.draw(random, 60) for _ in range(500)]
    again = Random(1)
    assert [Texts(seed=1).draw(again, 60) for _ in range(3)] == drawn[:3]
    assert len({" ".join(text.split()[:8]) for text in drawn}) == 500
    assert len({" ".join(text.split()[-20:]) for text in drawn}) > 450


def test_a_salt_gives_other_beginnings_and_draws_as_much_of_the_source() -> None:
    for num_words in (3, 60):
        plain, salted = Random(1), Random(1)
        texts = [Texts(1).draw(plain, num_words), Texts(1, salt="s").draw(salted, num_words)]
        assert len({text.split()[0] for text in texts}) == 2
        assert len({len(text.split()) for text in texts}) == 1
        assert plain.getstate() == salted.getstate()
        assert Texts(1, salt="s").draw(Random(1), num_words) == texts[1]


def test_how_much_is_drawn_of_the_source_does_not_depend_on_the_length() -> None:
    short, long = Random(1), Random(1)
    Texts(1).draw(short, 1)
    Texts(1).draw(long, 70_000)
    assert short.getstate() == long.getstate()


def test_two_counts_give_the_tokens_of_a_word_and_those_of_the_template() -> None:
    measure = measured((16, 30), (144, 190))
    assert (measure.tokens_per_word, measure.overhead, measure.source) == (1.25, 10.0, "measured")
    assert measure.num_words(1250) == 1000
    assert measure.num_words(-5) == 1


def test_counts_that_do_not_grow_measure_nothing() -> None:
    assert measured((16, 30), (144, 30)) == Measure()


@pytest.mark.long  # the command's own test sees that one of them is exact
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3", "deepseek_v3", "gptoss"])
def test_words_of_one_token_give_texts_of_exactly_so_many_tokens(name: str) -> None:
    folder = tokenizer_folder(name)
    words = words_of_one_token(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts, random = Texts(seed=3, words=words), Random(4)
    assert len(words) > 200
    for num_words in (1, 7, 100, 3000):
        text = texts.draw(random, num_words)
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == num_words


def test_a_tokenizer_that_knows_few_of_the_words_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"the": 0, "of": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    # An unknown word is one token as well, but all of them are the same one.
    with pytest.raises(
        ValueError, match=f"{tmp_path} has a token of its own for 3 of our words; at least 40"
    ):
        words_of_one_token(tmp_path)


def test_a_file_that_is_no_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer that can be read"):
        words_of_one_token(tmp_path)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x\.json is no tokenizer that can be read"):
        words_of_one_token(tmp_path / "x.json")
