from __future__ import annotations

import random
import sys

import pytest

from filters.chinese import SIMPLIFIED, TRADITIONAL
from filters.folding import fold, fold_and_tell, fold_char, fold_table, is_word_char, uneven, variants


@pytest.mark.parametrize(
    ("char", "folded"),
    [
        ("A", "a"), ("É", "é"), ("Σ", "σ"), ("ς", "σ"), ("Ж", "ж"),
        ("Ｆ", "f"), ("！", "!"), ("\u3000", " "), ("\u00a0", " "), ("ｶ", "カ"),
        ("𝐚", "a"), ("𝓐", "a"), ("ⓒ", "c"), ("Ⓒ", "c"), ("🅰", "a"),
        ("🅉", "z"), ("🅩", "z"), ("²", "2"), ("①", "1"),
        ("ß", "ss"), ("㎏", "kg"), ("ﬁ", "fi"), ("⒜", "(a)"), ("…", "..."), ("İ", "i\u0307"),
        ("\u200b", ""), ("\u200d", ""), ("\u202e", ""), ("\ufe0f", ""), ("\U000e0061", ""),
        ("\u00ad", ""), ("\u3164", ""),
        ("戰", "战"), ("開", "开"), ("髮", "发"), ("發", "发"), ("於", "于"),
        ("豈", "岂"), ("\uf900", "岂"), ("㈲", "(有)"), ("乾", "乾"), ("发", "发"),
        ("a", "a"), ("敏", "敏"), ("😀", "😀"), ("_", "_"), ("\n", "\n"), ("\ud800", "\ud800"),
    ],
)  # fmt: skip
def test_fold_char_of_each_kind(char: str, folded: str) -> None:
    assert fold_char(char) == folded
    assert fold(char) == folded


def test_fold_table_holds_every_character_that_folds() -> None:
    chars = map(chr, range(sys.maxunicode + 1))
    assert {char: folded for char in chars if (folded := fold_char(char)) != char} == fold_table()


def test_fold_char_of_folded_characters_changes_nothing() -> None:
    assert all(fold_char(char) == char for folded in fold_table().values() for char in folded)


def test_fold_is_the_same_by_every_way_through_it() -> None:
    few = "Héllo ＷＯＲＬＤ ㎏\u200b敏感 ß 戰爭"
    many = "".join(list(fold_table())[:2000])
    for text in ("", "Plain ASCII", few, many, "ａ戰", "𠮷😀𝐚"):
        folded, is_even = fold_and_tell(text)
        assert folded == fold(text) == "".join(map(fold_char, text))
        sizes = [(i, len(fold_char(char))) for i, char in enumerate(text)]
        assert list(uneven(text)) == [(i, size) for i, size in sizes if size != 1]
        assert is_even == all(size == 1 for _, size in sizes)


def test_fold_of_random_texts_equals_folding_each_character() -> None:
    rng = random.Random(1)
    folding, others = (
        list(fold_table()),
        [chr(code) for code in range(0x20, 0x3000)] + ["敏", "感", "😀", "\U00020000"],
    )
    for _ in range(300):
        text = "".join(
            rng.choice(folding if rng.random() < 0.2 else others) for _ in range(rng.randint(1, 40))
        )
        assert fold_and_tell(text)[0] == "".join(map(fold_char, text))


def test_traditional_characters_are_distinct_and_none_is_simplified() -> None:
    assert len(TRADITIONAL) == len(set(TRADITIONAL)) == len(SIMPLIFIED) > 2_900
    assert not set(TRADITIONAL) & set(SIMPLIFIED)
    assert all(fold_char(old) == fold_char(new) for old, new in zip(TRADITIONAL, SIMPLIFIED, strict=True))


def test_variants_fold_to_their_character() -> None:
    assert set(variants("a")) == {"A", "ａ", "Ａ"}
    assert variants("敏") == ()
    assert variants("é") == ("É",)
    assert set(variants("发")) == {"發", "髮"}
    for char in map(chr, range(0x21, 0x3000)):
        assert all(fold_char(form) == char for form in variants(char) if fold_char(char) == char)


@pytest.mark.parametrize(
    ("chars", "expected"), [("azé9ж", True), (" _-.'敏の한ㄱไ😀\u0301", False), ("\U00020000豈", False)]
)
def test_is_word_char_of_scripts(chars: str, expected: bool) -> None:
    assert [is_word_char(char) for char in chars] == [expected] * len(chars)
