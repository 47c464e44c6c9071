from __future__ import annotations

import random

import pytest

from filters.folding import fold_char
from filters.rule_folding import DEFAULT, FOLDINGS, Folding


@pytest.mark.parametrize(
    ("folding", "text", "folded"),
    [
        (DEFAULT, "傻@帽 ㎏", "傻@帽 kg"),
        (Folding(skip_symbols=True), "傻@ 帽_…\u0301😀x", "傻帽x"),
        (Folding(repeats=True), "FUUuck  ass", "fuck as"),
        (Folding(digits=True), "三壹貳٣❸①〇x", "3123310x"),
        (Folding(leet=True), "@55 Sh1t k!ll", "ass shit kiii"),
        (Folding(leet=True, digits=True), "sh一t", "shit"),
        (Folding(skip_symbols=True, repeats=True), "傻@傻帽", "傻帽"),
    ],
)
def test_fold_of_each_folding(folding: Folding, text: str, folded: str) -> None:
    assert folding.fold(text) == folded


def test_repeats_of_counts_what_stands_in_a_row() -> None:
    folding = Folding(repeats=True)
    assert folding.repeats_of("good") == (1, 2, 1)
    assert folding.repeats_of("god") == ()
    assert DEFAULT.repeats_of("good") == ()


@pytest.mark.parametrize(
    "options", [(), *((name,) for name in FOLDINGS), ("digits", "leet"), ("skip_symbols", "digits")]
)
def test_read_equals_folding_each_character(options: tuple[str, ...]) -> None:
    rng = random.Random(1)
    folding = Folding(**dict.fromkeys(options, True))
    chars = "aA@4 .,一三壹٣❸㎏…\u200b戰😀\u0301敏感𝐚l1"
    for _ in range(200):
        text = "".join(rng.choices(chars, k=rng.randint(0, 20)))
        each = [
            Folding(folding.skip_symbols, False, folding.digits, folding.leet).fold(char) for char in text
        ]
        folded, uneven = folding.read(text)
        assert folded == "".join(each)
        assert uneven == [(i, len(part)) for i, part in enumerate(each) if len(part) != 1]
        assert folding.read(folded)[0] == folded


def test_read_without_options_is_the_default_folding() -> None:
    text = "Ａ戰㎏\u200b"
    assert DEFAULT.read(text) == ("".join(map(fold_char, text)), [(2, 2), (3, 0)])
