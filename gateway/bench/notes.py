"""Sentences about a load that is not quite what was asked for.

Not here: those about the client's own health (`gateway/bench/health.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from gateway.bench.options import BenchOptions
from gateway.bench.phrases import counted
from gateway.bench.prompts import Measure
from gateway.bench.sample import INTERRUPTED, Sample

_MAX_OFF: Final = 0.02
_MAX_CACHED: Final = 0.1  # of the prompts' tokens, beyond what they are meant to share
_LENGTHS: Final = frozenset(("n", "max_tokens", "max_completion_tokens"))  # what says how long answers may be


def notes_of_load(
    samples: Sequence[Sample],
    options: BenchOptions,
    measure: Measure,
    steady_until_s: float | None = None,
) -> tuple[str, ...]:
    """What a reader has to know about prompts, answers, and failures outside of what is measured."""
    return (*_notes(samples, options, measure), *_failures(samples, steady_until_s))


def _notes(samples: Sequence[Sample], options: BenchOptions, measure: Measure) -> Iterator[str]:
    ok = [sample for sample in samples if sample.error is None]
    if options.data is None and measure.source == "assumed":
        yield (
            "The server tells no usage that grows with a prompt: they have about as many tokens as wanted "
            f"({measure.tokens_per_word:g} for each word)."
        )
    if options.records and len(samples) > (once := sum(len(record.turns) for record in options.records)):
        yield f"The file has {counted(once, 'request')}, sent more than once: a prefix cache may know them."
    yield from _prompts(ok)
    yield from _cached(ok, options, measure)
    yield from _answers(ok, options)


def _failures(samples: Sequence[Sample], steady_until_s: float | None) -> Iterator[str]:
    """The report lists those of measured requests; the exit code is of all."""
    until_s = math.inf if steady_until_s is None else steady_until_s
    warm_up = [each for each in samples if each.is_warm_up]
    drain = [each for each in samples if not each.is_warm_up and each.sent_s >= until_s]
    for name, chosen in (("warm-up requests", warm_up), ("requests after the measured time", drain)):
        failed = [each for each in chosen if each.error not in (None, INTERRUPTED)]
        if failed:
            kinds = Counter(each.error for each in failed)
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            yield f"{len(failed)} of {len(chosen)} {name} failed: {counts}. The first: {failed[0].detail}"


def _prompts(ok: Sequence[Sample]) -> Iterator[str]:
    first = [each for each in ok if each.turn == 0 and each.prompt_tokens_wanted and each.prompt_tokens]
    wanted = sum(each.prompt_tokens_wanted for each in first)
    counted = sum(each.prompt_tokens or 0 for each in first)
    if wanted and abs(counted - wanted) > _MAX_OFF * wanted:
        mean, wanted_mean = counted / len(first), wanted / len(first)
        yield f"Prompts had {mean:.0f} tokens on average, where {wanted_mean:.0f} were wanted."


def _cached(ok: Sequence[Sample], options: BenchOptions, measure: Measure) -> Iterator[str]:
    """Of first turns: a later one finds its own conversation. A template's beginning is in all prompts."""
    first = [each for each in ok if each.turn == 0 and each.cached_tokens is not None and each.prompt_tokens]
    total = sum(each.prompt_tokens or 0 for each in first)
    cached = sum(each.cached_tokens or 0 for each in first)
    meant = min(total, (options.shape.prefix_tokens + measure.overhead) * len(first))
    if not total or cached - meant <= _MAX_CACHED * total:
        return
    had = f"The server had {cached / total:.0%} of the tokens of first prompts in its prefix cache"
    if options.records:
        yield f"{had}: prompts of the file have the same beginnings, or it has had them in an earlier run."
    else:
        yield (
            f"{had}, where shared prefixes make up {meant / total:.0%}: it has had these prompts in an "
            "earlier run, and would be slower on new ones."
        )


def _answers(ok: Sequence[Sample], options: BenchOptions) -> Iterator[str]:
    told = [each for each in ok if each.output_tokens is not None and each.output_tokens_wanted]
    num_short = sum((each.output_tokens or 0) < each.output_tokens_wanted for each in told)
    num_long = sum((each.output_tokens or 0) > each.output_tokens_wanted for each in told)
    if num_short and options.ignores_eos:
        yield (
            f"{counted(num_short, 'answer')} came out shorter than wanted: the server does not obey "
            "ignore_eos."
        )
    if num_long and not _LENGTHS & options.extra_body.keys():
        yield (
            f"{counted(num_long, 'answer')} came out longer than asked for, by the server's own count: it "
            "does not obey max_tokens, or it does not count rightly."
        )
