import math

from gateway.bench.description import steady_window
from gateway.bench.figures import Measured, figures_of
from gateway.bench.sample import Sample
from gateway.bench.throughput import Throughput
from tests.gateway.bench.runs import run


def sample(sent_s: float, ended_s: float, **more: object) -> Sample:
    return Sample(number=0, due_s=sent_s, sent_s=sent_s, ended_s=ended_s, **more)  # type: ignore[arg-type]


def test_the_window_is_from_the_first_measured_request_until_after_the_last_was_sent() -> None:
    samples = [sample(0, 2, is_warm_up=True), sample(1, 3), sample(8, 10), sample(4, 6)]
    assert steady_window(samples) == (1, math.nextafter(8, 9))


def test_the_window_of_conversations_ends_when_the_last_one_began() -> None:
    """Its later turns are sent when the other users are gone."""
    samples = [sample(0, 2), sample(2, 3, turn=1), sample(6, 8), sample(8, 9, turn=1), sample(9, 10, turn=2)]
    assert steady_window(samples) == (0, math.nextafter(6, 7))


def test_a_load_that_is_mostly_drain_has_no_end_of_its_window() -> None:
    assert steady_window([sample(1, 9), sample(1.5, 10)]) == (1, None)


def test_a_load_that_was_cut_off_is_steady_until_its_end() -> None:
    samples = [sample(0, 5), sample(5, 6), sample(6, 6, error="interrupted")]
    assert steady_window(samples) == (0, None)


def test_a_load_that_ended_in_its_warm_up_has_measured_nothing() -> None:
    samples = [sample(0, 2, is_warm_up=True), sample(1, 3, is_warm_up=True, error="interrupted")]
    from_s, until_s = steady_window(samples)
    figures = figures_of(Measured(samples, run(duration_s=2.9, steady_from_s=from_s, steady_until_s=until_s)))
    assert (figures.num_requests, figures.num_outside, figures.window_s) == (0, 2, 0)
    assert figures.throughput == Throughput()
    assert figures.concurrency_mean == figures.concurrency_peak == 0


def test_a_load_without_requests_has_no_window() -> None:
    assert steady_window([]) == (0.0, None)
