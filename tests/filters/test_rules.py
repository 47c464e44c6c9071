from __future__ import annotations

import pytest

from filters.rules import Rule, RuleError, RuleSet, load_rules

FULL = """\
# the house rules
- id: names
  match: [敏感词, "foo bar", 110, no]
  action: redact
  replacement: "[NAME]"
  direction: output
  whole_word: true
- id: films
  match: 黄片
  action: block
  allow:
    - 三黄片
  shadow: yes
- {id: fine, match: [assassin], action: allow}
- id: mail
  pii: email
  action: redact
  direction: input
  allow: [help@example.com]
  channels: [content, tool_arguments]
- id: evasive
  match: [傻帽]
  action: mask
  direction: input
  skip_symbols: true
  repeats: true
  digits: true
- {id: l33t, match: [shit], action: flag, direction: input, leet: true, channels: reasoning}
"""


def test_load_rules_reads_every_field() -> None:
    rules = load_rules(FULL, "rules.yaml")
    assert rules.rules == (
        Rule("names", ("敏感词", "foo bar", "110", "no"), "redact", "output", True, (), "[NAME]"),
        Rule("films", ("黄片",), "block", "both", False, ("三黄片",), "", True),
        Rule("fine", ("assassin",), "allow"),
        Rule(
            "mail", (), "redact", "input", False, ("help@example.com",), "[EMAIL]",
            pii="email", channels=("content", "tool_arguments"),
        ),
        Rule(
            "evasive", ("傻帽",), "mask", "input", replacement="*",
            skip_symbols=True, repeats=True, digits=True,
        ),
        Rule("l33t", ("shit",), "flag", "input", leet=True, channels=("reasoning",)),
    )  # fmt: skip
    assert (len(rules), rules.num_keywords) == (6, 8)


def test_load_rules_tells_yaml_by_name_or_by_its_first_line() -> None:
    text = "\n# rules\n- {id: a, match: bc, action: mask}"
    expected = (Rule("a", ("bc",), "mask", replacement="*"),)
    assert load_rules(text, "rules").rules == load_rules(text, "rules.yml").rules == expected
    assert load_rules("[{id: a, match: bc, action: mask}]", "-").rules == expected


@pytest.mark.parametrize("source", ["words.txt", "rules.yaml"])
@pytest.mark.parametrize("text", ["", "\n \n", "# nothing\n"])
def test_load_rules_of_an_empty_file_gives_no_rules(text: str, source: str) -> None:
    assert load_rules(text, source) == RuleSet()


def test_load_rules_of_a_plain_list_makes_one_rule() -> None:
    text = "\ufeff敏感词\r\n\r\n# comment\n  foo bar \n敏感词\na-b"
    assert load_rules(text, "dir/words.txt").rules == (
        Rule("words.txt", ("敏感词", "foo bar", "a-b"), "block"),
    )
    masked = load_rules(text, "words.txt", default_action="mask").rules[0]
    assert (masked.action, masked.replacement) == ("mask", "*")
    assert load_rules("foo", "w", default_action="redact").rules[0].replacement == "[REDACTED]"


def test_load_rules_with_an_unknown_default_action_is_refused() -> None:
    with pytest.raises(ValueError, match="'drop' is not one of"):
        load_rules("foo", "words.txt", default_action="drop")


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("foo\n\u200b\u200d\n", 2, "folds to nothing"),
        ("foo\n\nx\n", 3, "folds to a single character, 'x'"),
        ("Ａ\u200b", 1, "folds to a single character, 'a'"),
    ],
)
def test_load_rules_refuses_a_keyword_of_a_plain_list(text: str, line: int, problem: str) -> None:
    with pytest.raises(RuleError, match=problem) as caught:
        load_rules(text, "words.txt")
    assert (caught.value.line, str(caught.value).split(" ")[0]) == (line, f"words.txt:{line}:")


def rule_text(*lines: str) -> str:
    return "\n".join(["- id: a", *("  " + line for line in lines)])


