"""What vLLM's parsers of reasoning and tool calls cost on the way out, per token. Needs vLLM (5 s to import).

An answer that thinks, says something and then calls a tool goes through the whole way out with a parser in
it; the same ids without one are beside it. Not here: all other stages (`outbound_stages.py`).
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Final

from backend.embedded import default_cache_dir
from backend.output_parsers import load_output_parsers
from benchmarks.inbound_chats import model_files
from benchmarks.outbound_rules import RulesFor
from benchmarks.outbound_texts import Spoken, prose
from benchmarks.outbound_timing import Pass, Way, in_turn, ratio, sending
from benchmarks.report import Report
from pipeline.model_text import ModelText
from pipeline.outbound_plan import OutboundPlan
from pipeline.ports import OutputParsers
from pipeline.values import ChatRequest, Delivery, Generation, ToolChoice

PARSERS: Final = (("hermes", None), (None, "qwen3"), ("hermes", "qwen3"))  # of tools, of reasoning
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
_CALL: Final = '<tool_call>\n{"name": "search", "arguments": {"query": "the river in spring"}}\n</tool_call>'


def report_parsers(report: Report, model: ModelText, rules: RulesFor, num_tokens: int, num_runs: int) -> None:
    """With the main number of rules, in English. Needs the files of Qwen3, which `make setup` fetches."""
    files = model_files(default_cache_dir(os.environ) / "tokenizers" / "qwen3")
    spoken = _answer(model, num_tokens)
    way = Way(model)
    plan = way.plan(rules(rules.main))
    passes: dict[str, Pass] = {"no_parser": sending(way.opener(plan), spoken)}
    for tools, reasoning in PARSERS:
        parsers = load_output_parsers(tools, reasoning, files, "bench")
        name = "_".join(part for part in (tools, reasoning) if part)
        passes[f"parser_{name}"] = sending(way.opener(_with(plan, parsers)), spoken)
    results = in_turn(passes, num_runs)
    for name, runs in results.items():
        report.add(f"outbound_{name}_us", runs, "us")
        report.add(f"outbound_{name}_ratio", ratio(runs, results["no_parser"]), "x")


def _with(plan: OutboundPlan, parsers: OutputParsers) -> OutboundPlan:
    chat = ChatRequest(
        "",
        [{"role": "user", "content": "Where is the river?"}],
        Generation({}),
        Delivery(),
        tools=[_TOOL] if parsers.has_tools else None,
        tool_choice=ToolChoice("auto"),
    )
    return replace(
        plan,
        open_parser=lambda call: parsers.open(chat, call.prompt.tokens),
        reads_reasoning=parsers.has_reasoning,
    )


def _answer(model: ModelText, num_tokens: int) -> Spoken:
    """A third of it reasoning; the call at its end."""
    rng = random.Random(11)
    thought = prose("en", num_tokens * 3 // 2, rng)
    said = prose("en", num_tokens * 3, rng)
    text = f"<think>\n{thought}\n</think>\n\n{said}\n{_CALL}"
    num = len(model.tokenizer.encode(text, add_special_tokens=False).ids)
    return Spoken.of(model, text, "en", num)
