"""What a token costs after the engine: every stage, the whole way out, and what the filter holds back.

An answer of prose in English and Chinese is fed token by token, as the engine brings it, from ids to events,
through rules of one denied word each: none, 500, 5,000 and 50,000 (`outbound_rules.py`), with whole words and
allow phrases, with and without personal data, with and without hits. CPU time of the calling thread.

Verdict, with 5,000 rules: 2.1 us from an id to an event (2.7 in answers of 1k tokens, with what opening one
costs), 0.8 of it the filter. Rules for personal data cost 1.1 us more, 17 hits in 1,000 tokens 0.6. The
filter holds 0.8 characters in Chinese and 2.1 in English, 10 and 9 ms at 50 tokens a second; with an email
rule it holds 3.9 in English. Parsers of reasoning and tools (`--parsers`, vLLM's) cost 4 us (a busy machine).

The losers. A fixed window of the longest pattern (20 characters): it holds 25 times as many characters in
Chinese and 10 times in English, text leaves 250 and 90 ms later, and the filter costs 3.6 and 2.8 times as
much. pyahocorasick with every prefix as a word holds what ours holds, and costs 1.4 (Chinese) and 2.3
(English) times as much, 1.2 and 1.7 times in the whole way out; it takes an eighth of the memory (3 MiB
instead of 22), which a process has once.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from benchmarks.inbound_chats import load_model
from benchmarks.outbound_chain import report_rivals, report_whole
from benchmarks.outbound_holding import report_holding, report_memory
from benchmarks.outbound_rules import NUM_RULES, Denied, RulesFor
from benchmarks.outbound_stages import report_stages
from benchmarks.report import Report, open_report, parser
from gateway.event_loop import settle_memory
from pipeline.model_text import ModelText

NUM_TOKENS: Final = 4000


def report_way_out(report: Report, model: ModelText, rules: RulesFor, is_quick: bool) -> None:
    """All but the parsers."""
    for num_rules, load_s in rules.load_s.items():
        report.add(f"rules_{num_rules}_load_s", load_s, "s")
    report_memory(report, rules, NUM_RULES[:2] if is_quick else NUM_RULES)
    settle_memory()
    report_holding(report, model, rules, NUM_TOKENS)
    num_runs = 5 if is_quick else 21
    report_stages(report, model, rules, NUM_TOKENS, num_runs)
    report_whole(report, model, rules, num_runs)
    report_rivals(report, model, rules, NUM_TOKENS, num_runs)


def main(arguments: argparse.Namespace) -> int:
    report = open_report("bench_outbound", arguments)
    model = load_model()
    report.add("tokenizer_ids", len(model.vocabulary))  # Qwen3 has 151,669
    rules = RulesFor(Denied.of(model, NUM_RULES[-1]))
    report_way_out(report, model, rules, arguments.quick)
    if arguments.parsers:
        from benchmarks.outbound_parsers import report_parsers  # vLLM takes 5 s

        report_parsers(report, model, rules, NUM_TOKENS, 3 if arguments.quick else 11)
    return report.close()


if __name__ == "__main__":
    flags = parser(__doc__)
    flags.add_argument("--parsers", action="store_true", help="vLLM's parsers too")
    sys.exit(main(flags.parse_args()))
