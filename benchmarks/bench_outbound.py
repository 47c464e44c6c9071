"""What a token costs after the engine: every stage, the whole way out, and what the filter holds back.

TODO
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.inbound_chats import load_model
from benchmarks.outbound_chain import report_rivals, report_whole
from benchmarks.outbound_holding import report_holding, report_memory
from benchmarks.outbound_rules import NUM_RULES, Denied, RulesFor
from benchmarks.outbound_stages import report_stages
from benchmarks.report import Report, open_report, parser
from gateway.server import settle_memory
from pipeline.model_text import ModelText

NUM_TOKENS = 4000


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
