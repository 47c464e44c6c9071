"""One JSON line per request, without text: who, what, how long, and who ended it.

A thread writes the lines, since whoever reads our standard output may stop reading: a full pipe must not stop
the streams. Lines that find the queue full are lost and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from typing import Any, Final, TextIO

import msgspec

logger = logging.getLogger("headrace.request_log")

MAX_WAITING_LINES: Final = 10_000  # about 5 MB
FLUSH_LIMIT_S: Final = 2.0

_encode = msgspec.json.Encoder().encode


class RequestLog:
    """Writes lines to a text stream; a broken or stuck stream loses lines, never a request."""

    def __init__(self, stream: TextIO, max_waiting_lines: int = MAX_WAITING_LINES) -> None:
        self._stream = stream
        self._lines: queue.Queue[Mapping[str, Any] | threading.Event] = queue.Queue(max_waiting_lines)
        self.num_lost = 0
        self._has_told = False
        threading.Thread(target=self._run, name="request log", daemon=True).start()

    def write(self, fields: Mapping[str, Any]) -> None:
        """Hand a line to the thread. Never waits."""
        try:
            self._lines.put_nowait(fields)
        except queue.Full:
            self.num_lost += 1

    def take_lost(self) -> int:
        """How many lines were lost since the last call. The first ones are told in the server's log, once."""
        num_lost, self.num_lost = self.num_lost, 0
        if num_lost and not self._has_told:
            self._has_told = True
            logger.warning(
                "%d log lines were lost: whoever reads them is too slow, or its disk is full", num_lost
            )
        return num_lost

    def flush(self, limit_s: float = FLUSH_LIMIT_S) -> None:
        """Returns when all lines so far are written, or after the limit."""
        written = threading.Event()
        try:
            self._lines.put(written, timeout=limit_s)
        except queue.Full:
            return
        written.wait(limit_s)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                self._stream.write(_encode(line).decode() + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                self.num_lost += 1
