"""The times of single requests, and their distributions over a run. Milliseconds.

* `ttft`: from when the request is handed to the HTTP client to the first frame with output. On a new
  connection that holds TCP's handshake, and TLS's; on a kept one neither.
* `ttft_from_due`: the same from when the load's plan had it sent. A client that queues hides a server's
  slowness from `ttft` (coordinated omission), not from this.
* `tpot`: (last frame - first frame) / (output tokens - 1), of each request with at least two tokens, as
  `vllm bench serve` has it; guidellm calls it inter-token latency.
* `tbt`: every gap between two frames, of all requests together: vLLM's inter-token latency. Where a frame
  holds several tokens, it is the time between frames: `frames_per_token` says so.
* `e2e`: from the same moment as `ttft` to `[DONE]`, with which the answer is whole: not until the
  connection is free again.

Only of requests that succeeded. Not here: rates (`gateway/bench/throughput.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gateway.bench.percentiles import Distribution, GapCounts, gaps_us_of, percentile
from gateway.bench.sample import Sample

NAMES: Final = ("ttft", "ttft_from_due", "tpot", "tbt", "e2e")


class Latencies:
    """Of all samples given, one after the other; each must have succeeded."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.times_ms: list[dict[str, float]] = []  # of each request; `tbt` is the p99 of its gaps
        self.max_gaps_ms: list[float] = []
        gaps = GapCounts()
        for sample in samples:
            gaps_us = gaps.add(sample.frames_s)
            if gaps_us:
                self.max_gaps_ms.append(max(gaps_us) / 1e3)
            self.times_ms.append(_times_ms(sample, gaps_us))
        self.distributions = {
            name: Distribution.of(each[name] for each in self.times_ms if name in each) for name in NAMES
        }
        self.distributions["tbt"] = gaps.distribution()


def times_of(sample: Sample) -> Mapping[str, float]:
    """Of one that succeeded; `tbt` is the p99 of its gaps."""
    return _times_ms(sample, gaps_us_of(sample.frames_s))


def num_tokens(sample: Sample) -> int:
    """Its output tokens; where the server gave no usage, its frames."""
    return len(sample.frames_s) if sample.output_tokens is None else sample.output_tokens


def frames_per_token(samples: Sequence[Sample]) -> float | None:
    """Below 1, frames hold several tokens, or tokens have no text; None without usage."""
    told = [each for each in samples if each.output_tokens]
    tokens = sum(each.output_tokens or 0 for each in told)
    return sum(len(each.frames_s) for each in told) / tokens if tokens else None


def _times_ms(sample: Sample, gaps_us: Sequence[int]) -> dict[str, float]:
    times_s: dict[str, float] = {}
    if frames_s := sample.frames_s:
        times_s["ttft"] = frames_s[0] - sample.sent_s
        times_s["ttft_from_due"] = frames_s[0] - sample.due_s
        if (num_later := num_tokens(sample) - 1) > 0:
            times_s["tpot"] = (frames_s[-1] - frames_s[0]) / num_later
    if sample.ended_s is not None:
        times_s["e2e"] = sample.ended_s - sample.sent_s
    times_ms = {name: time_s * 1e3 for name, time_s in times_s.items()}
    if gaps_us:
        times_ms["tbt"] = percentile(gaps_us, 99) / 1e3
    return times_ms
