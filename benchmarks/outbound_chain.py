"""What the whole way out costs per token, and what it costs with another filter in the same place.

Ids in, events out, as `gateway.token_choice` uses it: detokenizer, control strings, keywords (and personal
data), events. Not here: the stages by themselves (`outbound_stages.py`), and what is held
(`outbound_holding.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import median
from typing import Final

from benchmarks.outbound_rivals import FixedWindow, PrefixFilter, RivalRules
from benchmarks.outbound_rules import RulesFor
from benchmarks.outbound_stages import NUM_STOPS, STOPS
from benchmarks.outbound_texts import PROSE, Spoken, say, say_denied
from benchmarks.outbound_timing import Pass, Way, in_turn, ratio, sending
from benchmarks.report import Report
from filters.escaping import escape_function
from pipeline.model_text import ModelText
from pipeline.outbound_plan import OutputRules

LENGTHS: Final = (1000, 4000, 16_000)


def report_whole(
    report: Report, model: ModelText, rules: RulesFor, num_runs: int, lengths: Sequence[int] = LENGTHS
) -> None:
    """Every length with the main number of rules, the middle one with the others; and the goal."""
    way = Way(model)
    passes: dict[str, Pass] = {}
    goal_names = []
    for language in PROSE:
        said = say(model, language, lengths[-1])
        denied = say_denied(model, language, lengths[-1], rules.denied.said(language))
        for num_rules, with_pii, has_hits in product((0, *rules.counts), (False, True), (False, True)):
            if has_hits and not num_rules:
                continue
            open_outbound = way.opener(way.plan(rules(num_rules, with_pii)))
            for length in lengths if num_rules == rules.main else lengths[1:2]:
                kind = ("_pii" if with_pii else "") + ("_hits" if has_hits else "")
                name = f"outbound_{num_rules}_rules_{language}{kind}_{length}_tokens_us"
                passes[name] = sending(open_outbound, (denied if has_hits else said).first(length))
                if num_rules == rules.main:
                    goal_names.append(name)
        passes |= _more_stages(way, rules, said.first(lengths[1]))
    results = in_turn(passes, num_runs)
    for name, runs in results.items():
        report.add(name, runs, "us")
    _report_goal(report, results, goal_names, lengths)


def _more_stages(way: Way, rules: RulesFor, said: Spoken) -> dict[str, Pass]:
    """With stop strings, and with every stage that needs no parser and no JSON."""
    main, language = rules(rules.main), said.language
    passes = {}
    for num_stops in NUM_STOPS:
        plan = way.plan(main, STOPS[:num_stops])
        passes[f"outbound_{num_stops}_stops_{language}_us"] = sending(way.opener(plan), said)
    plan = way.plan(main, STOPS, escape_function("markdown"))
    passes[f"outbound_16_stops_markdown_{language}_us"] = sending(way.opener(plan), said)
    return passes


def _report_goal(
    report: Report, results: Mapping[str, Sequence[float]], names: Sequence[str], lengths: Sequence[int]
) -> None:
    """The worst of all languages and lengths, by kind and of all, and how flat it is."""
    worst_us = []
    for with_pii, has_hits in product((False, True), (False, True)):
        some = [name for name in names if ("_pii" in name, "_hits" in name) == (with_pii, has_hits)]
        kind = ("_pii" if with_pii else "") + ("_hits" if has_hits else "")
        worst_us.append(max(median(results[name]) for name in some))
        report.add(f"outbound_worst{kind}_us", worst_us[-1], "us")
    shortest, longest = (f"_{length}_tokens_us" for length in (lengths[0], lengths[-1]))
    growths = [
        ratio(results[name], results[name.replace(longest, shortest)])
        for name in names
        if name.endswith(longest)
    ]
    report.add("outbound_longest_vs_shortest", max(growths), "x, the worst")
    report.goal("outbound_us_per_token", max(worst_us), 5, "us")


def report_rivals(report: Report, model: ModelText, rules: RulesFor, num_tokens: int, num_runs: int) -> None:
    """The goto table, pyahocorasick with prefixes, and the fixed window, each in the whole way out."""
    way = Way(model)
    for num_rules in rules.counts:
        rule_set = rules.denied.first(num_rules)
        sources: dict[str, OutputRules] = {
            "goto": rules(num_rules),
            "prefixes": RivalRules.of(rule_set, PrefixFilter),
            "window": RivalRules.of(rule_set, FixedWindow),
        }
        for language in PROSE:
            said = say(model, language, num_tokens)
            passes = {name: sending(way.opener(way.plan(source)), said) for name, source in sources.items()}
            passes["none"] = sending(way.opener(way.plan(rules(0))), said)
            results = in_turn(passes, num_runs)
            for name in sources:
                report.add(f"{name}_{num_rules}_rules_{language}_us", results[name], "us, whole way out")
            for name in ("prefixes", "window"):
                whole = ratio(results[name], results["goto"])
                report.add(f"{name}_vs_goto_{num_rules}_rules_{language}", whole, "x, whole way out")
                none_us = median(results["none"])
                filters = [median(results[key]) - none_us for key in (name, "goto")]
                report.add(
                    f"{name}_vs_goto_{num_rules}_rules_{language}_filter", filters[0] / filters[1], "x"
                )
