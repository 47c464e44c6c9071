"""How long prompts and answers are to be: distributions over counts of tokens, drawn from a seeded source.

Not here: prompts of such a length (`gateway/bench/prompts.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Final

MAX_TOKENS: Final = 1 << 20
_MAX_RANKS: Final = 1 << 16  # of zipf, whose weights are a table

FORMS: Final = (
    "N, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEAN:DEVIATION, exponential:MEAN, "
    "zipf:EXPONENT:MAX"
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens, each at least 1. `text` is what it was made from."""

    text: str
    draw: Callable[[Random], int]


def parse_lengths(text: str) -> Lengths:
    """The distribution that `text` names in one of `FORMS`.

    `normal`, `lognormal` and `exponential` are of the lengths themselves, rounded, and brought to between 1
    and `MAX_TOKENS`: what falls outside counts as the bound. Raises `ValueError` with what is wrong.
    """
    kind, *written = text.split(":")
    if not written:
        kind, written = "fixed", [text]
    if kind not in _KINDS:
        raise ValueError(f"{text!r} is not a length; it must be one of: {FORMS}")
    make, names = _KINDS[kind]
    if len(written) != len(names):
        form = kind.upper() if kind == "fixed" else f"{kind}:{':'.join(names)}"
        raise ValueError(f"{text!r} has {len(written)} numbers; it must be {form}")
    return Lengths(text, make([_number(text, *pair) for pair in zip(names, written, strict=True)]))


def _number(text: str, name: str, written: str) -> float:
    try:
        value = float(written)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} has {name} {written!r}; it must be a number, in one of the forms {FORMS}")
    return value


def _whole(name: str, value: float, least: int = 1, most: int = MAX_TOKENS) -> int:
    if not (least <= value <= most and value == int(value)):
        raise ValueError(f"{name} is {value:g}; it must be a whole number from {least} to {most}")
    return int(value)


def _positive(name: str, value: float, most: float = MAX_TOKENS) -> float:
    if not 0 < value <= most:
        raise ValueError(f"{name} is {value:g}; it must be above 0 and at most {most:g}")
    return value


def _bounded(length: float) -> int:
    return min(max(1, round(length)), MAX_TOKENS)


def _fixed(numbers: Sequence[float]) -> Callable[[Random], int]:
    length = _whole("the length", numbers[0])
    return lambda random: length


def _uniform(numbers: Sequence[float]) -> Callable[[Random], int]:
    low = _whole("LOW", numbers[0])
    high = _whole("HIGH", numbers[1], least=low)
    return lambda random: random.randint(low, high)


def _normal(numbers: Sequence[float]) -> Callable[[Random], int]:
    mean, deviation = _positive("MEAN", numbers[0]), _positive("DEVIATION", numbers[1])
    return lambda random: _bounded(random.gauss(mean, deviation))


def _lognormal(numbers: Sequence[float]) -> Callable[[Random], int]:
    """MEAN and DEVIATION are of the lengths, not of their logarithms: those are what people know."""
    mean, deviation = _positive("MEAN", numbers[0]), _positive("DEVIATION", numbers[1])
    variance = math.log1p((deviation / mean) ** 2)
    centre, width = math.log(mean) - variance / 2, math.sqrt(variance)
    return lambda random: _bounded(random.lognormvariate(centre, width))


def _exponential(numbers: Sequence[float]) -> Callable[[Random], int]:
    rate = 1 / _positive("MEAN", numbers[0])
    return lambda random: _bounded(random.expovariate(rate))


def _zipf(numbers: Sequence[float]) -> Callable[[Random], int]:
    exponent = _positive("EXPONENT", numbers[0], most=100)
    ranks = _whole("MAX", numbers[1], most=_MAX_RANKS)
    sums = list(accumulate(rank**-exponent for rank in range(1, ranks + 1)))
    return lambda random: min(bisect_left(sums, random.random() * sums[-1]) + 1, ranks)


_Make = Callable[[Sequence[float]], Callable[[Random], int]]
_KINDS: Final[dict[str, tuple[_Make, tuple[str, ...]]]] = {
    "fixed": (_fixed, ("N",)),
    "uniform": (_uniform, ("LOW", "HIGH")),
    "normal": (_normal, ("MEAN", "DEVIATION")),
    "lognormal": (_lognormal, ("MEAN", "DEVIATION")),
    "exponential": (_exponential, ("MEAN",)),
    "zipf": (_zipf, ("EXPONENT", "MAX")),
}
