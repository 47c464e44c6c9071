"""Which worker gets a call: the one that likely holds its prefix, unless that one has too much to do.

A decision and nothing else: who is ready, and what each has outstanding, comes in.

Prefix affinity is a rendezvous hash (Thaler and Ravishankar, 1998): every worker draws a number for the
call's affinity, and the highest wins. A worker that leaves hands over only its own share, and gets the same
share back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

MAX_LOAD_RATIO: Final = 1.2
# About one chat request with its reserved output: an idle worker and one with a single request count as
# equal, or the second of two quick turns would leave its prefix behind.
LOAD_SLACK_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class Load:
    """A ready worker: a key that outlives its restarts, and its unfinished prompt and output tokens."""

    key: str
    outstanding_tokens: int


def choose(
    affinity: int,
    loads: Sequence[Load],
    max_ratio: float = MAX_LOAD_RATIO,
    slack_tokens: int = LOAD_SLACK_TOKENS,
) -> int:
    """The index of the best worker in `loads`, which must not be empty. Ties go to the higher draw."""
    if len(loads) == 1:
        return 0
    draws = [_draw(affinity, load.key) for load in loads]
    favourite = max(range(len(loads)), key=draws.__getitem__)
    least = min(load.outstanding_tokens for load in loads)
    if loads[favourite].outstanding_tokens <= max_ratio * least + slack_tokens:
        return favourite
    return min(range(len(loads)), key=lambda index: (loads[index].outstanding_tokens, -draws[index]))


def _draw(affinity: int, key: str) -> int:
    """A number that is the same in every process: Python's own `hash` of a string is not."""
    seed = (affinity & (1 << 64) - 1).to_bytes(8, "little")
    return int.from_bytes(blake2b(key.encode(), digest_size=8, key=seed).digest(), "little")
