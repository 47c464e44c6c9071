"""The benchmark of the way out, made tiny, with a small model: that it measures what it says."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.outbound_chain import report_rivals, report_whole
from benchmarks.outbound_holding import Held, report_holding, report_memory, traced_mib
from benchmarks.outbound_rivals import FixedWindow, MaskingFilter, PrefixFilter, RivalRules
from benchmarks.outbound_rules import Denied, RulesFor
from benchmarks.outbound_stages import report_stages, stream
from benchmarks.outbound_texts import PROSE, say, say_denied, say_json
from benchmarks.outbound_timing import Way
from benchmarks.report import Report
from filters.rules import Rule, RuleSet, load_rules
from filters.stream import CompiledRules
from pipeline.model_text import ModelText
from tests.pipeline.model_files import model_files

COUNTS = (20, 60, 100)
KINDS = (FixedWindow, PrefixFilter)
# Small words over a small alphabet, so that everything that can overlap does.
DENSE = RuleSet(
    (
        Rule("ab", ("ab",), "mask", replacement="*"),
        Rule("bca", ("bca", "cab a"), "mask", replacement="*", allow=("abca", "bcab")),
        Rule("ac", ("ac", "cc"), "mask", replacement="#", whole_word=True, allow=("ac ac",)),
        Rule("da", ("da", "ddb"), "mask", replacement="*", whole_word=True),
        Rule("中a", ("中a", "a中"), "mask", replacement="*", whole_word=True, allow=("b中a",)),
    )
)


@pytest.fixture(scope="module")
def model() -> ModelText:
    return ModelText.from_files(model_files())


@pytest.fixture(scope="module")
def denied(model: ModelText) -> Denied:
    return Denied.of(model, COUNTS[-1])


@pytest.fixture(scope="module")
def rules(denied: Denied) -> RulesFor:
    return RulesFor(denied, COUNTS)


@pytest.fixture
def report() -> Report:
    return Report("bench_outbound")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("language", list(PROSE))
def test_rivals_let_the_same_text_out(
    model: ModelText, rules: RulesFor, kind: type[MaskingFilter], language: str
) -> None:
    said = say_denied(model, language, 600, rules.denied.said(language))
    compiled = rules(COUNTS[-1])
    ours, theirs = stream(compiled), RivalRules.of(rules.denied.first(COUNTS[-1]), kind).stream()
    assert Held.by(ours, said.pieces).text == Held.by(theirs, said.pieces).text != said.text
    assert {(hit.rule_id, hit.start, hit.end) for hit in ours.hits} == {
        (hit.rule_id, hit.start, hit.end) for hit in theirs.hits
    }


@pytest.mark.parametrize("kind", KINDS)
def test_rivals_agree_on_dense_texts(kind: type[MaskingFilter]) -> None:
    compiled, rival = CompiledRules(DENSE), RivalRules.of(DENSE, kind)
    for pieces in dense_texts():
        assert Held.by(rival.stream(), pieces).text == Held.by(stream(compiled), pieces).text, pieces


def test_prefixes_hold_what_ours_holds() -> None:
    # With a phrase that ends where a whole word does, ours holds the word until the next character.
    dense = RuleSet(tuple(replace(rule, allow=()) if rule.whole_word else rule for rule in DENSE.rules))
    compiled, rival = CompiledRules(dense), RivalRules.of(dense, PrefixFilter)
    for pieces in dense_texts():
        assert Held.by(rival.stream(), pieces) == Held.by(stream(compiled), pieces), pieces


def dense_texts(num_texts: int = 300) -> Iterator[list[str]]:
    rng = random.Random(1)
    for _ in range(num_texts):
        yield ["".join(rng.choices("aaabbccdd 中", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 12))]


def test_rivals_refuse_what_they_cannot_do() -> None:
    for rule in (Rule("x", ("ab",), "block"), Rule("y", (), "mask", pii="email", replacement="*")):
        with pytest.raises(ValueError, match=rule.id):
            RivalRules.of(RuleSet((rule,)), FixedWindow)


def test_a_delay_lasts_from_the_token_that_brought_a_character() -> None:
    words = CompiledRules(RuleSet((Rule("x", ("abcd",), "mask", replacement="*"),)))
    held = Held.by(stream(words), ["xab", "c", "e", "ab"])
    assert held.text == "xabceab"
    assert (held.mean, held.peak) == ((2 + 3 + 0 + 2) / 4, 3)
    assert held.delays_ms == [0, 40, 40, 20, 0, 0, 0]


def test_lists_of_denied_words_are_what_the_loader_takes(denied: Denied, rules: RulesFor) -> None:
    assert denied.first(COUNTS[0]).rules == denied.first(COUNTS[-1]).rules[: COUNTS[0]]
    assert {rule.whole_word for rule in denied.rules} == {True, False}
    assert any(rule.allow for rule in denied.rules)
    entries = [
        f"- {{id: {rule.id}, action: mask, match: {rule.match[0]!r}, whole_word: {rule.whole_word},"
        f" allow: {list(rule.allow)}}}"
        for rule in denied.rules
    ]
    loaded = load_rules("\n".join(entries).replace("allow: []", "shadow: false"), "words.yaml")
    assert loaded.rules == denied.first(COUNTS[-1]).rules
    assert len(rules(COUNTS[0], with_pii=True)) > len(rules(COUNTS[0]))


@pytest.mark.parametrize("language", list(PROSE))
def test_prose_has_no_hit_and_its_length(model: ModelText, rules: RulesFor, language: str) -> None:
    said, document = say(model, language, 500), say_json(model, language, 500)
    assert len(said) == len(document) == len(said.chunks) == 500
    assert document.text.startswith('{"entries": [{"id": 0')
    for with_pii in (False, True):
        text_filter = stream(rules(COUNTS[-1], with_pii))
        assert Held.by(text_filter, said.pieces).text == said.text
        assert not text_filter.hits


def test_everything_is_reported(report: Report, model: ModelText, rules: RulesFor) -> None:
    report_stages(report, model, rules, num_tokens=200, num_runs=1)
    report_whole(report, model, rules, num_runs=1, lengths=(50, 100, 200))
    report_rivals(report, model, rules, num_tokens=100, num_runs=1)
    report_holding(report, model, rules, num_tokens=200)
    report_memory(report, rules, COUNTS[:1])
    goals = {goal.name for goal in report.goals}
    assert goals == {"filter_5k_us_per_token", "outbound_us_per_token", "hold_zh_chars", "hold_en_chars"}
    metrics = report.metrics
    for name in ("pii", "detokenizer", "stops_16", "controls", "json_values", "json_check", "escape_html"):
        assert metrics[f"stage_{name}_zh_us"] > 0
    for kind in ("", "_pii", "_hits", "_pii_hits"):
        assert metrics[f"outbound_60_rules_en{kind}_50_tokens_us"] > 0
        assert metrics[f"outbound_100_rules_en{kind}_100_tokens_us"] > 0
    assert metrics["prefixes_vs_goto_20_rules_zh"] > 0
    assert metrics["window_100_rules_en_chars"] > metrics["hold_100_rules_en_chars"]
    assert metrics["goto_20_rules_mib"] > 0


def test_memory_is_that_of_what_is_kept() -> None:
    kept = traced_mib(lambda: bytearray(1 << 20))
    assert 1 <= kept < 1.01
    assert traced_mib(lambda: len(bytearray(1 << 20))) < 0.1


def test_the_way_out_gives_what_the_filter_does(model: ModelText, rules: RulesFor) -> None:
    said = say_denied(model, "en", 300, rules.denied.said("en"))
    way = Way(model)
    texts = []
    for source in (rules(COUNTS[-1]), RivalRules.of(rules.denied.first(COUNTS[-1]), PrefixFilter)):
        outbound = way.opener(way.plan(source))()
        events = [event for ids in said.chunks[:-1] for event in outbound.feed(ids)]
        events += outbound.feed(said.chunks[-1], "length")
        texts.append("".join(getattr(event, "text", "") for event in events))
    assert texts[0] == texts[1] == Held.by(stream(rules(COUNTS[-1])), said.pieces).text
