import asyncio
import time
from collections.abc import Callable

import pytest

from gateway.bench.health import HealthMeter, Pulse, client_health
from gateway.bench.run_info import ClientHealth
from gateway.bench.sample import Sample


def health(
    cpu_share: float = 0.1,
    lags_s: list[float] | None = None,
    late_s: tuple[float, ...] = (),
    is_open: bool = True,
    is_capped: bool = False,
    lasted_s: float = 1.0,
    own_share: float = 0.0,
    num_left_out: int = 0,
) -> ClientHealth:
    samples = [Sample(number=0, due_s=1.0, sent_s=1.0 + late) for late in late_s]
    pulse = Pulse(lasted_s, cpu_share, lags_s or [], own_share)
    return client_health(pulse, samples, is_open, is_capped, num_left_out)


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
    assert health(1.0, [0.5] * 49, lasted_s=0.49).notes == ()
    assert len(health(1.0, [0.5] * 49, lasted_s=0.5).notes) == 1


def test_a_loop_that_was_held_up_all_the_time_is_told() -> None:
    (note,) = health(1.0, [], lasted_s=9.0).notes
    assert note.startswith("The client was the bottleneck: it used 100% of a core")


def test_a_loop_that_was_held_up_by_its_own_burst_does_not_blame_the_machine() -> None:
    (note,) = health(0.3, [0.05] * 100, own_share=0.9).notes
    assert note.startswith("The client came to its events 50.0 ms late (p99), for it had much to do at once")
    (note,) = health(0.3, [0.05] * 100, own_share=0.2).notes
    assert "its machine was busy" in note


def test_late_requests_of_an_open_loop_are_told_with_the_cap_as_a_reason() -> None:
    made = health(late_s=(0.0, 0.02, 1.5))
    assert (made.num_late, made.max_late_ms) == (2, 1500.0)
    assert made.notes == ("2 requests went out up to 1500 ms late.",)
    (note,) = health(late_s=(0.02,), is_capped=True).notes
    assert note.startswith("1 request went out up to 20 ms late, because --max-concurrency were in flight")


def test_a_closed_loop_is_never_late() -> None:
    assert health(late_s=(5.0,), is_open=False).num_late == 0


def test_arrivals_that_were_left_out_are_told() -> None:
    (note,) = health(num_left_out=7).notes
    assert note.startswith("7 arrivals had to be left out, for the client was over 5 s behind")


async def held_up(hold: Callable[[], None], ticks_after: bool) -> Pulse:
    meter = HealthMeter()
    await asyncio.sleep(0)
    hold()
    if ticks_after:
        await asyncio.sleep(0.001)
    return meter.stop()


def work() -> None:
    began_s = time.process_time()
    while time.process_time() - began_s < 0.1:
        pass


@pytest.mark.parametrize("ticks_after", [True, False])
async def test_a_loop_that_is_held_up_is_measured(ticks_after: bool) -> None:
    pulse = await held_up(lambda: time.sleep(0.1), ticks_after)
    assert max(pulse.lags_s) >= 0.08
    # As late as a frame was that came at any time of it: each 10 ms, one lag.
    assert len(pulse.lags_s) >= 8
    assert sorted(pulse.lags_s)[-4] >= 0.05
    assert pulse.lasted_s >= 0.1


async def test_whose_work_held_the_loop_up_is_measured() -> None:
    assert (await held_up(lambda: time.sleep(0.1), True)).own_share < 0.25
    # A busy machine takes its share, but the work itself is all our own.
    pulse = await held_up(work, True)
    assert pulse.own_share * pulse.lasted_s >= 0.05
