"""One line of JSON a request; a log that cannot be written, or is not read, costs no request."""

from __future__ import annotations

import io
import json
import os
import threading

from gateway.request_log import RequestLog


class StuckStream(io.StringIO):
    """Like a pipe that nobody reads: writing waits until `freed` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.freed = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.began.set()
        assert self.freed.wait(30)
        return super().write(text)


def test_each_write_is_one_line_of_json() -> None:
    stream = io.StringIO()
    log = RequestLog(stream)
    log.write({"id": "a\nb", "time": 1.5, "finish": ["stop"], "key": None})
    log.write({"id": "é"})
    log.flush()
    lines = stream.getvalue().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": "a\nb", "time": 1.5, "finish": ["stop"], "key": None},
        {"id": "é"},
    ]


def test_stuck_stream_costs_lines_past_the_bound_only() -> None:
    stream = StuckStream()
    log = RequestLog(stream, max_waiting_lines=2)
    log.write({"id": 0})
    assert stream.began.wait(30)  # the thread has taken it and waits
    for number in range(1, 6):
        log.write({"id": number})
    assert log.num_lost == 3
    stream.freed.set()
    log.flush()
    assert [json.loads(line)["id"] for line in stream.getvalue().splitlines()] == [0, 1, 2]


def test_flush_of_a_stuck_stream_gives_up() -> None:
    stream = StuckStream()
    log = RequestLog(stream)
    log.write({"id": 0})
    log.flush(limit_s=0.01)
    assert stream.getvalue() == ""
    stream.freed.set()
    log.flush()
    assert stream.getvalue() != ""


def test_closed_stream_loses_lines_and_counts_them() -> None:
    stream = io.StringIO()
    stream.close()
    log = RequestLog(stream)
    log.write({"id": "a"})
    log.write({"id": "b"})
    log.flush()
    assert log.num_lost == 2


def test_closed_pipe_loses_lines_and_counts_them() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w", buffering=1 << 16)
    log = RequestLog(stream)
    log.write({"id": "a"})
    log.flush()
    assert log.num_lost == 1
    try:
        stream.close()
    except BrokenPipeError:
        assert stream.closed


class CountingStream(io.StringIO):
    """Counts how often it was written to."""

    num_writes = 0

    def write(self, text: str) -> int:
        self.num_writes += 1
        return super().write(text)


def test_lines_that_come_together_leave_together_and_in_order() -> None:
    stream = CountingStream()
    log = RequestLog(stream)
    for number in range(100):
        log.write({"id": number})
    log.flush()
    assert [json.loads(line)["id"] for line in stream.getvalue().splitlines()] == list(range(100))
    assert stream.num_writes < 100


def test_flush_waits_for_what_came_before_it_only() -> None:
    stream = io.StringIO()
    log = RequestLog(stream)
    for number in range(3):
        log.write({"id": number})
        log.flush()
        assert len(stream.getvalue().splitlines()) == number + 1
