from __future__ import annotations

import random

import pytest

from filters.folding import fold, fold_table
from filters.patterns import Patterns
from filters.pii import DETECTORS
from filters.prefilter import MAX_PATTERNS, Prefilter
from filters.rules import Rule, RuleSet

WORDS = Rule("w", ("敏感", "发动战争", "fuck", "加v信", "(株)会"), "block")
CARD = Rule("c", (), "mask", replacement="*", pii="card")


def prefilter(*rules: Rule) -> Prefilter:
    found = Patterns(RuleSet(rules)).prefilter
    assert found is not None
    return found


def is_clean(text: str, *rules: Rule) -> bool:
    return prefilter(*rules).is_clean(text, 0, len(text))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "今天天气很好，我们去公园。",
        "敏捷而感人",
        "An English sentence — really.",
        "战争发动",
        "加v",
        "…",
        "敏",
    ],
)
def test_is_clean_of_texts_in_which_nothing_begins(text: str) -> None:
    assert is_clean(text, WORDS, CARD)


@pytest.mark.parametrize(
    "text",
    [
        "很敏感",
        "敏\u200b感",
        "發動戰爭",
        "他说ＦＵＣＫ了",
        "f\u200buck我",
        "加Ｖ信",
        "㈱会",
        "卡4111 1111 1111 1111。",
    ],
)
def test_is_clean_never_of_texts_with_a_match(text: str) -> None:
    assert not is_clean(text, WORDS, CARD)


def test_is_clean_looks_at_what_goes_on_after_the_end() -> None:
    words = prefilter(WORDS, CARD)
    assert words.is_clean("我敏感", 0, 1)
    assert not words.is_clean("我敏感", 0, 2)
    assert not words.is_clean("我发动战争", 1, 2)
    assert not words.is_clean("我4111111111111111", 0, 2)
    assert words.is_clean("敏感我们", 2, 4)


def test_is_clean_gives_up_where_too_much_looks_like_a_beginning() -> None:
    rule = Rule("r", ("敏感词", "我们的"), "block")
    assert is_clean("敏感我们" * 3, rule)
    assert not is_clean("敏感我们" * 300, rule)


def test_is_clean_of_random_texts_is_never_wrong() -> None:
    check_random_texts(seed=1, num_cases=300)


@pytest.mark.long
def test_is_clean_of_many_random_texts_is_never_wrong() -> None:
    check_random_texts(seed=2, num_cases=3_000)


def check_random_texts(seed: int, num_cases: int) -> None:
    rng = random.Random(seed)
    chars = list("敏感词ab \u200b…ß㏄é战戰") + rng.sample(list(fold_table()), 20)
    num_clean = 0
    for _ in range(num_cases):
        words = tuple("".join(rng.choices(chars, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 4)))
        patterns = [fold(word) for word in words if len(fold(word)) > 1]
        text = "".join(rng.choices(chars, k=rng.randint(0, 12)))
        if not patterns:
            continue
        if is_clean(text, Rule("r", tuple(patterns), "block")):
            num_clean += 1
            assert not any(pattern in fold(text) for pattern in patterns), (patterns, text)
    assert num_clean > num_cases // 4


def test_is_for_few_patterns_of_two_characters_at_least() -> None:
    assert Prefilter.is_for(["敏感", "ab"])
    assert not Prefilter.is_for(["敏感", "a"])
    assert Prefilter.is_for(["敏感"] * MAX_PATTERNS + ["ab"] * 1000)
    assert not Prefilter.is_for(["敏感"] * (MAX_PATTERNS + 1))
    assert Patterns(RuleSet((Rule("r", ("傻帽",), "block", skip_symbols=True),))).prefilter is None


def test_is_clean_without_patterns_runs_the_detectors() -> None:
    numbers = Prefilter([], Patterns(RuleSet()).finder, [DETECTORS["card"]])
    assert numbers.is_clean("卡号41111111", 0, 10)
    assert not numbers.is_clean("卡号4111111111111111", 0, 18)
