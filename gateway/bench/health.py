"""Whether the load test's own process keeps up: how late its event loop is, how much of a core it uses.

Not here: the values that the report shows (`gateway/bench/run_info.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from time import monotonic, process_time
from typing import Final

import msgspec

from gateway.bench.run_info import ClientHealth
from gateway.bench.sample import Sample

_TICK_S: Final = 0.01
_MIN_TICKS: Final = 50  # of a shorter run, the beginning alone is most of the CPU
# A loop that is this late stamps frames that much too late; timers alone are late by up to 1 ms.
MAX_LAG_P99_MS: Final = 10.0
MAX_CPU_SHARE: Final = 0.85
LATE_S: Final = 0.01


class HealthMeter:
    """Measures the loop that it was started in, until `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lags_s: list[float] = []
        self._began_s, self._began_cpu_s = monotonic(), process_time()
        self._due_s = self._began_s + _TICK_S
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        now_s = monotonic()
        self._lags_s.append(max(0.0, now_s - self._due_s))
        self._due_s = now_s + _TICK_S
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def stop(self, samples: Sequence[Sample], is_open: bool, is_capped: bool = False) -> ClientHealth:
        """The measurement. `samples` of an open loop tell how late requests were sent."""
        self._timer.cancel()
        cpu_share = (process_time() - self._began_cpu_s) / max(monotonic() - self._began_s, 1e-9)
        return client_health(cpu_share, self._lags_s, samples, is_open, is_capped)


def client_health(
    cpu_share: float, lags_s: Sequence[float], samples: Sequence[Sample], is_open: bool, is_capped: bool
) -> ClientHealth:
    """What is told of the client, with a sentence for each thing that spoils the measurement."""
    lags_ms = sorted(lag * 1000 for lag in lags_s) or [0.0]
    late_s = [sample.sent_s - sample.due_s for sample in samples] if is_open else []
    health = ClientHealth(
        cpu_share=round(cpu_share, 3),
        lag_p50_ms=_rank(lags_ms, 0.5),
        lag_p99_ms=_rank(lags_ms, 0.99),
        lag_max_ms=_rank(lags_ms, 1.0),
        max_late_ms=round(max(late_s, default=0.0) * 1000, 3),
        num_late=sum(late > LATE_S for late in late_s),
    )
    is_long = len(lags_s) >= _MIN_TICKS
    return msgspec.structs.replace(health, notes=tuple(_notes(health, is_long, is_capped)))


def _rank(values: Sequence[float], share: float) -> float:
    return round(values[min(len(values) - 1, int(share * len(values)))], 3)


def _notes(health: ClientHealth, is_long: bool, is_capped: bool) -> Iterator[str]:
    if is_long and health.cpu_share > MAX_CPU_SHARE:
        yield (
            f"The client was the bottleneck: it used {health.cpu_share:.0%} of a core and came to its events "
            f"{health.lag_p99_ms:.1f} ms late (p99), so that latencies are told too long. Use a smaller "
            "load, or more clients."
        )
    elif is_long and health.lag_p99_ms > MAX_LAG_P99_MS:
        yield (
            f"The client came to its events {health.lag_p99_ms:.1f} ms late (p99) though it used "
            f"{health.cpu_share:.0%} of a core: its machine was busy, and latencies are told too long. Use "
            "another machine for the client."
        )
    if health.num_late and is_capped:
        yield (
            f"{health.num_late} requests were sent up to {health.max_late_ms:.0f} ms late, because "
            "--max-concurrency were in flight: the rate that was asked for was not reached."
        )
    elif health.num_late:
        yield f"{health.num_late} requests were sent up to {health.max_late_ms:.0f} ms late."
