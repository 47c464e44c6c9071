"""One line of JSON a request; a log that cannot be written costs no request."""

from __future__ import annotations

import io
import json
import os

from gateway.request_log import RequestLog


def test_each_write_is_one_line_of_json() -> None:
    stream = io.StringIO()
    log = RequestLog(stream)
    log.write({"id": "a\nb", "time": 1.5, "finish": ["stop"], "key": None})
    log.write({"id": "é"})
    lines = stream.getvalue().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": "a\nb", "time": 1.5, "finish": ["stop"], "key": None},
        {"id": "é"},
    ]


def test_closed_stream_loses_lines_and_counts_them() -> None:
    stream = io.StringIO()
    stream.close()
    log = RequestLog(stream)
    log.write({"id": "a"})
    log.write({"id": "b"})
    assert log.num_lost == 2


def test_closed_pipe_loses_lines_and_counts_them() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w", buffering=1 << 16)
    log = RequestLog(stream)
    log.write({"id": "a"})
    assert log.num_lost == 1
    try:
        stream.close()
    except BrokenPipeError:
        assert stream.closed
