from __future__ import annotations

import random

import pytest

from filters.finder import Finder


def found(patterns: list[str], text: str, whole: list[int] | None = None) -> list[tuple[str, int]]:
    return [(patterns[index], end) for end, index in Finder(patterns, whole or []).find(text)]


def test_find_of_patterns_that_end_together_gives_the_longest_first() -> None:
    assert found(["bc", "我abc", "c", "abc"], "x我abc.") == [("我abc", 5), ("abc", 5), ("bc", 5), ("c", 5)]


def test_find_counts_characters_not_bytes() -> None:
    text = "é😀敏感\ud800 ok 𝐚敏感"
    assert found(["敏感", "ok", "\ud800"], text) == [("敏感", 4), ("\ud800", 5), ("ok", 8), ("敏感", 12)]


def test_find_of_ascii_patterns_in_the_ascii_parts_of_a_text() -> None:
    patterns = ["abc", "a", "b我"]
    assert found(patterns, "我abc我ab我a") == [("a", 2), ("abc", 4), ("a", 6), ("b我", 8), ("a", 9)]
    assert found(["abc"], "我ab我bc我") == []
    assert found(["我"], "plain ascii") == []


def test_find_without_patterns_finds_nothing() -> None:
    finder = Finder([])
    assert list(finder.find("abc我")) == []
    assert (finder.num_states, finder.num_bytes) == (0, 0)


def test_finder_with_an_empty_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match="pattern 1 is empty"):
        Finder(["a", ""])


def test_find_of_whole_words_looks_at_both_neighbours() -> None:
    assert found(["ass", "我"], "ass class asss ass我", [0, 1]) == [("ass", 3), ("ass", 18), ("我", 19)]


def test_find_alternating_texts_with_and_without_astral_characters_is_safe() -> None:
    # A reused iterator of pyahocorasick corrupts memory here.
    rng = random.Random(1)
    finder = Finder(["敏感", "😀", "ab"])
    for _ in range(2_000):
        text = "".join(rng.choices("敏感😀ab ", k=rng.randint(0, 30)))
        assert sum(1 for _ in finder.find(text)) == text.count("敏感") + text.count("😀") + text.count("ab")


def test_num_states_counts_nodes() -> None:
    assert Finder(["ab", "ac"]).num_states == 4
    assert Finder(["ab", "我"]).num_states == 7
    assert Finder(["ab"]).num_bytes > 0
