"""The clock of all open requests: limits of each, one's fault not the others', gauges."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from gateway import watch
from gateway.answer import AnswerLimits
from gateway.exchange import ABORT_EXTENSION, Exchange
from gateway.metrics import Metrics
from gateway.watch import OpenRequests
from pipeline.errors import Draining
from tests.gateway.answering import Case, turns, until
from tests.gateway.asgi import Request
from tests.gateway.test_answer import MASK


class Watched:
    """An answer among the open requests, its connection recorded."""

    def __init__(self, requests: OpenRequests, **options: object) -> None:
        self.case = Case(**options).start()  # type: ignore[arg-type]
        self.cuts: list[bool] = []
        request = Request(extensions={ABORT_EXTENSION: lambda: self.cuts.append(True)})
        self.exchange = Exchange(request.scope, request.receive, request.send, 1 << 16)
        self.exchange.outlet = self.case.outlet
        self.exchange.on_gone = self.case.answer.client_gone
        requests.add(self.exchange, self.case.answer)


@pytest.fixture
def requests() -> OpenRequests:
    return OpenRequests(Metrics())


async def test_every_open_answer_is_looked_at(requests: OpenRequests) -> None:
    watched = [Watched(requests, limits=AnswerLimits(queue_s=60, heartbeat_s=1e6)) for _ in range(3)]
    requests.look(100.0)
    requests.look(159.0)
    assert not any(each.case.answer.is_ended for each in watched)
    requests.look(161.0)
    assert [each.case.client.status for each in watched] == [504] * 3
    requests.look(162.0)  # ended ones do no harm
    assert len(requests) == 3
    for each in watched:
        requests.remove(each.exchange)
        requests.remove(each.exchange)
    assert len(requests) == 0


async def test_a_client_that_does_not_read_is_cut(requests: OpenRequests) -> None:
    one = Watched(requests, limits=AnswerLimits(slow_reader_s=30, request_s=1e9, stall_s=1e9))
    one.case.streams[0].say("a")
    one.case.client.stops_reading()
    one.case.streams[0].say("b")
    await turns()
    since_s = one.case.outlet.blocked_since_s
    assert since_s is not None
    requests.look(since_s + 29)
    assert one.cuts == []
    requests.look(since_s + 31)
    assert one.cuts == [True]
    assert one.case.streams[0].is_aborted
    assert one.case.record.ended == "client_closed"
    requests.look(since_s + 32)
    assert one.cuts == [True]
    await turns()


async def test_a_client_that_does_not_read_the_end_is_cut_too(requests: OpenRequests) -> None:
    one = Watched(requests, limits=AnswerLimits(slow_reader_s=30))
    one.case.client.stops_reading()
    one.case.streams[0].say("b", "stop")
    await turns()
    assert one.case.record.ended == "complete"
    since_s = one.case.outlet.blocked_since_s
    assert since_s is not None
    requests.look(since_s + 31)
    assert one.cuts == [True]
    assert one.case.record.ended == "client_closed"
    await turns()


async def test_one_answers_fault_ends_that_one_alone(
    requests: OpenRequests, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = Watched(requests), Watched(requests, limits=AnswerLimits(queue_s=60))

    message = "-".join(["a", "text"])  # so that no line of the traceback has it

    def check(now_s: float) -> None:
        raise KeyError(message)

    monkeypatch.setattr(broken.case.answer, "check", check)
    with caplog.at_level(logging.ERROR):
        requests.look(100.0)
        requests.look(161.0)
    assert broken.case.client.status == 500
    assert broken.case.streams[0].is_aborted
    assert sound.case.client.status == 504
    assert message not in caplog.text
    assert "KeyError" in caplog.text


async def test_all_can_be_ended_with_a_named_error(requests: OpenRequests) -> None:
    begun, waiting = Watched(requests), Watched(requests)
    begun.case.streams[0].say("a")
    requests.fail_all(Draining("The server is shutting down; the answer was cut off."))
    assert begun.case.client.chunks[-1]["error"]["code"] == "draining"
    assert not begun.case.client.is_done
    assert waiting.case.client.status == 503
    assert begun.case.streams[0].is_aborted
    assert waiting.case.streams[0].is_aborted


async def test_gauges_show_open_requests_and_buffers() -> None:
    metrics = Metrics()
    requests = OpenRequests(metrics)
    one = Watched(requests)
    one.case.streams[0].say("a")
    one.case.client.stops_reading()
    for _ in range(3):
        one.case.streams[0].say("b")
    requests.publish()
    value = metrics.registry.get_sample_value
    assert value("headrace_open_requests") == 1
    waiting = one.case.outlet.num_buffered
    assert waiting > 0
    assert value("headrace_buffered_bytes") == value("headrace_buffered_peak_bytes") == waiting
    another = Watched(requests)  # as two responses of one conversation
    another.exchange.outlet = one.case.outlet
    requests.publish()
    assert value("headrace_open_requests") == 2
    assert value("headrace_buffered_bytes") == waiting
    one.case.client.reads_again()
    await asyncio.wait_for(one.case.outlet.flushed(), 5)
    requests.remove(one.exchange)
    requests.remove(another.exchange)
    requests.publish()
    assert (value("headrace_open_requests"), value("headrace_buffered_bytes")) == (0, 0)
    assert value("headrace_buffered_peak_bytes") == waiting


async def test_the_clock_looks_and_publishes_until_it_is_cancelled(
    requests: OpenRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PERIOD_S", 0.0)
    published = asyncio.Event()
    one = Watched(requests, limits=AnswerLimits(queue_s=1))  # long ago, by the real clock
    one.case.answer._started_s = -1e9
    task = asyncio.create_task(requests.watch(published.set))
    await asyncio.wait_for(published.wait(), 5)
    assert one.case.answer.is_ended
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_gauges_that_fail_do_not_stop_the_clock(
    requests: OpenRequests, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.watch.PERIOD_S", 0.001)
    looks = 0

    def look(now_s: float) -> None:
        nonlocal looks
        looks += 1

    def publish() -> None:
        raise OSError("disk full")

    monkeypatch.setattr(requests, "look", look)
    with caplog.at_level(logging.ERROR):
        task = asyncio.create_task(requests.watch(publish))
        await until(lambda: looks > 40)
        task.cancel()
        await asyncio.wait([task])
    assert "OSError" in caplog.text


async def test_the_clock_looks_at_other_things_too_and_a_fault_in_one_stops_none(
    requests: OpenRequests, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "PERIOD_S", 0.0)
    monkeypatch.setattr(watch, "monotonic", lambda: 12.5)
    message = "-".join(["a", "text"])  # so that no line of a traceback has it
    seen: list[tuple[str, float]] = []

    def broken(now_s: float) -> None:
        seen.append(("broken", now_s))
        raise KeyError(message)

    monkeypatch.setattr(requests, "look", lambda now_s: seen.append(("requests", now_s)))
    published = asyncio.Event()
    with caplog.at_level(logging.ERROR):
        looks = (broken, lambda now_s: seen.append(("last", now_s)))
        task = asyncio.create_task(requests.watch(published.set, looks))
        await asyncio.wait_for(published.wait(), 5)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])
    round_ = [("requests", 12.5), ("broken", 12.5), ("last", 12.5)]
    assert seen[:30] == round_ * watch.PUBLISH_PERIODS
    assert caplog.text.count("unexpected KeyError") >= watch.PUBLISH_PERIODS
    assert message not in caplog.text


async def test_a_look_that_is_added_later_is_taken_too(
    requests: OpenRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the app adds that of its readers."""
    monkeypatch.setattr(watch, "PERIOD_S", 0.0)
    looked = asyncio.Event()
    looks: list[Callable[[float], None]] = []
    task = asyncio.create_task(requests.watch(lambda: None, looks))
    await turns()
    looks.append(lambda now_s: looked.set())
    await asyncio.wait_for(looked.wait(), 5)
    task.cancel()
    await asyncio.wait([task])


