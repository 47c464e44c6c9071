"""The server's own times, from the `timings` of its answers: where the time to the first token went.

Not here: what the client saw (`gateway/bench/latencies.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.bench.percentiles import Distribution, Spread
from gateway.bench.sample import Sample

_SUFFIX: Final = "_ms"
TTFT: Final = "ttft"
TOTALS: Final = (TTFT, "tpot", "total")  # not stages: they span several


def stages_of(samples: Sequence[Sample], percents: Sequence[float]) -> tuple[dict[str, Spread], Spread]:
    """The spread of each time that the server named, and of the client's TTFT less the server's.

    Milliseconds. The second is what lies between the two: network, connection, the client's own delay. Both
    are empty if the server tells no timings. What is not a time in milliseconds, or null, is left out.
    """
    times_ms: dict[str, list[float]] = {}
    added_ms: list[float] = []
    for sample in samples:
        told = {
            key.removesuffix(_SUFFIX): value
            for key, value in (sample.timings or {}).items()
            if key.endswith(_SUFFIX) and isinstance(value, int | float)
        }
        for name, value in told.items():
            times_ms.setdefault(name, []).append(value)
        if TTFT in told and sample.frames_s:
            added_ms.append((sample.frames_s[0] - sample.sent_s) * 1e3 - told[TTFT])
    spreads: dict[str, Spread] = {
        name: Distribution.of(each).spread(percents) for name, each in times_ms.items()
    }
    return spreads, Distribution.of(added_ms).spread(percents)


def before_first_token(stages_ms: Mapping[str, Spread]) -> dict[str, Spread]:
    """Those that add up to the first token, in the server's order."""
    return {name: spread for name, spread in stages_ms.items() if name not in TOTALS}
