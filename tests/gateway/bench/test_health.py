from dataclasses import dataclass

import pytest

from gateway.bench.health import HealthMeter, Pulse, client_health
from gateway.bench.run_info import ClientHealth
from gateway.bench.sample import Sample
from tests.gateway.bench.fake_server import until


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
    return client_health(pulse, samples, is_open, is_capped, num_left_out, max_behind_s=5.0)


def test_a_client_that_keeps_up_has_no_notes() -> None:
    made = health(0.123456, [0.001] * 99 + [0.5], (0.002, 0.009))
    assert (made.cpu_share, made.lag_p50_ms, made.lag_p99_ms, made.lag_max_ms) == (0.123, 1.0, 5.99, 500.0)
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


@dataclass
class Clocks:
    """They stand still but when a test moves them."""

    now_s: float = 50.0
    cpu_s: float = 7.0
    num_looks: int = 0

    def clock(self) -> float:
        self.num_looks += 1
        return self.now_s

    def cpu_clock(self) -> float:
        return self.cpu_s


async def held_up(lasted_s: float, cpu_s: float = 0.0, ticks_after: bool = True) -> Pulse:
    """What a meter has seen of a loop that did nothing else for so long."""
    clocks = Clocks()
    meter = HealthMeter(clocks.clock, clocks.cpu_clock)
    clocks.now_s += lasted_s
    clocks.cpu_s += cpu_s
    if ticks_after:
        num_looks = clocks.num_looks
        await until(lambda: clocks.num_looks > num_looks)
    return meter.stop()


@pytest.mark.parametrize("ticks_after", [True, False])
async def test_a_loop_that_is_held_up_is_measured(ticks_after: bool) -> None:
    pulse = await held_up(0.105, 0.021, ticks_after)
    # As late as a frame was that came at any time of it: each 10 ms, one lag.
    late_s = [lag_s for lag_s in pulse.lags_s if lag_s]
    assert late_s == pytest.approx([0.095 - 0.01 * number for number in range(10)])
    assert (pulse.lasted_s, pulse.cpu_share) == pytest.approx((0.105, 0.2))


async def test_a_loop_that_is_no_later_than_a_timer_is_not_held_up() -> None:
    pulse = await held_up(0.015, 0.015, ticks_after=False)
    assert (list(pulse.lags_s), pulse.own_share) == ([], 0.0)
    pulse = await held_up(0.015, 0.015)
    assert max(pulse.lags_s) == pytest.approx(0.005)
    assert pulse.own_share == 0.0


async def test_whose_work_held_the_loop_up_is_measured() -> None:
    assert (await held_up(0.1)).own_share == 0.0
    assert (await held_up(0.1, 0.06)).own_share == pytest.approx(0.6)
    assert (await held_up(0.1, 0.06, ticks_after=False)).own_share == pytest.approx(0.6)
