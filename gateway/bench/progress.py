"""How a load test is getting on: one line on a terminal, a line each ten seconds elsewhere.

The load counts into a `Tally`, which costs next to nothing per frame; `ProgressLine` looks at it a few times
a second. Not here: the figures of the report (`gateway/bench/figures.py`).
"""

from __future__ import annotations

import shutil
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from typing import Final, TextIO

from gateway.bench.sample import Sample

MIN_INTERVAL_S: Final = 0.2
PLAIN_INTERVAL_S: Final = 10.0
RATE_SPAN_S: Final = 5.0  # rates are of the last so many seconds
_BAR_WIDTH: Final = 20


@dataclass(slots=True)
class Tally:
    """What has happened so far. `num_frames` is the load's to count up, frame by frame."""

    num_sent: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_frames: int = 0
    ttfts_ms: list[float] = field(default_factory=list)  # in order
    _frames_told: int = 0
    _tokens_told: int = 0

    def sent(self) -> None:
        self.num_sent += 1

    def ended(self, sample: Sample) -> None:
        """A request has ended, well or not."""
        self.num_ended += 1
        self.num_failed += sample.error is not None
        if sample.frames_s:
            insort(self.ttfts_ms, (sample.frames_s[0] - sample.sent_s) * 1e3)
        if sample.output_tokens is not None:
            self._frames_told += len(sample.frames_s)
            self._tokens_told += sample.output_tokens

    @property
    def num_tokens(self) -> float:
        """Frames, times the tokens per frame of the requests that have ended."""
        return self.num_frames * (self._tokens_told / self._frames_told if self._frames_told else 1.0)


class ProgressLine:
    """Call `tick` as often as you like, at least each 0.2 s; `close` at the end.

    `total`: how many requests there will be; `duration_s`: how long it will take. One of them, or neither.
    """

    def __init__(
        self,
        tally: Tally,
        out: TextIO,
        total: int | None = None,
        duration_s: float | None = None,
        is_terminal: bool | None = None,
    ) -> None:
        self._tally = tally
        self._out = out
        self._total = total
        self._duration_s = duration_s
        self._is_terminal = out.isatty() if is_terminal is None else is_terminal
        self._interval_s = MIN_INTERVAL_S if self._is_terminal else PLAIN_INTERVAL_S
        self._next_s = 0.0 if self._is_terminal else PLAIN_INTERVAL_S
        self._past: deque[tuple[float, int, float]] = deque([(0.0, 0, 0.0)])  # when, ended, tokens

    def tick(self, now_s: float) -> None:
        """`now_s`: seconds of the run, as in `Sample`."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        line = self.line(now_s)
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1  # in the last column the cursor would wrap
            self._out.write(f"\r{line[:width]}\x1b[K")
        else:
            self._out.write(line + "\n")
        self._out.flush()

    def close(self) -> None:
        """Clear the line on a terminal: the table follows."""
        if self._is_terminal:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def line(self, now_s: float) -> str:
        """What is shown now."""
        tally = self._tally
        requests_per_s, tokens_per_s = self._rates(now_s)
        parts = [
            self._done(now_s),
            f"{tally.num_sent - tally.num_ended} running",
            f"{requests_per_s:.1f} req/s",
            f"{tokens_per_s:.0f} tok/s",
        ]
        if ttfts_ms := tally.ttfts_ms:
            parts.append(f"TTFT p50 {ttfts_ms[len(ttfts_ms) // 2]:.0f} ms")
        if tally.num_failed:
            parts.append(f"{tally.num_failed} failed")
        return "  ".join(parts)

    def _done(self, now_s: float) -> str:
        if self._total:
            done, of = self._tally.num_ended / self._total, f"{self._tally.num_ended}/{self._total}"
        elif self._duration_s:
            done, of = now_s / self._duration_s, f"{now_s:.0f}/{self._duration_s:.0f} s"
        else:
            return f"{self._tally.num_ended} done in {now_s:.0f} s"
        if not self._is_terminal:
            return of
        full = min(_BAR_WIDTH, int(done * _BAR_WIDTH))
        return f"[{'#' * full}{'.' * (_BAR_WIDTH - full)}] {of}"

    def _rates(self, now_s: float) -> tuple[float, float]:
        """Requests and tokens a second, of the last few seconds."""
        past, tally = self._past, self._tally
        while len(past) > 1 and past[1][0] <= now_s - RATE_SPAN_S:
            past.popleft()
        then_s, num_ended, num_tokens = past[0]
        past.append((now_s, tally.num_ended, tally.num_tokens))
        span_s = now_s - then_s
        if span_s <= 0:
            return 0.0, 0.0
        return (tally.num_ended - num_ended) / span_s, max(0.0, tally.num_tokens - num_tokens) / span_s