async def test_what_was_counted_last_is_kept_when_the_clock_ends() -> None:
    metrics = Metrics()
    task = asyncio.create_task(OpenRequests(metrics).watch(lambda: None))
    await asyncio.sleep(0)
    metrics.stage_took("parse", 0.001)
    task.cancel()
    await asyncio.wait([task])
    assert metrics.registry.get_sample_value("headrace_stage_seconds_count", {"stage": "parse"}) == 1


async def test_an_answer_is_looked_at_again_when_a_limit_can_be_passed_and_not_before(
    requests: OpenRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = AnswerLimits(queue_s=60, stall_s=30, heartbeat_s=1e6, slow_reader_s=1e6, request_s=1e9)
    one = Watched(requests, limits=limits)
    looks: list[float] = []
    check = one.case.answer.check

    def checked(now_s: float) -> None:
        looks.append(now_s)
        check(now_s)

    monkeypatch.setattr(one.case.answer, "check", checked)
    start_s = one.case.engine.now_s
    one.case.streams[0].say("a")
    ticks = [start_s + tick / 10 for tick in range(302)]
    for now_s in ticks:
        requests.look(now_s)
        assert one.case.answer.is_ended == (now_s - start_s > 30)
    assert len(looks) < 40  # about one a second
    assert max(b - a for a, b in pairwise(looks)) < 1.2


async def test_a_client_that_stops_reading_is_looked_at_every_time(
    requests: OpenRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Watched(requests, limits=AnswerLimits(stall_s=1e9, request_s=1e9, slow_reader_s=1e9))
    looks: list[float] = []
    monkeypatch.setattr(one.case.answer, "check_reader", looks.append)
    one.case.streams[0].say("a")
    one.case.client.stops_reading()
    one.case.streams[0].say("b")
    for tick in range(10):
        requests.look(one.case.engine.now_s + tick / 10)
    assert len(looks) == 10
    one.case.client.reads_again()
    await turns()


@pytest.mark.parametrize("seed", range(40))
async def test_limits_end_answers_when_they_would_if_each_was_checked_at_every_tick(
    requests: OpenRequests, seed: int
) -> None:
    """The same tokens at the same times; heartbeats aside, which may come later by one gap of the checks."""
    rng = random.Random(seed)
    limits = AnswerLimits(queue_s=4, stall_s=3, hold_s=1, request_s=20, heartbeat_s=1e6, slow_reader_s=1e6)
    watched = Watched(requests, limits=limits, rules=[MASK])
    looked, checked = watched.case, Case(limits=limits, rules=[MASK]).start()
    for _ in range(220):
        if rng.random() < (0.1 if seed % 2 else 0.7):
            text = rng.choice(["a", "敏", "\u200b", "b敏", "觉"])
            for case in (looked, checked):
                if not case.answer.is_ended:
                    case.streams[0].say(text)
        for case in (looked, checked):
            case.engine.now_s += 0.1
        requests.look(looked.engine.now_s)
        if not checked.answer.is_ended:
            checked.answer.check(checked.engine.now_s)
        assert looked.client.body == checked.client.body
    assert looked.answer.is_ended
