"""What a request costs before the engine: the next turn of a chat, shared prompts, the scan, and the link.

A typical chat of 12k tokens has 40 messages of 300 tokens; its next turn brings the last answer (100 tokens)
and a new message (30). It is taken from the parsed body to the bytes on the link, rendered, scanned under 200
rules and tokenized, with the token cache on, and in the same run with none, which encodes everything.

Verdict: with the cache the next turn takes a twentieth of the CPU time at 12k tokens, a sixth at 1k, and a
fortieth at 100k. A third of what is left is the template, a third the tokens, a sixth the scan. What other
processes have encoded is found in shared memory 40 times (50 tokens) to 200 times (4,000) as quickly as it is
encoded. The losers: no cache, and one call that encodes the whole text, as Hugging Face does (`whole_text`).

`_cpu_speedup` is the ratio of CPU times, and the goal's. `_wall_speedup` is less: alone on the machine, the
side without a cache spreads its texts over all cores, which a busy gateway has not got.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.inbound_chats import NUM_RULES, KernelLink, load_model, rules_of, words_of
from benchmarks.inbound_load import (
    report_eviction,
    report_memory,
    report_second_level,
    report_shared_prompt,
)
from benchmarks.inbound_scan import report_scan
from benchmarks.inbound_turns import Pair, report_next_turns
from benchmarks.processes import embedded_model
from benchmarks.prompt_path import report_prompt_path
from benchmarks.report import Report, open_report, parser
from benchmarks.step_jitter import ScriptedSteps, VllmSteps, report_step_jitter
from gateway.event_loop import settle_memory


def report_way_in(report: Report, is_quick: bool) -> None:
    """From the parsed body to the link."""
    text = load_model()
    report.add("tokenizer_ids", len(text.vocabulary))  # Qwen3 has 151,669
    words = words_of(text)
    patterns = rules_of(NUM_RULES, words)
    settle_memory()
    link = KernelLink()
    english = words["en"]
    report_next_turns(report, Pair(text, patterns, link), english, 20 if is_quick else 60)
    report_shared_prompt(report, text, patterns, english, link, 1000)
    report_eviction(report, text, patterns, english, link, 200 if is_quick else 1000)
    link.close()
    report_memory(report, text, words, 100 if is_quick else 500)
    report_second_level(report, text, english, 40 if is_quick else 100)
    report_scan(report, words, 10 if is_quick else 50)


def report_link(report: Report, is_quick: bool) -> None:
    """From the prompt's buffer to the engine, and what other streams notice."""
    report_prompt_path(report, (12_000, 100_000), 10 if is_quick else 40)
    window_s = 2.0 if is_quick else 10.0
    report_step_jitter(report, "scripted", ScriptedSteps(embedded_model()), window_s)
    if not is_quick:
        report_step_jitter(report, "vllm", VllmSteps(embedded_model()), window_s)


def main(arguments: argparse.Namespace) -> int:
    report = open_report("bench_inbound", arguments)
    report_way_in(report, arguments.quick)
    report_link(report, arguments.quick)
    return report.close()


if __name__ == "__main__":
    sys.exit(main(parser(__doc__).parse_args()))
