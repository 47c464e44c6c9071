from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from filters.automaton import Automaton
from filters.finder import Finder
from filters.folding import fold, is_word_char

Found = list[tuple[int, int]]


def stands_alone(text: str, start: int, end: int) -> tuple[bool, bool]:
    """Whether no word goes on across the start, and across the end."""
    left = not (start > 0 and is_word_char(text[start - 1]) and is_word_char(text[start]))
    right = not (end < len(text) and is_word_char(text[end]) and is_word_char(text[end - 1]))
    return left, right


def brute_force(patterns: Sequence[str], whole: Sequence[int], text: str) -> Found:
    found = []
    for index, pattern in enumerate(patterns):
        for start in range(len(text) - len(pattern) + 1):
            end = start + len(pattern)
            if text[start:end] == pattern and (index not in whole or all(stands_alone(text, start, end))):
                found.append((end, index))
    return sorted(found)


def brute_live(patterns: Sequence[str], whole: Sequence[int], silent: Sequence[int], text: str) -> int:
    """The longest end of the text that is a proper prefix of a pattern, or a word that may go on."""
    best = 0
    for index, pattern in enumerate(patterns):
        may_go_on = index in whole and is_word_char(pattern[-1])
        for size in range(1, len(pattern) + may_go_on):
            start = len(text) - size
            begins = start >= 0 and text[start:] == pattern[:size]
            if (
                begins
                and index not in silent
                and (index not in whole or stands_alone(text, start, len(text))[0])
            ):
                best = max(best, size)
    return best


def walk(automaton: Automaton, text: str) -> tuple[Found, list[int]]:
    """All matches by stepping, and the live depth after each character."""
    state, found, lives = automaton.start, [], []
    for end, char in enumerate(text, 1):
        if not is_word_char(fold(char)):
            found += [(end - 1, index) for index in automaton.awaiting[state]]
        state = automaton.step(state, char)
        found += [(end, index) for index in automaton.outputs[state]]
        lives.append(automaton.live[state])
    found += [(len(text), index) for index in automaton.awaiting[state]]
    return sorted(found), lives


def check_random(seed: int, num_cases: int) -> None:
    rng = random.Random(seed)
    for _ in range(num_cases):
        alphabet = rng.choice(["ab", "abc", "a我", "a我 -", "ab 😀", "aé\udc00"])
        patterns = ["".join(rng.choices(alphabet, k=rng.randint(1, 4))) for _ in range(rng.randint(0, 6))]
        whole = [index for index in range(len(patterns)) if rng.random() < 0.5]
        silent = [index for index in range(len(patterns)) if rng.random() < 0.3]
        automaton = Automaton(patterns, rng.random() < 0.5, whole=whole, silent=silent)
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 14)))
        expected = brute_force(patterns, whole, text)
        found, lives = walk(automaton, text)
        assert found == expected, (patterns, whole, text)
        assert sorted(Finder(automaton.patterns, whole).find(text)) == expected, (patterns, whole, text)
        assert lives == [brute_live(patterns, whole, silent, text[: i + 1]) for i in range(len(text))]


def test_walk_and_find_of_random_patterns_equal_brute_force() -> None:
    check_random(seed=1, num_cases=1_500)


@pytest.mark.long
def test_walk_and_find_of_many_random_patterns_equal_brute_force() -> None:
    check_random(seed=2, num_cases=40_000)


def test_walk_and_find_of_thousands_of_patterns_agree() -> None:
    rng = random.Random(3)
    patterns = ["".join(rng.choices("etaoin shrdlu敏感词我", k=rng.randint(2, 6))) for _ in range(3_000)]
    whole = range(0, len(patterns), 2)
    text = "".join(rng.choices("etaoin shrdlu敏感词我.😀", k=20_000))
    automaton = Automaton(patterns, fold=True, whole=whole)
    found = sorted(Finder(automaton.patterns, whole).find(text))
    assert len(found) > 1_000
    assert walk(automaton, text)[0] == found


def test_step_with_folding_takes_every_variant() -> None:
    automaton = Automaton(["ＦuCk"], fold=True)
    assert automaton.patterns == ("fuck",)
    for text in ("fuck", "FUCK", "ＦＵＣＫ", "𝐟𝓾ⓒ🅺"):
        assert walk(automaton, text)[0] == [(4, 0)]


def test_step_without_folding_is_exact() -> None:
    automaton = Automaton(["STOP", "\u200b"])
    assert walk(automaton, "stop ST\u200bOP STOP")[0] == [(8, 1), (15, 0)]


def test_outputs_are_longest_first() -> None:
    automaton = Automaton(["c", "abc", "bc", "c"])
    state = automaton.start
    for char in "abc":
        state = automaton.step(state, char)
    assert automaton.outputs[state] == (1, 2, 0, 3)


def test_automaton_without_patterns_matches_nothing() -> None:
    automaton = Automaton([], fold=True)
    assert walk(automaton, "abc") == ([], [0, 0, 0])


@pytest.mark.parametrize("patterns", [["a", ""], ["\u200b"]])
def test_automaton_with_an_empty_pattern_is_refused(patterns: list[str]) -> None:
    with pytest.raises(ValueError, match="is empty"):
        Automaton(patterns, fold=True)


def test_prefix_states_are_those_in_which_a_pattern_is_under_way() -> None:
    patterns = ["abab", "ba", "ab"]
    automaton = Automaton(patterns, whole=[1, 2])
    rng = random.Random(4)
    for _ in range(300):
        text = "".join(rng.choices("ab .", k=rng.randint(1, 7)))
        state = automaton.start
        for char in text:
            state = automaton.step(state, char)
        depths = set()
        while automaton.depth[state]:
            if state in automaton.prefix_states(2):
                depths.add(automaton.depth[state])
            state = automaton.fail[state]
        expected = {
            size
            for size in (1, 2)
            if text.endswith("ab"[:size]) and stands_alone(text, len(text) - size, len(text))[0]
        }
        assert depths == expected, text


def test_late_patterns_await_the_next_character_and_stay_live() -> None:
    automaton = Automaton(["ab", "bc"], whole=[1], late=True)
    state, seen = automaton.start, []
    for char in "abc":
        state = automaton.step(state, char)
        seen.append((automaton.outputs[state], automaton.awaiting[state], automaton.live[state]))
    assert seen == [((), (), 1), ((), (0,), 2), ((), (), 0)]
    assert automaton.right_bound == {1}


def test_live_of_all_patterns_is_live() -> None:
    rng = random.Random(8)
    for _ in range(50):
        patterns = sorted({"".join(rng.choices("ab .", k=rng.randint(1, 4))) for _ in range(5)})
        whole = [i for i in range(len(patterns)) if rng.random() < 0.4]
        silent = [i for i in range(len(patterns)) if rng.random() < 0.3]
        heard = [i for i in range(len(patterns)) if i not in silent]
        automaton = Automaton(patterns, whole=whole, silent=silent, late=rng.random() < 0.3)
        assert automaton.live_of(heard) == automaton.live
