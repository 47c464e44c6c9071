"""What a server told of an answer, as far as it can be true: one odd answer must not spoil a report.

The load's client reads numbers by the same rules; a report is made of whatever samples it is given. Not
here: what the client itself measured, which is taken as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeGuard

import msgspec

from gateway.bench.sample import Sample

MAX_COUNT: Final = 10**9  # tokens of one request; no model has so long a context
MAX_MS: Final = 1e9  # the longest run that there is
MAX_TIMINGS: Final = 32  # names; more are no stages of a request


def is_count(value: object) -> TypeGuard[int]:
    """Whether it can be the tokens of a request."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def is_time(value: object) -> TypeGuard[int | float]:
    """Whether it can be the milliseconds of a request, or of a part of it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_MS


def plausible(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples; counts and times that cannot be true are as if they had not been told."""
    return [_plausible(each) for each in samples]


def _plausible(sample: Sample) -> Sample:
    counts = {
        name: None
        for name in ("prompt_tokens", "output_tokens", "cached_tokens")
        if not is_count(getattr(sample, name) or 0)
    }
    timings = sample.timings
    if timings and (len(timings) > MAX_TIMINGS or not all(map(_may_be_told, timings.values()))):
        told = [(name, value) for name, value in timings.items() if _may_be_told(value)]
        return msgspec.structs.replace(sample, timings=dict(told[:MAX_TIMINGS]), **counts)
    return msgspec.structs.replace(sample, **counts) if counts else sample


def _may_be_told(value: object) -> bool:
    """One that a server does not know may be null."""
    return value is None or is_time(value)
