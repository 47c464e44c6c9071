"""What streaming filters hold back per token, the delay that this makes, and the memory that they need.

Held: raw characters after each token. Delay: at 50 tokens a second, from the token that brought a character
to the one at which it left, over all characters. Not here: what filters cost (`outbound_chain.py`).
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Protocol

from benchmarks.outbound_rivals import FixedWindow, PrefixFilter, RivalRules, Words
from benchmarks.outbound_rules import RulesFor
from benchmarks.outbound_stages import stream
from benchmarks.outbound_texts import PROSE, say
from benchmarks.report import Report, percentile
from filters.patterns import Patterns
from filters.rules import RuleSet
from filters.stream import CompiledRules
from filters.walk import Walk
from pipeline.model_text import ModelText

TOKENS_PER_S: Final = 50


class Holding(Protocol):
    """A streaming filter."""

    held: int
    released: int

    def feed(self, text: str) -> str: ...
    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Held:
    """By one filter of one text. `mean`, `peak`: characters; `delays_ms`: of each character."""

    mean: float
    peak: int
    delays_ms: Sequence[float]
    text: str  # what left

    @classmethod
    def by(cls, text_filter: Holding, pieces: Sequence[str]) -> Held:
        """Feeds it all."""
        held: list[int] = []
        delays_ms: list[float] = []
        out: list[str] = []
        born: list[int] = []  # the token of each character
        for number, piece in enumerate(pieces):
            born += [number] * len(piece)
            out.append(text_filter.feed(piece))
            held.append(text_filter.held)
            delays_ms += _delays(born[len(delays_ms) : text_filter.released], number)
        out.append(text_filter.flush())
        delays_ms += _delays(born[len(delays_ms) :], len(pieces) - 1)
        return cls(fmean(held), max(held), delays_ms, "".join(out))

    def report(self, report: Report, name: str) -> None:
        report.add(f"{name}_chars", self.mean, "characters held")
        report.add(f"{name}_peak_chars", self.peak, "characters at most")
        report.add(f"{name}_delay_ms", fmean(self.delays_ms), "ms more at 50 tok/s")
        report.add(f"{name}_delay_p99_ms", percentile(self.delays_ms, 0.99), "ms")


def _delays(born: Sequence[int], now: int) -> list[float]:
    return [(now - token) * 1000 / TOKENS_PER_S for token in born]


def report_holding(report: Report, model: ModelText, rules: RulesFor, num_tokens: int) -> None:
    """Ours beside the fixed window, which must let the same text out; and the goals, in characters."""
    for language in PROSE:
        pieces = say(model, language, num_tokens).pieces
        for num_rules in rules.counts:
            rule_set = rules.denied.first(num_rules)
            ours = Held.by(stream(rules(num_rules)), pieces)
            words = Words(rule_set, with_prefixes=False)
            window = Held.by(FixedWindow(words), pieces)
            if ours.text != window.text:
                raise RuntimeError("the fixed window lets something else out")
            name = f"{num_rules}_rules_{language}"
            ours.report(report, f"hold_{name}")
            window.report(report, f"window_{name}")
            if ours.mean:
                report.add(f"window_vs_hold_{name}", window.mean / ours.mean, "x, characters")
                delay = fmean(window.delays_ms) / fmean(ours.delays_ms)
                report.add(f"window_vs_hold_{name}_delay", delay, "x")
            if num_rules == rules.main:
                limit = {"zh": 1.2, "en": 2.5}[language]
                report.goal(f"hold_{language}_chars", ours.mean, limit, "characters")
        plain = CompiledRules(rules.denied.plain(rules.main))
        Held.by(stream(plain), pieces).report(report, f"hold_{rules.main}_plain_{language}")
        pii = rules(rules.main, with_pii=True)
        Held.by(stream(pii), pieces).report(report, f"hold_{rules.main}_pii_{language}")


def report_memory(report: Report, rules: RulesFor, counts: Sequence[int]) -> None:
    """What streams need of the rules: the graph, and pyahocorasick with prefixes."""
    for num_rules in counts:
        rule_set = rules.denied.first(num_rules)
        patterns = Patterns(rule_set)
        goto = traced_mib(lambda patterns=patterns: Walk(patterns.automaton))  # type: ignore[misc]
        prefixes = traced_mib(lambda rule_set=rule_set: _prefixes(rule_set))  # type: ignore[misc]
        report.add(f"goto_{num_rules}_rules_mib", goto, "MiB")
        report.add(f"prefixes_{num_rules}_rules_mib", prefixes, "MiB")
        report.add(f"goto_vs_prefixes_{num_rules}_rules_mib", goto / prefixes, "x")


def _prefixes(rules: RuleSet) -> RivalRules:
    return RivalRules.of(rules, PrefixFilter)


def traced_mib(build: Callable[[], object]) -> float:
    """MiB of what `build` returns and keeps; pyahocorasick's nodes are counted by Python too."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    built = build()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    del built
    return grown / (1 << 20)