OK = ("match: [foo, bar]", "action: mask")
IN = ("direction: input",)


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("- id: a\n  match: [", 2, "not valid YAML"),
        ("- id: a\n- id: \x07", 2, "not valid YAML: special characters are not allowed"),
        ("- &a [*a]", 1, "a rule is a mapping"),
        ("id: a", 1, "one list of rules"),
        ("- foo\n- bar", 1, "a rule is a mapping"),
        (rule_text(*OK, "colour: red"), 4, "unknown field 'colour'; known fields: id, match, action"),
        (rule_text(*OK, "match: [baz]"), 4, "the field 'match' is given twice"),
        ("- match: [foo]\n  action: mask", 1, "needs an id"),
        ("- id: ''\n  match: [foo]\n  action: mask", 1, "the id is empty"),
        ("- id: max_hold\n  match: [foo]\n  action: mask", 1, "reserved"),
        ("- {id: a, match: foo, action: mask}\n- {id: a, match: bar, action: mask}", 2, "used in line 1"),
        (rule_text("match: [foo]"), 1, "needs action: one of allow, flag"),
        (rule_text("action: mask"), 1, "needs match"),
        (rule_text("match: [foo]", "action: drop"), 3, "action is 'drop'; it must be one of allow, flag"),
        (rule_text("match: [foo]", "action: [mask]"), 3, "action must be text"),
        (rule_text(*OK, "direction: up"), 4, "direction is 'up'; it must be one of input, output, both"),
        (rule_text(*OK, "whole_word: 1"), 4, "whole_word must be true or false"),
        (rule_text(*OK, "shadow: maybe"), 4, "shadow must be true or false"),
        (rule_text("match: []", "action: mask"), 2, "match is an empty list"),
        (rule_text("match:", "- foo", "- x", "action: mask"), 4, "folds to a single character"),
        (rule_text("match:", "- foo", '- "\\u200b"', "action: mask"), 4, "folds to nothing"),
        (rule_text("match: [foo, ~]", "action: mask"), 2, "match must be text"),
        (rule_text("match: [[foo]]", "action: mask"), 2, "match must be text"),
        (rule_text(*OK, "replacement: ''"), 4, "the replacement is empty"),
        (rule_text(*OK, "replacement: '**'"), 4, "one character that stands for each; this one has 2"),
        (rule_text("match: foo", "action: block", "replacement: x"), 4, "no meaning with action block"),
        (rule_text("match: foo", "action: redact", "replacement: a FOO b"), 4, "contains a keyword"),
        (rule_text(*OK, "allow: [baz]"), 4, "contains no keyword"),
        (rule_text(*OK, "allow: [Foo]"), 4, "is a keyword of the same rule"),
        (rule_text(*OK, "allow: ['\u200b']"), 4, "folds to nothing"),
        (rule_text("match: foo", "action: allow", "allow: [foo bar]"), 4, "allow has no meaning"),
        (rule_text("match: foo", "action: allow", "shadow: true"), 4, "shadow has no meaning"),
        (rule_text("pii: car", "action: mask"), 2, "pii is 'car'; it must be one of phone_cn, email, card"),
        (rule_text("pii: [card]", "action: mask"), 2, "pii must be text"),
        (rule_text(*OK, "pii: card", *IN), 4, "either match or pii"),
        (rule_text("pii: card", "action: allow", *IN), 2, "pii has no meaning with action allow"),
        (
            rule_text("pii: card", "action: mask", *IN, "whole_word: true"),
            5,
            "whole_word has no meaning with pii",
        ),
        (rule_text("pii: card", "action: mask", *IN, "leet: true"), 5, "leet has no meaning with pii"),
        (rule_text("pii: email", "action: mask", *IN, "allow: [example.com]"), 5, "contains no email"),
        (rule_text("pii: ip", "action: redact", *IN, "replacement: 1.2.3.4"), 5, "contains a ip"),
        (rule_text(*OK, "channels: []"), 4, "channels is an empty list"),
        (
            rule_text(*OK, "channels: [content, audio]"),
            4,
            "there is no channel 'audio'; the channels are content",
        ),
        (rule_text(*OK, "fail: maybe"), 4, "fail is 'maybe'; it must be one of closed, open"),
        (rule_text("match: foo", "action: flag", "fail: open"), 4, "fail has no meaning with action flag"),
        (
            rule_text("match: foo", "action: allow", "fail: closed"),
            4,
            "fail has no meaning with action allow",
        ),
        (rule_text(*OK, "shadow: true", "fail: open"), 5, "fail has no meaning with shadow"),
        (rule_text(*OK, *IN, "fail: open"), 5, "fail has no meaning with direction input"),
        (rule_text(*OK, "repeats: 2"), 4, "repeats must be true or false"),
        (rule_text("match: [傻帽, ass]", "action: mask", *IN, "skip_symbols: true"), 2, "'ass' is Latin"),
        (rule_text("match: '12'", "action: mask", *IN, "skip_symbols: true"), 2, "'12' is Latin"),
        (rule_text("match: '@@'", "action: mask", *IN, "skip_symbols: true"), 2, "folds to nothing"),
        (rule_text("match: 妈妈", "action: mask", *IN, "repeats: true"), 2, "a single character, '妈'"),
        (
            rule_text("match: 傻帽", "action: mask", *IN, "skip_symbols: true", "leet: true"),
            6,
            "leet has no meaning",
        ),
        (
            rule_text("match: 傻帽", "action: mask", *IN, "skip_symbols: true", "whole_word: true"),
            6,
            "whole_word has",
        ),
        (
            rule_text("match: 傻帽", "action: redact", *IN, "skip_symbols: true", "replacement: 傻-帽"),
            6,
            "contains a k",
        ),
    ],
)
def test_load_rules_refuses_with_the_line(text: str, line: int, problem: str) -> None:
    with pytest.raises(RuleError) as caught:
        load_rules(text, "rules.yaml")
    assert problem in str(caught.value)
    assert caught.value.line == line
    assert str(caught.value).startswith(f"rules.yaml:{line}: ")


