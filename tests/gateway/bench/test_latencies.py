import pytest

from gateway.bench.latencies import Latencies, times_of
from tests.gateway.bench.runs import sample


def test_the_times_of_one_request_are_those_that_it_has_among_others() -> None:
    samples = [
        sample(0),
        sample(1, frames_s=[0.5]),
        sample(2, frames_s=[0.5, 0.6, 0.9, 1.0], output_tokens=4),
    ]
    times_ms = [times_of(each) for each in samples]
    assert times_ms == Latencies(samples).times_ms
    assert times_ms[2]["tbt"] == pytest.approx(100 + 200 * 0.98)  # p99 of 100, 100 and 300
    assert "tbt" not in times_ms[1]
