"""Where a text is cut, and how quickly the longest piece that fits is found."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.middle_out import MARKER, MAX_TRIES, Search, Text, cut_middle, is_boundary, longest_text
from tests.pipeline import small_tokenizers

# What must stay together.
WHOLES = (
    *("e\u0301", "a\u0323\u0302", "\r\n", "👩\u200d👩\u200d👧", "👍🏽", "🇫🇷", "❤\ufe0f"),
    *("\u1100\u1161\u11a8", "न\u093f", "🏴\U000e0067\U000e007f", "a\u200db"),
)


def text(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("whole", WHOLES)
def test_what_belongs_together_is_not_parted(whole: str) -> None:
    around = f"x{whole}y"
    assert [index for index in range(1, len(around)) if is_boundary(around, index)] == [1, len(around) - 1]


def test_flags_are_cut_between_pairs() -> None:
    flags = "🇫🇷🇩🇪🇯🇵"
    assert [index for index in range(7) if is_boundary(flags, index)] == [0, 2, 4, 6]
    assert is_boundary("🇫🇷a", 2)
    assert not is_boundary("a🇫🇷", 2)


@pytest.mark.parametrize("pair", ["ab", "\n\r", "\n\n", "敏感", "a👍", "é🇫", "\u0301a", "\u1100a"])
def test_between_other_characters_a_text_may_be_cut(pair: str) -> None:
    assert is_boundary(pair, 1)


def test_a_cut_text_keeps_head_and_tail_of_equal_length() -> None:
    assert cut_middle("abcdefghij", 5) == f"abc{MARKER}ij"
    assert cut_middle("abcdefghij", 4) == f"ab{MARKER}ij"
    assert cut_middle("abcdefghij", 1) == f"a{MARKER}"
    assert cut_middle("abcdefghij", 0) == MARKER


def test_a_cut_never_parts_what_belongs_together_and_keeps_no_more_than_asked() -> None:
    rng = random.Random(4)
    for _ in range(200):
        pieces = [rng.choice((*WHOLES, "a", " ", "敏")) for _ in range(rng.randint(1, 20))]
        starts = {0}
        whole = ""
        for piece in pieces:
            whole += piece
            starts.add(len(whole))
        for num_kept in range(len(whole)):
            head, tail = cut_middle(whole, num_kept).split(MARKER)
            assert whole.startswith(head)
            assert whole.endswith(tail)
            assert len(head) + len(tail) <= num_kept
            assert {len(head), len(whole) - len(tail)} <= starts or "\u200d" in whole or "🇫🇷🇫🇷" in whole


def test_a_run_of_marks_without_end_is_cut_where_it_is() -> None:
    head, tail = cut_middle("e" + "\u0301" * 100_000, 50_000).split(MARKER)
    assert (len(head), len(tail)) == (25_000, 25_000)
    flags = "🇫" * 100_001
    assert len(cut_middle(flags, 50_000)) > 50_000 - 4


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], None),
        ([text("user", ""), text("assistant", None), text("user", [])], None),
        ([text("system", "sss"), text("user", "u")], Text(1, None, "u")),
        ([text("system", "s"), text("developer", "dd"), text("user", "")], Text(1, None, "dd")),
        ([text("user", "uu"), text("tool", "ttt"), text("user", "vvv")], Text(1, None, "ttt")),
        ([text("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "bb"}])], Text(0, 1, "bb")),
    ],
)
def test_the_longest_text_is_found(messages: list[dict[str, object]], expected: Text | None) -> None:
    assert longest_text(messages, ("system", "developer")) == expected


def search(length: int, count: Callable[[int], int], room: int) -> tuple[int | None, int]:
    """The most characters that fitted, and the number of tries."""
    one = Search(length, count(length), room)
    best, num_tries = None, 0
    while (guess := one.guess()) is not None:
        assert 0 <= guess < length
        num_tries += 1
        if one.learn(guess, count(guess)):
            assert best is None or guess > best
            best = guess
    return best, num_tries


SHAPES: dict[str, Callable[[int], int]] = {
    "even": lambda kept: 50 + kept // 4,
    "one a character": lambda kept: 50 + kept,
    "dense outside": lambda kept: 50 + min(kept, 2000) + kept // 20,
    "dense inside": lambda kept: 50 + kept // 20 + max(0, kept - 38_000),
    "steps": lambda kept: 50 + kept // 5000 * 1000,
    "root": lambda kept: 50 + int(50 * math.sqrt(kept)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_search_ends_near_the_best_whatever_the_text_is_like(shape: str) -> None:
    count, length = SHAPES[shape], 40_000
    for room in range(60, count(length), count(length) // 37):
        best, num_tries = search(length, count, room)
        most = max(kept for kept in range(length) if count(kept) <= room)
        assert best is not None
        assert num_tries <= MAX_TRIES
        assert best <= most
        assert best >= most * 0.9 or count(best) >= room - room // 256 or most - best < length / 40


def test_the_search_gives_up_where_the_rest_alone_is_too_long() -> None:
    assert search(1000, lambda kept: 500 + kept, 400) == (None, 2)
    one = Search(1000, 1500, 0)
    assert one.guess() == 0
    assert not one.learn(0, 500)
    assert (one.guess(), one.least) == (None, 500)


def test_real_text_needs_few_tries() -> None:
    rng = random.Random(2)
    encode: Any = small_tokenizers.byte_level().encode
    whole = " ".join(small_tokenizers.text(rng) for _ in range(300))

    def count(kept: int) -> int:
        return 20 + len(encode(cut_middle(whole, kept)).ids)

    for room in (100, 500, 1000, 2000):
        best, num_tries = search(len(whole), count, room)
        assert best is not None
        assert room - max(1, room // 256) <= count(best) <= room
        assert num_tries <= 7
