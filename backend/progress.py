"""Showing what a slow start is doing: a bar that redraws itself on a terminal, plain lines elsewhere.

Used while the embedded model is fetched and while an engine loads. What is shown goes to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, Protocol, TextIO

_BAR_CHARS: Final = 24
_REDRAW_S: Final = 0.1
_LINE_STEP: Final = 0.25  # without a terminal: one line per quarter, so that a log stays readable


class Progress(Protocol):
    """Told about stages, in order."""

    def stage(self, text: str) -> None:
        """A new stage begins; the one before it has ended."""

    def advance(self, done: int, total: int) -> None:
        """Bytes of the stage that are done. Call it as often as you like; also while nothing has changed."""

    def close(self) -> None:
        """Nothing more is shown."""


class StreamProgress:
    """Shows stages with the seconds since the start."""

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "headrace",
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._name = name
        self._start_s = clock()
        self._text: str | None = None
        self._drawn_s = float("-inf")
        self._next_share = _LINE_STEP
        self._is_terminal = self._stream.isatty()

    def stage(self, text: str) -> None:
        self.close()
        self._text = text
        self._next_share = _LINE_STEP
        if self._is_terminal:
            self._redraw("")
        else:
            self._write(self._line("") + "\n")

    def advance(self, done: int, total: int) -> None:
        share = min(done / total, 1.0) if total else 1.0
        if self._is_terminal:
            if self._clock() - self._drawn_s >= _REDRAW_S or share == 1.0:
                self._redraw(_bar(share, done, total))
        elif share >= self._next_share:
            self._next_share = (share // _LINE_STEP + 1) * _LINE_STEP
            self._write(self._line(f" {share:.0%} of {total / 1e6:.0f} MB") + "\n")

    def close(self) -> None:
        if self._text is not None and self._is_terminal:
            self._write("\n")
        self._text = None

    def _line(self, tail: str) -> str:
        return f"{self._name} {self._clock() - self._start_s:6.1f} s  {self._text}{tail}"

    def _redraw(self, tail: str) -> None:
        self._drawn_s = self._clock()
        self._write(f"\r\x1b[K{self._line(tail)}")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _bar(share: float, done: int, total: int) -> str:
    filled = int(share * _BAR_CHARS)
    bar = "#" * filled + "." * (_BAR_CHARS - filled)
    return f"  [{bar}] {share:4.0%}  {done / 1e6:.0f} of {total / 1e6:.0f} MB"
