"""All figures of a run, of its samples: what the table, the JSON document and the page show.

Latencies and shares are of the requests that were sent in the steady window; rates are of what came in that
window, whoever's it was. An error frame and a truncated stream are failures like any other; what the end of
the run cut off is none, and its tokens up to then have come. Not here: how a figure is
computed (`latencies.py`, `throughput.py`, `goodput.py`, `percentiles.py`, `stages.py`), and how it is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf, nextafter
from typing import Final

import msgspec

from gateway.bench.bounds import Amount, Count, Share
from gateway.bench.goodput import Goodput, Limits, met
from gateway.bench.latencies import Latencies, frames_per_token, num_tokens, times_of
from gateway.bench.percentiles import Distribution, Spread
from gateway.bench.plausible import plausible
from gateway.bench.run_info import RunInfo
from gateway.bench.sample import INTERRUPTED, Sample
from gateway.bench.stages import stages_of
from gateway.bench.throughput import Throughput, Window, concurrency, last_s, throughput

# Without a limit of the user's, a gap is a stall if it is over so many times the median gap, and over what a
# screen shows as one frame (17 ms): nobody sees a shorter one. Deadlines for each token, from which this is
# simplified: Etalon's fluidity index, arXiv 2407.07000.
STALL_FACTOR: Final = 3.0
MIN_STALL_MS: Final = 20.0


class FigureOptions(msgspec.Struct, frozen=True):
    """`stall_ms`: the gap from which a token is stalled; None: relative to the median gap."""

    percents: tuple[float, ...] = (50, 90, 95, 99)
    limits_ms: Limits = {}
    stall_ms: float | None = None


DEFAULTS: Final = FigureOptions()


class Stalls(msgspec.Struct, frozen=True):
    """Tokens that came over `limit_ms` after the one before, and requests with at least one such."""

    limit_ms: Amount
    token_share: Share
    request_share: Share


class TurnFigures(msgspec.Struct, frozen=True):
    """Of the requests that were the same turn of their conversations."""

    turn: Count
    num_ok: Count
    ttft_ms: Spread
    cached_share: Amount | None


class Figures(msgspec.Struct, frozen=True):
    """Counts are of the measured requests. A spread is absent where there is nothing to measure."""

    num_requests: Count
    num_ok: Count
    num_failed: Count
    num_interrupted: Count
    num_outside: Count  # sent during warm-up or drain
    window_s: Amount
    latencies_ms: Mapping[str, Spread]  # ttft, ttft_from_due, tpot, tbt, e2e
    throughput: Throughput
    concurrency_mean: Amount
    concurrency_peak: Count
    prompt_tokens: Count
    output_tokens: Count
    has_usage: bool  # False: a server that told no usage; a frame is counted as a token
    frames_per_token: Amount | None
    cached_share: Amount | None  # of the prompt tokens
    stalls: Stalls | None
    goodput: Goodput | None
    lateness_ms: Spread  # of the client: from due to sent
    stages_ms: Mapping[str, Spread]  # the server's, by its own names
    added_ttft_ms: Spread  # the client's TTFT less the server's
    turns: tuple[TurnFigures, ...]  # none if there is only the first
    num_failed_outside: Count = 0  # of those that were sent during warm-up or drain


class Measured:
    """The samples of a run, sorted by what they count for."""

    def __init__(self, samples: Sequence[Sample], run: RunInfo) -> None:
        samples = plausible(samples)
        until_s = run.steady_until_s
        self.all = samples
        self.end_s = max([run.duration_s, *(last_s(each) for each in samples)])
        if until_s is None:
            until_s = nextafter(self.end_s, inf)  # what comes at the very end belongs to it
        self.window = Window(run.steady_from_s, until_s)
        self.inside = [each for each in samples if self._is_inside(each)]
        self.ok = [each for each in self.inside if each.error is None]
        self.failed = [each for each in self.inside if self.is_failure(each)]
        self.latencies = Latencies(self.ok)
        self.frames_per_token = frames_per_token(self.ok)
        self.tokens_per_frame = 1 / self.frames_per_token if self.frames_per_token else 1.0

    def _is_inside(self, sample: Sample) -> bool:
        return not sample.is_warm_up and self.window.holds(sample.sent_s)

    def is_failure(self, sample: Sample) -> bool:
        """Whether the report counts it as failed: measured, and not only cut off by the end of the run."""
        return sample.error not in (None, INTERRUPTED) and self._is_inside(sample)

    def times_ended_ms(self) -> Iterator[Mapping[str, float]]:
        """The times of each request that `Throughput.requests_per_s` counts: it ended in the window."""
        others = [each for each in self.all if each.error is None and not self._is_inside(each)]
        times_ms = (*self.latencies.times_ms, *(times_of(each) for each in others))
        for sample, each in zip((*self.ok, *others), times_ms, strict=True):
            if self.window.holds(sample.ended_s):
                yield each


def figures_of(measured: Measured, options: FigureOptions = DEFAULTS) -> Figures:
    ok, window, percents = measured.ok, measured.window, options.percents
    latencies = measured.latencies
    came = [each for each in measured.all if each.error in (None, INTERRUPTED)]
    num_all_failed = sum(each.error not in (None, INTERRUPTED) for each in measured.all)
    mean, peak = concurrency(measured.all, window, measured.end_s)
    stages_ms, added_ttft_ms = stages_of(ok, percents)
    num_failed = len(measured.failed)
    return Figures(
        num_requests=len(measured.inside),
        num_ok=len(ok),
        num_failed=num_failed,
        num_interrupted=len(measured.inside) - len(ok) - num_failed,
        num_outside=len(measured.all) - len(measured.inside),
        window_s=window.length_s,
        latencies_ms={
            name: each.spread(percents) for name, each in latencies.distributions.items() if len(each)
        },
        throughput=throughput(came, window, measured.tokens_per_frame),
        concurrency_mean=mean,
        concurrency_peak=peak,
        prompt_tokens=sum(each.prompt_tokens or 0 for each in ok),
        output_tokens=sum(num_tokens(each) for each in ok),
        has_usage=all(each.output_tokens is not None for each in ok),
        frames_per_token=measured.frames_per_token,
        cached_share=_cached_share(ok),
        stalls=_stalls(latencies, options.stall_ms),
        goodput=_goodput(measured, options.limits_ms),
        lateness_ms=Distribution.of((each.sent_s - each.due_s) * 1e3 for each in measured.inside).spread(
            percents
        ),
        stages_ms=stages_ms,
        added_ttft_ms=added_ttft_ms,
        turns=_turns(ok, percents),
        num_failed_outside=num_all_failed - num_failed,
    )


def _cached_share(samples: Sequence[Sample]) -> float | None:
    told = [each for each in samples if each.cached_tokens is not None and each.prompt_tokens]
    total = sum(each.prompt_tokens or 0 for each in told)
    return sum(each.cached_tokens or 0 for each in told) / total if total else None


def _stalls(latencies: Latencies, stall_ms: float | None) -> Stalls | None:
    gaps = latencies.distributions["tbt"]
    if not len(gaps):
        return None
    limit_ms = max(MIN_STALL_MS, STALL_FACTOR * gaps.at(50)) if stall_ms is None else stall_ms
    num_stalled = sum(each > limit_ms for each in latencies.max_gaps_ms)
    return Stalls(limit_ms, gaps.num_above(limit_ms) / len(gaps), num_stalled / len(latencies.max_gaps_ms))


def _goodput(measured: Measured, limits_ms: Limits) -> Goodput | None:
    """Interrupted requests count neither way."""
    if not limits_ms:
        return None
    all_met = [met(limits_ms, times_ms) for times_ms in measured.latencies.times_ms]
    num_judged = len(measured.ok) + len(measured.failed)
    is_good = [len(each) == len(limits_ms) for each in all_met]
    num_in_time = sum(len(met(limits_ms, each)) == len(limits_ms) for each in measured.times_ended_ms())
    length_s = measured.window.length_s

    def share(count: int) -> float:
        return count / num_judged if num_judged else 0.0

    return Goodput(
        limits_ms={name: float(limit) for name, limit in limits_ms.items()},
        share=share(sum(is_good)),
        requests_per_s=num_in_time / length_s if length_s else 0.0,
        shares={name: share(sum(name in each for each in all_met)) for name in limits_ms},
    )


def _turns(samples: Sequence[Sample], percents: Sequence[float]) -> tuple[TurnFigures, ...]:
    by_turn: dict[int, list[Sample]] = {}
    for sample in samples:
        by_turn.setdefault(sample.turn, []).append(sample)
    if len(by_turn) < 2:
        return ()
    return tuple(
        TurnFigures(turn, len(each), _ttft_ms(each).spread(percents), _cached_share(each))
        for turn, each in sorted(by_turn.items())
    )


def _ttft_ms(samples: Sequence[Sample]) -> Distribution:
    return Distribution.of((each.frames_s[0] - each.sent_s) * 1e3 for each in samples if each.frames_s)
