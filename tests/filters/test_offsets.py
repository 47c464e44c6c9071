from __future__ import annotations

import random

from filters.offsets import Offsets


def test_raw_of_equals_a_full_list_for_random_texts() -> None:
    rng = random.Random(1)
    for _ in range(300):
        lengths = rng.choices([0, 1, 1, 2, 5], k=rng.randint(1, 20))
        origin = [raw for raw, length in enumerate(lengths) for _ in range(length)]
        offsets = Offsets()
        for raw, length in enumerate(lengths):
            assert offsets.folded_at(raw) == sum(lengths[:raw])
            if length != 1:
                offsets.add(raw, length)
            forget = rng.randint(0, sum(lengths[: raw + 1]))
            known = origin[: sum(lengths[: raw + 1])]
            assert [offsets.raw_of(folded) for folded in range(len(known))] == known
            kept = Offsets()
            for earlier in range(raw + 1):
                if lengths[earlier] != 1:
                    kept.add(earlier, lengths[earlier])
            kept.forget_before(forget)
            assert [kept.raw_of(folded) for folded in range(forget, len(known))] == known[forget:]


def test_span_covers_whole_raw_characters() -> None:
    offsets = Offsets()
    offsets.add(1, 2)  # a, ㎏, b: folded `akgb`
    assert offsets.span(0, 2) == (0, 2)
    assert offsets.span(2, 4) == (1, 3)


def test_is_straight_once_irregular_characters_are_forgotten() -> None:
    offsets = Offsets()
    assert offsets.is_straight
    for raw in (2, 3, 4):
        offsets.add(raw, 0)
    assert not offsets.is_straight
    offsets.forget_before(1)
    assert not offsets.is_straight
    offsets.forget_before(2)
    assert offsets.is_straight
    assert (offsets.raw_of(2), offsets.folded_at(6)) == (5, 3)


def test_add_of_a_long_run_of_skipped_characters_stays_one_anchor() -> None:
    offsets = Offsets()
    for raw in range(10_000):
        offsets.add(raw, 0)
    assert offsets.raw_of(0) == 10_000
    assert offsets.is_straight


def test_skip_equals_adding_each_of_the_skipped_characters() -> None:
    for before in ((), (1,), (4,)):
        one_by_one, at_once = Offsets(), Offsets()
        for raw in before:
            one_by_one.add(raw, 2)
            at_once.add(raw, 2)
        for raw in range(5, 9):
            one_by_one.add(raw, 0)
        at_once.skip(5, 4)
        assert [at_once.raw_of(folded) for folded in range(9)] == [
            one_by_one.raw_of(folded) for folded in range(9)
        ]
        assert at_once.folded_at(9) == one_by_one.folded_at(9)


def test_forget_between_changes_nothing_outside() -> None:
    rng = random.Random(3)
    for _ in range(300):
        lengths = rng.choices([0, 1, 2, 5], k=rng.randint(1, 20))
        origin = [raw for raw, length in enumerate(lengths) for _ in range(length)]
        offsets = Offsets()
        for raw, length in enumerate(lengths):
            if length != 1:
                offsets.add(raw, length)
        first = rng.randint(0, len(origin))
        last = rng.randint(first, len(origin))
        offsets.forget_between(first, last)
        for folded in [*range(min(first + 1, len(origin))), *range(last, len(origin))]:
            assert offsets.raw_of(folded) == origin[folded]
        assert offsets.folded_at(len(lengths)) == len(origin)
