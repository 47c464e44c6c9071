"""What a scan of a client's text costs by the number of rules, in English and Chinese.

Each text has 1,000 characters and is scanned by itself, folding included; nothing is found. The rules have a
keyword each, half of them Chinese, made of what the texts are made of: their beginnings occur all the time.
CPU time of the calling thread. Not here: what is remembered of scanned texts (`inbound_turns.py` has it).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from time import perf_counter, thread_time_ns
from typing import Final

from benchmarks.inbound_chats import Words, rules_of
from benchmarks.report import Report
from filters.patterns import Patterns
from filters.scan import scan

NUM_RULES: Final = (200, 5000, 50_000)
TEXT_CHARS: Final = 1000
NUM_TEXTS: Final = 20


def texts_of(words: Words, rng: random.Random) -> list[str]:
    """Texts of 1,000 characters."""
    text = ""
    while len(text) < NUM_TEXTS * TEXT_CHARS:
        text += words.text(NUM_TEXTS * TEXT_CHARS // 4, rng)
    return [text[start : start + TEXT_CHARS] for start in range(0, NUM_TEXTS * TEXT_CHARS, TEXT_CHARS)]


def scan_us(texts: Sequence[str], patterns: Patterns) -> float:
    """Microseconds for one text, over all of them."""
    start_ns = thread_time_ns()
    for text in texts:
        scan(text, patterns)
    return (thread_time_ns() - start_ns) / 1e3 / len(texts)


def report_scan(
    report: Report, words: Mapping[str, Words], num_runs: int, counts: Sequence[int] = NUM_RULES
) -> None:
    """The cost for 1,000 characters, and the goal."""
    rng = random.Random(4)
    texts = {language: texts_of(words[language], rng) for language in words}
    everything = "\n".join(text for some in texts.values() for text in some)
    for num_rules in counts:
        start_s = perf_counter()
        patterns = rules_of(num_rules, words, everything)
        report.add(f"scan_{num_rules}_rules_load_s", perf_counter() - start_s, "s")
        for language, some in texts.items():
            if any(scan(text, patterns).num_hits for text in some):
                raise RuntimeError("a scan that should find nothing has found something")
            runs = [scan_us(some, patterns) for _ in range(num_runs)]
            report.add(f"scan_{num_rules}_rules_1k_{language}_us", runs, "us")
    report.goal("scan_200_rules_1k_zh_us", report.metrics["scan_200_rules_1k_zh_us"], 60, "us")
