"""What the report of a load test says of the run as a whole: what was asked, of whom, and how it went.

Not here: the single requests (`gateway/bench/sample.py`), and what is computed of them
(`gateway/bench/figures.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class ClientHealth(msgspec.Struct, frozen=True):
    """Whether the load test itself kept up: what it measured is worth nothing if it did not."""

    cpu_share: float = 0.0  # of one core, over the run
    lag_p50_ms: float = 0.0  # how late its event loop came to a timer
    lag_p99_ms: float = 0.0
    lag_max_ms: float = 0.0
    max_late_ms: float = 0.0  # open loop: the longest time from when a request was due until it was sent
    num_late: int = 0  # open loop: requests that were sent over 10 ms late
    notes: tuple[str, ...] = ()  # sentences for the reader, such as that the client was the bottleneck


class RunInfo(msgspec.Struct, frozen=True):
    """Times are monotonic seconds from the start of the run, as in `Sample`; lengths are in tokens."""

    url: str
    endpoint: str  # "/v1/chat/completions"
    model: str
    mode: str  # "open" or "closed"
    rate: float | None  # requests a second; None in a closed loop
    arrivals: str | None  # "poisson" or "constant"; None in a closed loop
    concurrency: int | None  # requests in flight; in an open loop the cap, None without one
    prompt_lengths: str  # as it was given: "512", "uniform:100:900"
    output_lengths: str
    seed: int
    started_at: str  # wall clock, ISO 8601 in UTC
    duration_s: float  # from the first request's due time until the last one's end
    steady_from_s: float = 0.0  # what was sent before is warm-up
    steady_until_s: float | None = None  # what was sent later is drain; None: all the rest is steady
    ended_early: bool = False  # by Ctrl-C
    # Further settings that shape the load, in words: {"shared prefix": "256 tokens of 4 prefixes"}.
    options: Mapping[str, str] = {}
    versions: Mapping[str, str] = {}  # {"headrace": "0.1.0", "python": "3.12.3", "server": "..."}
    machine: str = ""  # of the client: "8 x AMD EPYC, Linux 6.8"
    client: ClientHealth = ClientHealth()