def test_for_direction_keeps_the_rules_of_that_direction() -> None:
    rules = RuleSet(tuple(Rule(way, ("foo",), "block", way) for way in ("input", "output", "both")))
    assert [rule.id for rule in rules.for_direction("input").rules] == ["input", "both"]
    assert [rule.id for rule in rules.for_direction("output").rules] == ["output", "both"]
    with pytest.raises(ValueError, match="'sideways'"):
        rules.for_direction("sideways")


def test_for_direction_keeps_the_rules_of_that_channel() -> None:
    words = Rule("words", ("foo",), "block")
    thoughts = Rule("thoughts", ("foo",), "block", "input", channels=("reasoning", "tool_name"))
    rules = RuleSet((words, thoughts))
    assert rules.for_direction("input").rules == (words,)
    assert rules.for_direction("input", "reasoning").rules == (words, thoughts)
    assert rules.for_direction("output", "reasoning").rules == (words,)
    with pytest.raises(ValueError, match="'audio'"):
        rules.for_direction("input", "audio")


def test_holds_only_for_what_changes_the_text() -> None:
    masked, opened = Rule("a", ("foo",), "mask"), Rule("a", ("foo",), "block", fail="open")
    assert (masked.holds(), masked.holds(closed_only=True), masked.rewrites, masked.blocks) == (1, 1, 1, 0)
    assert (opened.holds(), opened.holds(closed_only=True), opened.rewrites, opened.blocks) == (1, 0, 0, 1)
    shadow = Rule("a", ("foo",), "block", shadow=True)
    assert (shadow.holds(), shadow.rewrites, shadow.blocks) == (0, 0, 0)
    assert not Rule("a", ("foo",), "flag").holds()


def test_load_rules_takes_every_kind_of_rule_for_the_answer() -> None:
    text = (
        "- {id: mail, pii: email, action: redact, direction: output, channels: [reasoning, tool_name]}\n"
        "- {id: evasive, match: 傻帽, action: mask, skip_symbols: true, fail: open}\n"
        "- {id: plain, match: foo, action: block, fail: closed}\n"
    )
    mail, evasive, plain = load_rules(text, "r.yaml").rules
    assert (mail.channels, mail.fail) == (("reasoning", "tool_name"), "closed")
    assert (evasive.fail, evasive.direction, plain.fail) == ("open", "both", "closed")


def test_fingerprint_changes_with_the_rules_only() -> None:
    first = load_rules(FULL, "a.yaml").fingerprint
    assert first == load_rules("# other comment\n" + FULL, "b.yaml").fingerprint
    assert first != load_rules(FULL.replace("敏感词", "敏感"), "a.yaml").fingerprint
    assert len(first) == 64


def test_is_active_of_rules_that_change_what_leaves() -> None:
    active = [
        action
        for action in ("allow", "flag", "mask", "redact", "block")
        if Rule("a", ("foo",), action).is_active
    ]
    assert active == ["mask", "redact", "block"]
    assert not Rule("a", ("foo",), "block", shadow=True).is_active
