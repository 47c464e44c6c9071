"""Sentences about a load that is not quite what was asked for.

Not here: those about the client's own health (`gateway/bench/health.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gateway.bench.options import BenchOptions
from gateway.bench.prompts import Measure
from gateway.bench.sample import Sample

_MAX_OFF: Final = 0.02


def notes_of_load(samples: Sequence[Sample], options: BenchOptions, measure: Measure) -> tuple[str, ...]:
    """What a reader has to know about prompts and answers."""
    return tuple(_notes(samples, options, measure))


def _notes(samples: Sequence[Sample], options: BenchOptions, measure: Measure) -> Iterator[str]:
    ok = [sample for sample in samples if sample.error is None]
    if options.data is None and measure.source == "assumed":
        yield (
            "The server tells no usage, so that prompts have about as many tokens as wanted "
            f"({measure.tokens_per_word:g} for each word)."
        )
    if options.records and len(samples) > (once := sum(len(record.turns) for record in options.records)):
        yield f"The file has {once} requests, which were repeated: a prefix cache may know them."
    yield from _prompts(ok)
    yield from _answers(ok, options)


def _prompts(ok: Sequence[Sample]) -> Iterator[str]:
    first = [each for each in ok if each.turn == 0 and each.prompt_tokens_wanted and each.prompt_tokens]
    wanted = sum(each.prompt_tokens_wanted for each in first)
    counted = sum(each.prompt_tokens or 0 for each in first)
    if wanted and abs(counted - wanted) > _MAX_OFF * wanted:
        mean, wanted_mean = counted / len(first), wanted / len(first)
        yield f"Prompts had {mean:.0f} tokens on average, where {wanted_mean:.0f} were wanted."


def _answers(ok: Sequence[Sample], options: BenchOptions) -> Iterator[str]:
    short = [
        each
        for each in ok
        if each.output_tokens is not None and each.output_tokens < each.output_tokens_wanted
    ]
    if short and options.ignores_eos:
        yield f"{len(short)} answers were shorter than wanted: the server does not obey ignore_eos."
