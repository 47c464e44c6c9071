"""What is said of a load test that is over: its settings in words, its steady window, versions, machine.

Not here: the figures (`gateway/bench/figures.py`).
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from gateway.bench.notes import notes_of_load
from gateway.bench.options import BenchOptions
from gateway.bench.prepare import Prepared
from gateway.bench.run_info import ClientHealth, RunInfo
from gateway.bench.sample import INTERRUPTED, Sample
from gateway.bench.server_probe import ServerVersion
from gateway.bench.target import PATHS
from gateway.bench.throughput import last_s

# A window that is shorter than this share of what was measured says nothing of a steady state.
_MIN_STEADY_SHARE: Final = 0.5


def run_info_of(
    options: BenchOptions,
    prepared: Prepared,
    samples: Sequence[Sample],
    health: ClientHealth,
    started_at: str,
    was_stopped: bool,
) -> RunInfo:
    plan, shape, target = options.plan, options.shape, options.target
    steady_from_s, steady_until_s = steady_window(samples)
    notes = notes_of_load(samples, options, prepared.measure, steady_until_s)
    first_s = min((sample.due_s for sample in samples), default=0.0)
    last_s = max((sample.ended_s or 0.0 for sample in samples), default=first_s)
    return RunInfo(
        url=target.url,
        endpoint=target.prefix + PATHS[target.endpoint],
        model=prepared.maker.model,
        mode="open" if plan.is_open else "closed",
        rate=plan.rate,
        arrivals=plan.arrivals if plan.is_open else None,
        concurrency=plan.max_concurrency if plan.is_open else plan.users,
        prompt_lengths=shape.prompt.text if options.data is None else f"of {Path(options.data).name}",
        output_lengths=shape.output.text,
        seed=plan.seed,
        started_at=started_at,
        duration_s=last_s - first_s,
        steady_from_s=steady_from_s,
        steady_until_s=steady_until_s,
        ended_early=was_stopped,
        options=dict(_options_in_words(options, prepared)),
        versions=_versions(prepared.version),
        machine=_machine(),
        client=msgspec.structs.replace(health, notes=(*health.notes, *notes)),
    )


def steady_window(samples: Sequence[Sample]) -> tuple[float, float | None]:
    """From when the first measured request was sent until after the last conversation began: then the load
    drains, though later turns are still to be sent.

    A load that was cut off does not drain. One that ended before anything was measured has a window without
    length, at its end.
    """
    measured = [sample for sample in samples if not sample.is_warm_up]
    if not measured:  # it ended in its warm-up, whose rates are none of the load's
        return math.nextafter(max(map(last_s, samples)), math.inf) if samples else 0.0, None
    first_s = min(sample.sent_s for sample in measured)
    last_begun_s = max((sample.sent_s for sample in measured if sample.turn == 0), default=first_s)
    end_s = max(sample.ended_s or 0.0 for sample in samples)
    is_cut_off = any(sample.error == INTERRUPTED for sample in samples)
    drains = not is_cut_off and last_begun_s - first_s >= _MIN_STEADY_SHARE * (end_s - first_s)
    return first_s, math.nextafter(last_begun_s, math.inf) if drains else None


def _options_in_words(options: BenchOptions, prepared: Prepared) -> Iterator[tuple[str, str]]:
    plan, shape = options.plan, options.shape
    if shape.prefix_tokens:
        yield "shared prefix", f"{shape.prefix_tokens} tokens, {shape.num_prefixes} different"
    if shape.turns > 1:
        yield "turns", f"{shape.turns}, {plan.turn_gap_s:g} s apart"
    if plan.warm_up_requests or plan.warm_up_s:
        warm_up_s = f"{plan.warm_up_s:g} s"
        yield "warm-up", warm_up_s if plan.warm_up_s else f"{plan.warm_up_requests} requests"
    if plan.ramp_s:
        yield "ramp", f"{plan.ramp_s:g} s"
    if options.data is None:
        measure = prepared.measure
        yield (
            "tokens per word",
            f"{measure.tokens_per_word:.3f} ({measure.source}), {measure.overhead:.0f} added",
        )
        if shape.salt is None:
            yield "prompts", "the same in each run with this seed"
    if not options.ignores_eos:
        yield "answers", "may end earlier"
    if not options.keeps_alive:
        yield "connections", "one for each request"
    if options.extra_body:
        yield "extra body", ", ".join(options.extra_body)


def _versions(server: ServerVersion) -> dict[str, str]:
    versions = {"headrace": importlib.metadata.version("headrace"), "python": platform.python_version()}
    return versions if server.text is None else {**versions, "server": server.text}


def _machine() -> str:
    return f"{os.cpu_count()} x {_processor()}, {platform.system()} {platform.release()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
