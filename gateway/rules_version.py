"""One version of the rules, compiled for both directions, and how it comes and goes beside running streams.

A request takes one version and keeps it to its end. Which version is current is `live_rules.py`'s business.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final

from filters.patterns import Patterns
from filters.rules import CHANNELS, RuleSet
from filters.scan import scan
from filters.stream import MAX_HOLD_CHARS, CompiledRules, OnMaxHold
from pipeline.seen_texts import MAX_BYTES, SeenTexts

# A thread that computes keeps the event loop waiting so long each time: Python's own 5 ms made every token 5
# ms late while 20,000 rules were compiled, this makes it 0.7 ms.
_SWITCH_INTERVAL_S: Final = 0.0005


@dataclass(frozen=True, slots=True)
class RuleOptions:
    """What holds for every version. `max_seen_bytes`: memory for scanned texts; 0 is none."""

    max_hold_chars: int = MAX_HOLD_CHARS
    hold_policy: OnMaxHold = "block"
    max_seen_bytes: int = MAX_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class RulesVersion:
    """A set of rules. `input` None: no rule is for input. `seen`: the texts that were scanned under it.

    `output`: for each channel; those with equal rules share one object.
    """

    number: int  # from 1, in one process
    fingerprint: str
    num_rules: int
    num_keywords: int
    input: Patterns | None
    seen: SeenTexts | None
    output: Mapping[str, CompiledRules]
    loaded_at_s: float  # since 1970
    compile_s: float

    def output_for(self, channel: str) -> CompiledRules:
        """The rules for one channel of the answer (`filters.rules.CHANNELS`)."""
        return self.output[channel]


def compile_rules(rules: RuleSet, options: RuleOptions, number: int) -> RulesVersion:
    """Rules ready for use, from any thread. Takes seconds for 50,000 rules."""
    started_s = time.monotonic()
    compiled: list[tuple[RuleSet, CompiledRules]] = []
    output = {
        channel: _compiled(rules.for_direction("output", channel), options, compiled) for channel in CHANNELS
    }
    input_rules = rules.for_direction("input")
    patterns: Patterns | None = None
    if len(input_rules):
        patterns = next((each for known, each in compiled if known == input_rules), None)
        patterns = patterns or Patterns(input_rules)
    if patterns is not None:
        scan(" ", patterns)  # builds what the first scan would otherwise build, on the event loop
    return RulesVersion(
        number=number,
        fingerprint=rules.fingerprint,
        num_rules=len(rules),
        num_keywords=rules.num_keywords,
        input=patterns,
        seen=SeenTexts(patterns, options.max_seen_bytes) if patterns and options.max_seen_bytes else None,
        output=output,
        loaded_at_s=time.time(),
        compile_s=time.monotonic() - started_s,
    )


def _compiled(
    rules: RuleSet, options: RuleOptions, compiled: list[tuple[RuleSet, CompiledRules]]
) -> CompiledRules:
    """Equal rules are compiled once."""
    for known, each in compiled:
        if known == rules:
            return each
    each = CompiledRules(rules, options.max_hold_chars, options.hold_policy)
    compiled.append((rules, each))
    return each


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """For work in a thread that must not disturb the event loop.

    Without the garbage collector: it would walk the million objects that are being made, again and again,
    while everything waits. They stay for long, so they are frozen at the end (see `settle_memory`).
    """
    interval_s, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
        sys.setswitchinterval(interval_s)


def discard_when_unused(version: RulesVersion, thread: Executor) -> None:
    """Free a version's memory in `thread`, once the last stream that ends on it has gone.

    Its nodes refer to each other in circles, and the garbage collector does not look at frozen objects. To
    free half a million of them on the event loop would take 100 ms.
    """
    parts = (version.input, *version.output.values())
    for patterns in {id(each): each for each in parts if each is not None}.values():
        finalizer = weakref.finalize(patterns, _discard_in, thread, dict(vars(patterns)))
        finalizer.atexit = False


def _discard_in(thread: Executor, parts: dict[str, Any]) -> None:
    with contextlib.suppress(RuntimeError):  # it was shut down: the process ends
        thread.submit(_discard, parts)


def _discard(parts: dict[str, Any]) -> None:
    with unnoticed():
        walk = parts.get("walk")
        for node in walk.nodes if walk is not None else ():
            node.clear()
        parts.clear()
