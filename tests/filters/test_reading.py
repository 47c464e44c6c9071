from __future__ import annotations

import random
from collections.abc import Sequence

from filters.reading import reading_of
from filters.rule_folding import Folding


def check_random(folding: Folding, seed: int, pieces: Sequence[str] = "aab A㎏\u200b…@我") -> None:
    """Against a list of the raw offsets of every folded character, for texts read in random slices."""
    rng = random.Random(seed)
    single = Folding(folding.skip_symbols, False, folding.digits, folding.leet)
    for _ in range(200):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 25)))
        chars = [(char, at) for at, raw in enumerate(text) for char in single.read(raw)[0]]
        groups: list[list[tuple[str, int]]] = []
        for char, at in chars:
            if folding.repeats and groups and groups[-1][0][0] == char:
                groups[-1].append((char, at))
            else:
                groups.append([(char, at)])
        reading, at = reading_of(folding), 0
        while at < len(text):
            size = rng.randint(1, max(5, len(text) // 3))
            reading.read(text[at : at + size])
            at += size
            reading.forget_before(rng.randint(0, max(0, reading.end - 3)))
        assert reading.end == len(groups)
        first = reading.at
        assert reading.window == "".join(group[0][0] for group in groups[first:])
        for start in range(first, len(groups)):
            assert reading.raw_of(start) == groups[start][0][1]
            assert reading.run_length(start) == len(groups[start])
            for end in range(start + 1, len(groups) + 1):
                assert reading.span(start, end) == (groups[start][0][1], groups[end - 1][-1][1] + 1)


def test_span_of_a_default_reading_equals_a_full_list() -> None:
    check_random(Folding(), seed=1)


def test_span_of_a_reading_without_symbols_equals_a_full_list() -> None:
    check_random(Folding(skip_symbols=True), seed=2)


def test_span_of_runs_covers_all_of_them() -> None:
    check_random(Folding(repeats=True), seed=3)
    check_random(Folding(repeats=True, skip_symbols=True), seed=4)


def test_span_of_long_runs_covers_all_of_them() -> None:
    check_random(
        Folding(repeats=True), seed=5, pieces=("a", "b", "c", "㏄", "㏄" * 70, "c" * 65, "㎏", "\u200b")
    )


def test_read_of_an_endless_run_keeps_only_its_ends() -> None:
    reading = reading_of(Folding(repeats=True))
    for _ in range(20):
        assert reading.read("㏄" * 1_000) > 0
    reading.read("a", is_last=True)
    assert (reading.window, reading.raw_end, reading.is_last) == ("ca", 20_001, True)
    assert (reading.span(0, 1), reading.span(1, 2)) == ((0, 20_000), (20_000, 20_001))
    assert reading.run_length(0) == 40_000
    assert reading._offsets.num_anchors < 100
