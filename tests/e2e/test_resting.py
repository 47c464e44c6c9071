"""What tests hear about what a gateway holds: figures that waver are no rest, a difference has a name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import resting
from tests.processes import Process
from tests.stack import Gateway


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    """A process that only lives: its figures are the tests' own."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = Process("gateway", command, tmp_path / "gateway.log")
    try:
        yield Gateway(process, 0)
    finally:
        process.kill()


def show(monkeypatch: pytest.MonkeyPatch, *looks: dict[str, float]) -> None:
    """What each look sees; the last for ever."""
    left = list(looks)
    monkeypatch.setattr(resting, "held", lambda *_: left.pop(0) if len(left) > 1 else left[0])
    monkeypatch.setattr(resting, "LOOK_PERIOD_S", 0.0)


def test_rest_is_what_looks_in_a_row_agree_about(monkeypatch: pytest.MonkeyPatch, gateway: Gateway) -> None:
    busy = {"headrace_open_requests": 1.0, "descriptors": 15.0}
    one_more, rest = ({"headrace_open_requests": 0.0, "descriptors": number} for number in (16.0, 15.0))
    show(monkeypatch, busy, busy, busy, one_more, rest, one_more, one_more, rest, rest, rest)
    assert resting.at_rest(gateway, []) == rest


def test_what_is_not_given_back_is_named(monkeypatch: pytest.MonkeyPatch, gateway: Gateway) -> None:
    monkeypatch.setattr(resting, "LIMIT_S", 0.0)
    show(monkeypatch, {"tasks": 7.0, "descriptors": 16.0})
    with pytest.raises(AssertionError, match=r"^not as before: descriptors was 15\.0, is 16\.0\n"):
        resting.wait_until_held(gateway, [], {"tasks": 7.0, "descriptors": 15.0})


def test_what_comes_back_late_is_waited_for(monkeypatch: pytest.MonkeyPatch, gateway: Gateway) -> None:
    show(monkeypatch, {"descriptors": 16.0}, {"descriptors": 16.0}, {"descriptors": 15.0})
    resting.wait_until_held(gateway, [], {"descriptors": 15.0})


def test_a_gateway_that_ends_says_so(monkeypatch: pytest.MonkeyPatch, gateway: Gateway) -> None:
    gateway.process.kill()
    show(monkeypatch, {"descriptors": 16.0})
    with pytest.raises(AssertionError, match="exited with -9 before as before"):
        resting.wait_until_held(gateway, [], {"descriptors": 15.0})
