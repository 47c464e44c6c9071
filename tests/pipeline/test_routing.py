"""Routing: affinity first, unless its worker has too much to do."""

from __future__ import annotations

import random
from collections import Counter

from pipeline.routing import Load, choose

KEYS = [f"tcp://gpu{number}:7400" for number in range(5)]


def idle(keys: list[str]) -> list[Load]:
    return [Load(key, 0) for key in keys]


def test_same_affinity_goes_to_the_same_worker_in_any_order() -> None:
    rng = random.Random(1)
    for affinity in range(100):
        favourite = KEYS[choose(affinity, idle(KEYS))]
        shuffled = rng.sample(KEYS, len(KEYS))
        assert shuffled[choose(affinity, idle(shuffled))] == favourite


def test_affinities_spread_over_all_workers() -> None:
    counts = Counter(choose(affinity, idle(KEYS)) for affinity in range(5000))
    assert all(800 < counts[index] < 1200 for index in range(5))


def test_worker_that_leaves_hands_over_only_its_own_share() -> None:
    rest = KEYS[:2] + KEYS[3:]
    for affinity in range(500):
        favourite = KEYS[choose(affinity, idle(KEYS))]
        if favourite != KEYS[2]:
            assert rest[choose(affinity, idle(rest))] == favourite


def test_favourite_is_left_only_beyond_ratio_and_slack() -> None:
    favourite = choose(7, idle(KEYS[:2]))
    for outstanding, chosen in ((12_100, favourite), (12_101, 1 - favourite)):
        loads = [Load(key, 10_000) for key in KEYS[:2]]
        loads[favourite] = Load(KEYS[favourite], outstanding)
        assert choose(7, loads, max_ratio=1.2, slack_tokens=100) == chosen


def test_overloaded_favourite_gives_way_to_the_least_loaded() -> None:
    favourite = choose(7, idle(KEYS))
    loads = [Load(key, 50_000 + index) for index, key in enumerate(KEYS)]
    loads[favourite] = Load(KEYS[favourite], 1_000_000)
    least = (favourite + 1) % 5
    loads[least] = Load(KEYS[least], 49_000)
    assert choose(7, loads) == least


def test_second_request_of_a_chat_stays_with_an_otherwise_idle_worker() -> None:
    favourite = choose(7, idle(KEYS))
    loads = idle(KEYS)
    loads[favourite] = Load(KEYS[favourite], 1_500 + 2_048)
    assert choose(7, loads) == favourite


def test_negative_and_large_affinities_are_fine() -> None:
    for affinity in (-1, -(1 << 63), 1 << 64, 1 << 100):
        assert 0 <= choose(affinity, idle(KEYS)) < 5
