import asyncio
import time

import pytest

from gateway.bench.health import HealthMeter, client_health
from gateway.bench.run_info import ClientHealth
from gateway.bench.sample import Sample


def health(
    cpu_share: float = 0.1,
    lags_s: list[float] | None = None,
    late_s: tuple[float, ...] = (),
    is_open: bool = True,
    is_capped: bool = False,
) -> ClientHealth:
    samples = [Sample(number=0, due_s=1.0, sent_s=1.0 + late) for late in late_s]
    return client_health(cpu_share, lags_s or [], samples, is_open, is_capped)


def test_a_client_that_keeps_up_has_no_notes() -> None:
    made = health(0.123456, [0.001] * 99 + [0.5], (0.002, 0.009))
    assert (made.cpu_share, made.lag_p50_ms, made.lag_p99_ms, made.lag_max_ms) == (0.123, 1.0, 500.0, 500.0)
    made = health(0.1, [0.001] * 999 + [0.5], (0.002, 0.009))
    assert (made.lag_p99_ms, made.lag_max_ms, made.max_late_ms, made.num_late) == (1.0, 500.0, 9.0, 0)
    assert made.notes == ()


@pytest.mark.parametrize(
    ("cpu_share", "lag_s", "told"),
    [
        (
            0.95,
            0.001,
            "The client was the bottleneck: it used 95% of a core and came to its events 1.0 ms late",
        ),
        (
            0.95,
            0.05,
            "The client was the bottleneck: it used 95% of a core and came to its events 50.0 ms late",
        ),
        (0.2, 0.05, "The client came to its events 50.0 ms late (p99) though it used 20% of a core"),
    ],
)
def test_a_client_that_does_not_keep_up_is_told(cpu_share: float, lag_s: float, told: str) -> None:
    (note,) = health(cpu_share, [lag_s] * 100).notes
    assert note.startswith(told)


def test_a_short_run_says_nothing_of_the_client() -> None:
    assert health(1.0, [0.5] * 49).notes == ()
    assert len(health(1.0, [0.5] * 50).notes) == 1


def test_late_requests_of_an_open_loop_are_told_with_the_cap_as_a_reason() -> None:
    made = health(late_s=(0.0, 0.02, 1.5))
    assert (made.num_late, made.max_late_ms) == (2, 1500.0)
    assert made.notes == ("2 requests were sent up to 1500 ms late.",)
    (note,) = health(late_s=(0.02,), is_capped=True).notes
    assert "because --max-concurrency were in flight" in note


def test_a_closed_loop_is_never_late() -> None:
    assert health(late_s=(5.0,), is_open=False).num_late == 0


async def test_a_loop_that_is_held_up_is_measured() -> None:
    meter = HealthMeter()
    await asyncio.sleep(0)
    began_s = time.monotonic()
    time.sleep(0.03)  # noqa: ASYNC251 (it is what is measured)
    held_ms = (time.monotonic() - began_s) * 1000
    await asyncio.sleep(0.001)
    made = meter.stop([], is_open=True)
    assert made.lag_max_ms >= 0.5 * held_ms
    assert made.cpu_share >= 0
