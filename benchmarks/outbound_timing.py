"""How the benchmark of the way out takes time: CPU of the calling thread, over whole answers, several times.

A pass opens something new and feeds one answer to it, token by token. What is compared takes turns, so that
a busy moment of the machine strikes all. The loop around it is counted too (0.03 us a token). Not here: what
is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import thread_time_ns
from typing import Final, TypeVar

from benchmarks.outbound_texts import Spoken
from pipeline.model_text import ModelText
from pipeline.outbound import Outbound
from pipeline.outbound_plan import OutboundPlan, OutputRules, stop_matcher
from pipeline.values import EngineCall, Generation, Prompt

Token = TypeVar("Token", str, list[int])
Pass = Callable[[], float]  # does it once; returns microseconds a token

_NUM_WARM_UPS: Final = 1
_NUM_PROMPT_IDS: Final = 64


def feeding(open_feed: Callable[[], Callable[[Token], object]], tokens: Sequence[Token]) -> Pass:
    """Pass of a stage alone. `open_feed`: opens one and returns its `feed`."""

    def run() -> float:
        feed = open_feed()
        start_ns = thread_time_ns()
        for token in tokens:
            feed(token)
        return (thread_time_ns() - start_ns) / 1e3 / len(tokens)

    return run


def sending(open_outbound: Callable[[], Outbound], spoken: Spoken) -> Pass:
    """Pass of the whole way out, used as `gateway.token_choice` does; the end of the answer included."""

    def run() -> float:
        outbound = open_outbound()
        *chunks, last = spoken.chunks
        start_ns = thread_time_ns()
        for ids in chunks:
            outbound.feed(ids)
            if outbound.is_new_hold:
                pass
            if outbound.has_hits or outbound.failure is not None:
                outbound.take_hits()
        outbound.feed(last, "length")
        return (thread_time_ns() - start_ns) / 1e3 / len(spoken)

    return run


def in_turn(passes: Mapping[str, Pass], num_runs: int) -> dict[str, list[float]]:
    """Name -> microseconds a token, of each pass."""
    results: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(_NUM_WARM_UPS + num_runs):
        for name, run in passes.items():
            cost_us = run()
            if number >= _NUM_WARM_UPS:
                results[name].append(cost_us)
    return results


def ratio(slow: Sequence[float], quick: Sequence[float]) -> float:
    """How many times as much the first takes, by medians."""
    return median(slow) / median(quick)


class Way:
    """The way out of requests to one model."""

    def __init__(self, model: ModelText) -> None:
        self._model = model
        prompt = Prompt(memoryview(bytes(4 * _NUM_PROMPT_IDS)), _NUM_PROMPT_IDS, 0)
        self._call = EngineCall("", prompt, {}, 1 << 20)

    def plan(
        self,
        rules: OutputRules,
        stops: Sequence[str] = (),
        escape: Callable[[str], str] | None = None,
    ) -> OutboundPlan:
        """As the gateway makes it for a chat without tools."""
        generation = Generation({}, stop=tuple(stops))
        return OutboundPlan(
            vocabulary=self._model.vocabulary,
            generation=generation,
            stops=stop_matcher(generation),
            rules=lambda channel: rules,
            controls=self._model.controls,
            escape=escape,
        )

    def opener(self, plan: OutboundPlan) -> Callable[[], Outbound]:
        return lambda: plan.open(self._call)
