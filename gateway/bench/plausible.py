"""What a server told of an answer, as far as it can be true: one odd answer must not spoil a report.

The load's client reads bounded numbers; a report is made of whatever samples it is given. Not here: what
the client itself measured, which is taken as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.bench.sample import Sample

MAX_COUNT: Final = 10**9  # tokens of one request; no model has so long a context
MAX_MS: Final = 1e9  # the longest run that there is
MAX_TIMINGS: Final = 32  # names; more are no stages of a request


def plausible(samples: Sequence[Sample]) -> list[Sample]:
    """The same samples; counts and times that cannot be true are as if they had not been told."""
    return [_plausible(each) for each in samples]


def _plausible(sample: Sample) -> Sample:
    counts = {
        name: None
        for name in ("prompt_tokens", "output_tokens", "cached_tokens")
        if not 0 <= (getattr(sample, name) or 0) <= MAX_COUNT
    }
    timings = sample.timings
    if timings and (len(timings) > MAX_TIMINGS or not all(map(_is_time, timings.values()))):
        told = [(name, value) for name, value in timings.items() if _is_time(value)]
        return msgspec.structs.replace(sample, timings=dict(told[:MAX_TIMINGS]), **counts)
    return msgspec.structs.replace(sample, **counts) if counts else sample


def _is_time(value: object) -> bool:
    """Of a request: milliseconds, from 0. One that a server does not know may be null."""
    return value is None or (isinstance(value, int | float) and 0 <= value <= MAX_MS)
