"""Whether the load test's own process keeps up: how late its event loop is, how much of a core it uses.

Not here: the values that the report shows (`gateway/bench/run_info.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic, process_time
from typing import Final

import msgspec

from gateway.bench.percentiles import Distribution
from gateway.bench.phrases import counted
from gateway.bench.run_info import ClientHealth
from gateway.bench.sample import Sample

_TICK_S: Final = 0.01
_MIN_S: Final = 0.5  # of a shorter run, the beginning alone is most of the CPU
# A loop that is this late stamps frames that much too late; timers alone are late by up to 1 ms.
MAX_LAG_P99_MS: Final = 10.0
MAX_CPU_SHARE: Final = 0.85
# Of a core, while the loop was late. A loop that waits for a busy machine uses next to nothing; one that has
# much to do may have to share its core.
_OWN_SHARE: Final = 0.25
LATE_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a meter has seen of the loop. Shares are of one core.

    `lags_s`: how late the loop was, at times that lie a tick apart also while it was held up; `own_share`:
    what this process used while it was late.
    """

    lasted_s: float
    cpu_share: float
    lags_s: Sequence[float]
    own_share: float = 0.0


class HealthMeter:
    """Measures the loop that it was started in, until `stop`.

    The clocks are in seconds: of what passes, and of the CPU that this process uses.
    """

    def __init__(
        self, clock: Callable[[], float] = monotonic, cpu_clock: Callable[[], float] = process_time
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._loop = asyncio.get_running_loop()
        self._lags_s: list[float] = []
        self._late_s = self._late_cpu_s = 0.0
        self._began_s, self._began_cpu_s = clock(), cpu_clock()
        self._ticked_s, self._ticked_cpu_s = self._began_s, self._began_cpu_s
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._look()
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _look(self) -> None:
        now_s, cpu_s = self._clock(), self._cpu_clock()
        lag_s = now_s - self._ticked_s - _TICK_S
        if lag_s > _TICK_S:
            self._late_s += now_s - self._ticked_s
            self._late_cpu_s += cpu_s - self._ticked_cpu_s
        self._ticked_s, self._ticked_cpu_s = now_s, cpu_s
        self._lags_s.append(max(0.0, lag_s))
        # A loop that was held up for a second has missed a hundred ticks, not one.
        while (lag_s := lag_s - _TICK_S) > 0:
            self._lags_s.append(lag_s)

    def stop(self) -> Pulse:
        self._timer.cancel()
        if self._clock() - self._ticked_s > 2 * _TICK_S:
            self._look()  # it is held up at this moment
        lasted_s = self._clock() - self._began_s
        return Pulse(
            lasted_s=lasted_s,
            cpu_share=(self._cpu_clock() - self._began_cpu_s) / max(lasted_s, 1e-9),
            lags_s=self._lags_s,
            own_share=self._late_cpu_s / self._late_s if self._late_s else 0.0,
        )


def client_health(
    pulse: Pulse,
    samples: Sequence[Sample],
    is_open: bool = False,
    is_capped: bool = False,
    num_left_out: int = 0,
    max_behind_s: float = 0.0,
) -> ClientHealth:
    """What is told of the client, with a sentence for each thing that spoils the measurement.

    `samples` of an open loop tell how late requests were sent. It leaves out arrivals that it is over
    `max_behind_s` late for, of which there were `num_left_out`.
    """
    lags_ms = Distribution.of([lag * 1000 for lag in pulse.lags_s] or [0.0])
    late_s = [sample.sent_s - sample.due_s for sample in samples] if is_open else []
    health = ClientHealth(
        cpu_share=round(pulse.cpu_share, 3),
        lag_p50_ms=round(lags_ms.at(50), 3),
        lag_p99_ms=round(lags_ms.at(99), 3),
        lag_max_ms=round(lags_ms.at(100), 3),
        max_late_ms=round(max(late_s, default=0.0) * 1000, 3),
        num_late=sum(late > LATE_S for late in late_s),
    )
    of_the_schedule = _of_the_schedule(health, is_capped, num_left_out, max_behind_s)
    notes = (*_of_the_loop(health, pulse), *of_the_schedule)
    return msgspec.structs.replace(health, notes=notes)


def _of_the_loop(health: ClientHealth, pulse: Pulse) -> Iterator[str]:
    if pulse.lasted_s < _MIN_S:
        return
    late = f"came to its events {health.lag_p99_ms:.1f} ms late (p99)"
    if health.cpu_share > MAX_CPU_SHARE:
        yield (
            f"The client was the bottleneck: it used {health.cpu_share:.0%} of a core and {late}, "
            "so that latencies are told too long. Use a smaller load, or more clients."
        )
    elif health.lag_p99_ms > MAX_LAG_P99_MS and pulse.own_share > _OWN_SHARE:
        yield (
            f"The client {late}, for it had much to do at once, as when many requests begin together: "
            "latencies of that time are told too long. Use --ramp-s, a smaller load, or more clients."
        )
    elif health.lag_p99_ms > MAX_LAG_P99_MS:
        yield (
            f"The client {late} though it used {health.cpu_share:.0%} of a core: its machine was busy, and "
            "latencies are told too long. Use another machine for the client."
        )


def _of_the_schedule(
    health: ClientHealth, is_capped: bool, num_left_out: int, max_behind_s: float
) -> Iterator[str]:
    if health.num_late and is_capped:
        yield (
            f"{counted(health.num_late, 'request')} went out up to {health.max_late_ms:.0f} ms late, because "
            "--max-concurrency were in flight: the rate that was asked for was not reached."
        )
    elif health.num_late:
        yield f"{counted(health.num_late, 'request')} went out up to {health.max_late_ms:.0f} ms late."
    if num_left_out:
        yield (
            f"{counted(num_left_out, 'arrival')} had to be left out, for the client was over "
            f"{max_behind_s:g} s behind: the rate that was asked for was not reached. Use a lower rate, or "
            "more clients."
        )
