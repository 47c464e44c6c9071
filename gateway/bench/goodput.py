"""Goodput: the share of requests that met every limit, and how many of them there were a second.

The idea and the name are DistServe's (arXiv 2401.09670), the form `NAME:MILLISECONDS` that of
`vllm bench serve --goodput`. Not here: the times themselves (`gateway/bench/latencies.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from gateway.bench.bounds import Amount, Share

# What a request is held to. `tbt` is the p99 of the request's own gaps: its mean is `tpot`, which a stall of
# a second in an answer of a thousand tokens moves by a millisecond.
LIMITS: Final = ("ttft", "tpot", "tbt", "e2e")
_ALIASES: Final = {"e2el": "e2e", "itl": "tbt"}  # vLLM's names
Limits = Mapping[str, Amount]  # milliseconds


class Goodput(msgspec.Struct, frozen=True):
    """`share`: of all measured requests, the failed ones too, which meet nothing.

    `requests_per_s`: of the requests that `Throughput.requests_per_s` counts, those that met every limit.
    Both rates are of what ended in the window, as `vllm bench serve` has both of what completed in its run.
    """

    limits_ms: Limits
    share: Share
    requests_per_s: Amount
    shares: Mapping[str, Share]  # of the same requests, what met this one limit


def parse_limits(words: Iterable[str]) -> dict[str, float]:
    """`["ttft:200", "tbt:50"]` as milliseconds by name.

    Raises `ValueError` that names the word: an unknown name, no number, a negative one, a name given twice.
    """
    limits: dict[str, float] = {}
    for word in words:
        given, _, number = word.partition(":")
        name = _ALIASES.get(given, given)
        if name not in LIMITS:
            raise ValueError(f"goodput {word!r}: {given!r} is not one of {', '.join(LIMITS)}")
        if name in limits:
            raise ValueError(f"goodput {word!r}: {name} is given twice")
        limits[name] = _milliseconds(word, number)
    return limits


def _milliseconds(word: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"goodput {word!r}: {number!r} is not a number of milliseconds") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"goodput {word!r}: a limit is at least 0 ms and finite")
    return value


def met(limits: Limits, times_ms: Mapping[str, float]) -> set[str]:
    """The limits that a request met. Without a second token there is no TPOT and no gap to miss."""
    return {name for name, limit in limits.items() if times_ms.get(name, 0.0) <= limit}
