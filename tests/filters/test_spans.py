from __future__ import annotations

import random
from itertools import permutations

import pytest

from filters.rules import Rule
from filters.spans import Emitter

MASK = Rule("m", ("xx",), "mask", replacement="*")
HASH = Rule("h", ("xx",), "mask", replacement="#")
REDACT = Rule("r", ("xx",), "redact", replacement="[R]")


@pytest.mark.parametrize(
    ("spans", "output"),
    [
        ([], "abcdef"),
        ([(1, 3, MASK)], "a**def"),
        ([(1, 3, MASK), (2, 4, MASK)], "a***ef"),
        ([(1, 3, MASK), (3, 4, HASH)], "a**#ef"),  # adjacent: not one
        ([(1, 3, REDACT), (3, 5, REDACT)], "a[R][R]f"),
        ([(1, 3, REDACT), (2, 5, REDACT)], "a[R]f"),
        ([(2, 5, REDACT), (1, 3, MASK)], "a****f"),  # the first says how
        ([(1, 3, HASH), (1, 4, MASK)], "a***ef"),  # the longest of the first
        ([(1, 3, MASK), (1, 3, REDACT)], "a[R]def"),  # redact before mask
        ([(0, 6, REDACT)], "[R]"),
    ],
)
def test_release_rewrites_unions_once(spans: list[tuple[int, int, Rule]], output: str) -> None:
    for seed in range(5):
        emitter = Emitter()
        for span in random.Random(seed).sample(spans, len(spans)):
            emitter.add(*span)
        assert emitter.release("abcdef", 6) == output
        assert emitter.is_idle


def test_release_in_steps_gives_the_same_when_spans_come_before_their_border() -> None:
    rng = random.Random(1)
    text = "abcdefghij"
    for _ in range(500):
        spans = [
            (start, rng.randint(start + 1, 10), rng.choice([MASK, HASH, REDACT]))
            for start in rng.choices(range(10), k=rng.randint(0, 5))
        ]
        whole = Emitter()
        for span in spans:
            whole.add(*span)
        stepwise, out = Emitter(), ""
        for border in range(1, 11):
            for span in spans:
                if span[0] == border - 1:
                    stepwise.add(*span)
            out += stepwise.release(text[border - 1 : border + 2], border)
        assert out == whole.release(text, 10), spans


def test_release_of_a_span_that_began_earlier_rewrites_the_rest_of_it() -> None:
    emitter = Emitter(released=2)
    emitter.add(0, 4, MASK)
    assert emitter.release("cdef", 6) == "**ef"
    emitter = Emitter(released=2)
    emitter.add(0, 4, REDACT)
    emitter.add(0, 1, MASK)
    assert emitter.release("cdef", 6) == "[R]ef"


def test_release_of_equal_spans_goes_by_rank_in_whatever_order_they_come() -> None:
    spans = [(MASK, (0, 2)), (HASH, (0, 1)), (MASK, (1, 0))]
    for order in permutations(spans):
        emitter = Emitter()
        for rule, rank in order:
            emitter.add(1, 3, rule, rank)
        assert emitter.release("abcd", 4) == "a##d"


def test_release_of_a_part_of_a_longer_text() -> None:
    emitter = Emitter()
    emitter.add(2, 4, MASK)
    assert [emitter.release("abcdef", border, 0) for border in (1, 3, 5, 6)] == ["a", "b*", "*e", "f"]
