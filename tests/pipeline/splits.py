"""Every way that a test should cut an input for an incremental object."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T", bound=Sequence[object])


def splits(whole: T, rng: random.Random, num_random: int = 3) -> Iterator[list[T]]:
    """The whole, one unit at a time, every cut in two, and some random cuts."""
    yield [whole]
    yield [whole[i : i + 1] for i in range(len(whole))]  # type: ignore[misc]
    for i in range(len(whole) + 1):
        yield [whole[:i], whole[i:]]  # type: ignore[list-item]
    for _ in range(num_random):
        yield random_split(whole, rng)


def random_split(whole: T, rng: random.Random) -> list[T]:
    """Cuts at random places; some pieces are empty."""
    cuts = sorted(rng.randint(0, len(whole)) for _ in range(rng.randint(0, 2 + len(whole) // 2)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]  # type: ignore[misc]
