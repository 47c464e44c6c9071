from __future__ import annotations

from filters.patterns import Patterns
from filters.rules import Rule, RuleSet

BLOCK = Rule("b", ("Foo", "ｆｏｏ", "bar"), "block", allow=("foobar",))
FLAG = Rule("f", ("foo",), "flag", whole_word=True)
FINE = Rule("a", ("a foo",), "allow", whole_word=True)


def compiled() -> Patterns:
    return Patterns(RuleSet((BLOCK, FLAG, FINE)))


def test_patterns_are_folded_and_distinct_within_a_rule() -> None:
    found = [
        (pattern.text, pattern.rule, pattern.is_phrase, pattern.whole) for pattern in compiled().patterns
    ]
    assert found == [
        ("foo", BLOCK, False, False),
        ("bar", BLOCK, False, False),
        ("foobar", BLOCK, True, False),
        ("foo", FLAG, False, True),
        ("a foo", None, True, True),
    ]


def test_excuses_is_for_its_own_rule_or_for_all() -> None:
    own, anybodys = compiled().patterns[2], compiled().patterns[4]
    assert own.excuses(BLOCK)
    assert not own.excuses(FLAG)
    assert anybodys.excuses(FLAG)
    assert not compiled().patterns[0].excuses(BLOCK)


def test_only_keywords_of_active_rules_hold() -> None:
    automaton = compiled().automaton
    state, lives = automaton.start, []
    for char in "a foo":
        state = automaton.step(state, char)
        lives.append(automaton.live[state])
    assert lives == [0, 0, 1, 2, 0]


def test_phrases_under_way_are_those_that_are_begun_and_not_yet_a_match() -> None:
    patterns = compiled()
    assert patterns.phrases_under_way.keys() == {"b", None}
    state, texts = patterns.automaton.start, []
    for char in "a foob":
        state = patterns.automaton.step(state, char)
        found = [patterns.phrases_under_way[rule_id].get(state, ()) for rule_id in ("b", None)]
        texts.append([[pattern.text for pattern in phrases] for phrases in found])
    # `a foo` waits for the end of the word; `foobar` is found under the shorter suffixes before.
    assert texts == [[[], ["a foo"]]] * 5 + [[["foobar"], []]]


def test_keywords_under_way_are_known_where_it_matters_how_often_a_character_stood() -> None:
    assert compiled().keywords_under_way == {}
    (_, runs) = Patterns(RuleSet((Rule("r", ("aab",), "block", allow=("xaab",), repeats=True),))).by_folding
    state = runs.automaton.step(runs.automaton.start, "a")
    assert [pattern.text for pattern in runs.keywords_under_way[state]] == ["ab"]
    assert runs.automaton.step(runs.automaton.start, "x") not in runs.keywords_under_way


def test_live_closed_is_that_of_rules_that_fail_closed() -> None:
    closed = Rule("c", ("bcd",), "mask", replacement="*")
    opened = Rule("o", ("abcde",), "mask", replacement="*", fail="open")
    patterns = Patterns(RuleSet((closed, opened)))
    state, lives = patterns.automaton.start, []
    for char in "abcd":
        state = patterns.automaton.step(state, char)
        lives.append((patterns.automaton.live[state], patterns.live_closed[state]))
    assert lives == [(1, 0), (2, 1), (3, 2), (4, 0)]
    assert Patterns(RuleSet((closed,))).live_closed == Patterns(RuleSet((closed,))).automaton.live


def test_patterns_are_apart_by_folding_and_personal_data_counts() -> None:
    evasive = Rule("e", ("傻 帽", "傻帽"), "mask", replacement="*", skip_symbols=True)
    good = Rule("g", ("good", "GOOD", "god"), "mask", repeats=True)
    mail = Rule("m", (), "flag", pii="email", allow=("a@b.com",))
    rules = Patterns(RuleSet((BLOCK, evasive, good, mail)))
    assert [[pattern.text for pattern in folded.patterns] for folded in rules.by_folding] == [
        ["foo", "bar", "foobar", "a@b.com"],
        ["傻帽"],
        ["god", "god"],
    ]
    assert [pattern.repeats for pattern in rules.others[1].patterns] == [(1, 2, 1), ()]
    assert rules.pii == (mail,)
    assert len(rules) == 8
    assert len(Patterns(RuleSet())) == 0
