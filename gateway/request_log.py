"""One JSON line per request, without text: who, what, how long, and who ended it.

A thread writes the lines, since whoever reads our standard output may stop reading: a full pipe must not stop
the streams. Lines that find the queue full are lost and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

import msgspec

logger = logging.getLogger("headrace.request_log")

MAX_WAITING_LINES: Final = 10_000  # about 5 MB
FLUSH_LIMIT_S: Final = 2.0
GATHER_S: Final = 0.05  # what a crash can lose
MAX_BATCH: Final = 256

_encode = msgspec.json.Encoder().encode


class RequestLog:
    """Writes lines to a text stream; a broken or stuck stream loses lines, never a request.

    Lines leave together, `GATHER_S` after the first of them: to wake the thread for each would cost the event
    loop, which waits for the GIL, as much as the line itself.
    """

    def __init__(self, stream: TextIO, max_waiting_lines: int = MAX_WAITING_LINES) -> None:
        self._stream = stream
        self._max_waiting_lines = max_waiting_lines
        self._lines: queue.SimpleQueue[Mapping[str, Any] | threading.Event] = queue.SimpleQueue()
        self._is_urgent = threading.Event()
        self.num_lost = 0
        self._has_told = False
        threading.Thread(target=self._run, name="request log", daemon=True).start()

    def write(self, fields: Mapping[str, Any]) -> None:
        """Hand a line to the thread. Never waits."""
        if self._lines.qsize() >= self._max_waiting_lines:
            self.num_lost += 1
        else:
            self._lines.put(fields)

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
        self._lines.put(written)
        self._is_urgent.set()
        written.wait(limit_s)

    def _run(self) -> None:
        while True:
            first = self._lines.get()
            self._is_urgent.wait(GATHER_S)
            self._is_urgent.clear()
            self._write([first, *(self._lines.get() for _ in range(min(self._lines.qsize(), MAX_BATCH - 1)))])

    def _write(self, batch: Sequence[Mapping[str, Any] | threading.Event]) -> None:
        """A batch, in order; whoever waits is told when what came before is written."""
        lines: list[Mapping[str, Any]] = []
        for each in batch:
            if isinstance(each, threading.Event):
                self._write_lines(lines)
                lines = []
                each.set()
            else:
                lines.append(each)
        self._write_lines(lines)

    def _write_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if not lines:
            return
        try:
            self._stream.write("".join([_encode(line).decode() + "\n" for line in lines]))
            self._stream.flush()
        except (OSError, ValueError):
            self.num_lost += len(lines)
