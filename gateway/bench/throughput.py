"""How much came per second in the steady window, and how many requests were under way at once.

What counts is when it came, not whose it was: a token of a request that was sent during warm-up is one that
the server made in the window. Without warm-up and drain that is the whole run, as `vllm bench serve` counts.
Of a request that failed nothing counts, but for concurrency; of one that the end of the run cut off, the
tokens that had come. Not here: latencies (`gateway/bench/latencies.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec

from gateway.bench.bounds import Amount
from gateway.bench.latencies import num_tokens
from gateway.bench.sample import Sample


class Window(msgspec.Struct, frozen=True):
    """Seconds of the run: from (included) and until (excluded)."""

    from_s: float
    until_s: float

    @property
    def length_s(self) -> float:
        return max(0.0, self.until_s - self.from_s)

    def holds(self, time_s: float | None) -> bool:
        return time_s is not None and self.from_s <= time_s < self.until_s


class Throughput(msgspec.Struct, frozen=True):
    """All 0 in a window without length."""

    requests_per_s: Amount = 0.0  # that succeeded, and ended in it
    output_tokens_per_s: Amount = 0.0
    prompt_tokens_per_s: Amount = 0.0  # of the requests that ended in it
    total_tokens_per_s: Amount = 0.0


def throughput(samples: Iterable[Sample], window: Window, tokens_per_frame: float = 1.0) -> Throughput:
    """Of samples that succeeded or were cut off. `tokens_per_frame`: see `tokens_in`."""
    if not window.length_s:
        return Throughput()
    num_ended, num_prompt, num_output = 0, 0, 0.0
    for sample in samples:
        num_output += tokens_in(sample, window, tokens_per_frame)
        if sample.error is None and window.holds(sample.ended_s):
            num_ended += 1
            num_prompt += sample.prompt_tokens or 0
    each = [count / window.length_s for count in (num_ended, num_output, num_prompt, num_output + num_prompt)]
    return Throughput(*each)


def last_s(sample: Sample) -> float:
    """When the last that is known of it happened."""
    return max([sample.sent_s, sample.ended_s or 0.0, *sample.frames_s[-1:]])


def tokens_in(sample: Sample, window: Window, tokens_per_frame: float = 1.0) -> float:
    """The tokens that came in it: those of a request are spread over its frames evenly.

    `tokens_per_frame` is for one that ended before its server could tell how many tokens it has.
    """
    frames_s = sample.frames_s
    if not frames_s:
        return 0.0
    num_frames = bisect_left(frames_s, window.until_s) - bisect_left(frames_s, window.from_s)
    if sample.error is not None and sample.output_tokens is None:
        return num_frames * tokens_per_frame
    return num_tokens(sample) * num_frames / len(frames_s)


def concurrency(samples: Sequence[Sample], window: Window, until_s: float) -> tuple[float, int]:
    """Mean and peak of the requests under way in the window. One without an end was so until `until_s`."""
    changes: list[tuple[float, int]] = []
    total_s = 0.0
    for sample in samples:
        from_s = max(sample.sent_s, window.from_s)
        ended_s = min(until_s if sample.ended_s is None else sample.ended_s, window.until_s)
        if ended_s >= from_s:
            total_s += ended_s - from_s
            changes += [(from_s, 1), (ended_s, -1)]
    running = peak = 0
    for _, change in sorted(changes):  # at one time, ends come first
        running += change
        peak = max(peak, running)
    return (total_s / window.length_s if window.length_s else 0.0), peak
