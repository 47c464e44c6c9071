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


def test_keywords_and_phrases_of_matches() -> None:
    patterns = compiled()
    matches = sorted(patterns.finder.find("a foobar"))
    assert list(patterns.keywords(matches)) == [(2, 5, BLOCK), (5, 8, BLOCK)]
    assert [(start, end) for start, end, _ in patterns.phrases(matches)] == [(2, 8)]


def test_only_keywords_of_active_rules_hold() -> None:
    automaton = compiled().automaton
    state, lives = automaton.start, []
    for char in "a foo":
        state = automaton.step(state, char)
        lives.append(automaton.live[state])
    assert lives == [0, 0, 1, 2, 0]


def test_phrase_depth_is_that_of_the_earliest_phrase_under_way() -> None:
    patterns = compiled()
    state = patterns.automaton.start
    for char in "a foo":
        state = patterns.automaton.step(state, char)
    assert patterns.phrase_depth(state, BLOCK) == 5  # `a foo` waits for the end of the word
    state = patterns.automaton.step(state, "b")
    assert patterns.phrase_depth(state, BLOCK) == 4
    assert patterns.phrase_depth(state, FLAG) == 0


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
