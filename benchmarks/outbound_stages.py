"""What each stage of the way out costs by itself, per token: fed with the texts of tokens, one by one.

Not here: all of them together (`outbound_chain.py`), and parsers (`outbound_parsers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.outbound_rules import RulesFor
from benchmarks.outbound_texts import PROSE, Spoken, model_detokenizer, say, say_denied, say_json
from benchmarks.outbound_timing import Pass, feeding, in_turn
from benchmarks.report import Report
from filters.escaping import escape_function
from filters.json_check import JsonCheck
from filters.json_values import JsonValueFilter
from filters.stream import CompiledRules
from filters.text_filter import TextFilter
from pipeline.control_dropper import ControlDropper
from pipeline.model_text import ModelText
from pipeline.stop_strings import StopMatcher

# Real ones; some of their beginnings occur in the prose.
STOPS: Final = (
    "\n\nUser:",
    "Observation:",
    "###",
    "</answer>",
    "The end of the answer.",
    "用户：",
    "以上就是全部内容",
    "\n```",
    "Question:",
    "Thought:",
    "END OF TEXT",
    "[DONE]",
    "---",
    "问题：",
    "今天就到这里",
    "Assistant:",
)
NUM_STOPS: Final = (4, 16)


def report_stages(report: Report, model: ModelText, rules: RulesFor, num_tokens: int, num_runs: int) -> None:
    """Every stage in both languages."""
    for language in PROSE:
        spoken = say(model, language, num_tokens)
        hits = say_denied(model, language, num_tokens, rules.denied.said(language))
        passes = _text_stages(model, spoken) | _filters(rules, spoken, hits)
        passes |= _json_stages(rules(rules.main), say_json(model, language, num_tokens))
        for name, runs in in_turn(passes, num_runs).items():
            report.add(f"{name}_{language}_us", runs, "us")
        for num_rules in rules.counts:
            num_hits = _num_hits(rules(num_rules), hits) * 1000 / num_tokens
            report.add(f"hits_{num_rules}_rules_{language}", num_hits, "in 1,000 tokens")
    worst_us = max(report.metrics[f"stage_keywords_{rules.main}_{language}_us"] for language in PROSE)
    report.goal("filter_5k_us_per_token", worst_us, 1.2, "us")


def _text_stages(model: ModelText, spoken: Spoken) -> dict[str, Pass]:
    pieces = spoken.pieces
    passes = {
        "stage_none": feeding(lambda: _nothing, pieces),
        "stage_detokenizer": feeding(lambda: model_detokenizer(model).feed, spoken.chunks),
        "stage_controls": feeding(lambda: ControlDropper(model.controls).feed, pieces),
        "stage_escape_html": feeding(lambda: _escape("html"), pieces),
        "stage_escape_markdown": feeding(lambda: _escape("markdown"), pieces),
    }
    for num_stops in NUM_STOPS:
        passes[f"stage_stops_{num_stops}"] = _stops(num_stops, spoken)
    return passes


def _stops(num_stops: int, spoken: Spoken) -> Pass:
    return feeding(lambda: StopMatcher(STOPS[:num_stops]).feed, spoken.pieces)


def _filters(rules: RulesFor, spoken: Spoken, hits: Spoken) -> dict[str, Pass]:
    passes = {"stage_pii": _filter(rules(0, with_pii=True), spoken)}
    for num_rules in rules.counts:
        passes[f"stage_keywords_{num_rules}"] = _filter(rules(num_rules), spoken)
        passes[f"stage_keywords_{num_rules}_hits"] = _filter(rules(num_rules), hits)
    return passes


def _filter(rules: CompiledRules, spoken: Spoken) -> Pass:
    return feeding(lambda: stream(rules).feed, spoken.pieces)


def _num_hits(rules: CompiledRules, spoken: Spoken) -> int:
    text_filter = stream(rules)
    for piece in spoken.pieces:
        text_filter.feed(piece)
    return len(text_filter.hits)


def _json_stages(rules: CompiledRules, spoken: Spoken) -> Mapping[str, Pass]:
    pieces = spoken.pieces
    return {
        "stage_json_values": feeding(lambda: JsonValueFilter(rules.stream).feed, pieces),
        "stage_json_check": feeding(lambda: JsonCheck(is_object=True).feed, pieces),
    }


def stream(rules: CompiledRules) -> TextFilter:
    """A filter of rules that are not none."""
    text_filter = rules.stream()
    assert text_filter is not None
    return text_filter


def _escape(name: str) -> Callable[[str], str]:
    escape = escape_function(name)
    assert escape is not None
    return escape


def _nothing(text: str) -> str:
    """For the cost of the loop and the call."""
    return text
