"""JSON filtered value by value: what leaves is JSON, nothing denied is in it, and the chunks don't matter."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from filters.hit import Hit
from filters.json_check import JsonCheck
from filters.json_values import MAX_DEPTH, MAX_SCALAR_CHARS, JsonValueFilter
from filters.rules import Rule, RuleSet
from filters.stream import CompiledRules
from tests.filters.json_texts import broken, random_value, written
from tests.pipeline.splits import random_split, splits

MASK = Rule("mask", ("敏感", "感词1"), "mask", replacement="*")
REDACT = Rule("redact", ("词a", "138"), "redact", replacement='["\\')
# In text that is not JSON a backslash in a replacement could make another one of what follows.
PLAIN_REDACT = Rule("redact", REDACT.match, "redact", replacement='["')
FLAG = Rule("flag", ("b词",), "flag")
BLOCK = Rule("block", ("a敏b", "911"), "block")
PIECES = ("敏感", "b词", r"\u654f", r"\u8bcd\u0061", "感词1", "138", "911", r"a\u654fb", "a敏")
DENIED = ("敏感", "感词1", "词a", "138")


@cache
def compiled(*rules: Rule, **options: Any) -> CompiledRules:
    return CompiledRules(RuleSet(rules), **options)


def open_filter(*rules: Rule, **options: Any) -> JsonValueFilter:
    return JsonValueFilter(compiled(*rules, **options).stream)


def run(stream: JsonValueFilter, pieces: Sequence[str]) -> str:
    return "".join([stream.feed(piece) for piece in pieces]) + stream.flush()


def outputs(stream: JsonValueFilter, text: str) -> list[str]:
    """What comes out of each chunk of a text with `|` between them, and at its end."""
    return [stream.feed(piece) for piece in text.split("|")] + [stream.flush()]


CASES = [
    (r'{"q":"\u654f|\u611f 词"}', ['{"q":"', '** 词"}', ""]),
    (r'{"敏|感":"敏|"}', ['{"', '**":"', '敏"}', ""]),
    (r'["\u65|4f","\ud83|d\ude0|0","\ud83d|x"]', ['["', '敏","', "", '😀","', r'\ud83dx"]', ""]),
    (r'"a\n\|"\|u0022\/\\"', [r'"a\n', r"\"", r'\"/\\"', ""]),
    ('"raw\n\x01\t"', ['"raw\\n\\u0001\\t"', ""]),
    (r'"\q \u12g4 \'' + '"', [r'"\\q \\u12g4 \\' + "'\"", ""]),
    ('{"n":1|38, "m":-1.3|8e5 ,"t":tr|ue}', ['{"n":', r'"[\"\\", "m":', '-1.38e5 ,"t":', "true}", ""]),
    (" 1|38 |\n", [" ", "", "", r'"[\"\\"' + " \n"]),
    ("138 |0", ["", r'["\ 0', ""]),  # two numbers are no document
    ("敏|感 好", ["", "** 好", ""]),
    ('[敏|感,"敏|感"]', ["[", '**,"', '**"]', ""]),
    (r"[NaN, '\u654f|\u611f\u0022\n\\u654f']", ["[NaN, '", r"**\u0022\n\\u654f']", ""]),
    ('{"a":1} {"敏|感":2}\n"敏|感" 敏|感', ['{"a":1} {"', '**":2}\n"', '**" ', "*", "*"]),
    (r'[] ["\u0022敏|感"]"\n"', ['[] ["' + r"\"", '**"]' + r'"\n"', ""]),
    ("[138x|, tru|x]", ['[["\\x', ", tru", "x]", ""]),
    ('{"a":13|8', ['{"a":', "", r'"[\"\\"']),  # cut off
    (r'"敏|\u4', ['"', "", r"敏\u4"]),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_feed_gives_what_may_leave(text: str, expected: list[str]) -> None:
    assert outputs(open_filter(MASK, REDACT), text) == expected
    for pieces in splits(text.replace("|", ""), random.Random(1)):
        assert run(open_filter(MASK, REDACT), pieces) == "".join(expected)


def test_everything_passes_without_rules() -> None:
    stream = open_filter()
    assert outputs(stream, r'{"a": "\u654f|\q') == [r'{"a": "\u654f', r"\q", ""]
    assert (stream.is_active, stream.held, stream.released, stream.peak_held) == (False, 0, 15, 0)


def test_whether_it_is_active_is_known_before_any_text() -> None:
    assert open_filter(MASK).is_active
    assert not open_filter(FLAG).is_active


def test_hits_and_released_are_raw_offsets() -> None:
    stream = open_filter(MASK, FLAG, REDACT)
    text = r'{"\u0062\u8bcd":["x\n\u654f感", 138, "敏"], "y": "b词'
    offsets = [(text.index(r"\u0062"), text.index('":[')), (text.index(r"\u654f"), text.index('", 138'))]
    offsets.append((text.index("138"), text.index(', "敏')))
    for char in text:
        stream.feed(char)
    assert [(hit.rule_id, hit.start, hit.end) for hit in stream.hits] == [
        ("flag", *offsets[0]), ("mask", *offsets[1]), ("redact", *offsets[2]),
        ("flag", len(text) - 2, len(text)),
    ]  # fmt: skip
    assert (stream.held, stream.released) == (1, len(text) - 1)  # 词 may be followed by a


def test_hold_is_that_of_the_filter_and_of_what_is_not_complete() -> None:
    stream = open_filter(MASK)
    held = []
    for char in r'{"a\u654f\u611f": "x敏\n", "b": -12, "\ud83d\ude00"':
        stream.feed(char)
        held.append(stream.held)
    assert held == [
        *(0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 6, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0),
        *(0, 0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 0),
    ]  # fmt: skip
    assert stream.peak_held == 11


@pytest.mark.parametrize(
    ("text", "left", "settled"),
    [
        (r'{"a": "x\u0061敏b", "c": 1}', '{"a": "x', 8),
        ('{"a": [1, 1911, 2]}', '{"a": [1, ', 10),
        ("x 911", "x ", 2),
        ('{"a敏b":1}', '{"', 2),
    ],
)
def test_block_ends_everything(text: str, left: str, settled: int) -> None:
    for pieces in splits(text, random.Random(1)):
        stream = open_filter(MASK, BLOCK)
        assert run(stream, pieces) == left
        assert (stream.blocked, stream.blocked_by) == (True, "block")
        assert (stream.released, stream.held) == (settled, 0)
        assert [hit.rule_id for hit in stream.hits] == ["block"]
        assert stream.feed("more") == stream.flush() == ""


def test_feed_after_the_end_is_refused() -> None:
    for end in (JsonValueFilter.flush, JsonValueFilter.abandon):
        stream = open_filter(MASK)
        end(stream)
        with pytest.raises(RuntimeError, match="has ended"):
            stream.feed("x")


def test_expire_lets_go_what_the_policy_lets_go() -> None:
    stream = open_filter(MASK, on_max_hold="release")
    assert stream.feed(r'{"a":"\u654f') == '{"a":"'
    assert stream.expire() == "敏"
    assert (stream.held, stream.num_leaked) == (0, 1)
    assert stream.feed('感","b":"敏"') + stream.flush() == '*","b":"敏"'
    assert stream.num_leaked == 1


def test_expire_blocks_by_the_policy() -> None:
    stream = open_filter(MASK)
    stream.feed('{"a":"x敏')
    assert stream.expire() == ""
    assert (stream.blocked, stream.held, stream.released) == (True, 0, 7)
    assert stream.feed('感"}') == ""


def test_expire_leaves_a_number_that_no_rule_is_about() -> None:
    stream = open_filter(MASK)
    assert stream.feed("[12") == "["
    assert stream.expire() == ""
    assert not stream.blocked
    assert stream.feed("3]") == "123]"


def test_expire_of_a_number_in_question_is_the_policys() -> None:
    stream = open_filter(REDACT)
    stream.feed("[13")
    assert stream.expire() == ""
    assert stream.blocked
    stream = open_filter(REDACT, on_max_hold="release")
    stream.feed("[13")
    assert stream.expire() == "13"
    assert stream.feed(r'8, "\u8bcda"') + stream.flush() == '["\\, "["\\"'  # plain text from there on


def test_abandon_keeps_what_is_undecided() -> None:
    stream = open_filter(MASK)
    stream.feed('{"a":"x敏')
    assert stream.abandon() == ""
    assert (stream.held, stream.released) == (1, 7)
    stream = open_filter(REDACT)
    stream.feed("[13")
    assert stream.abandon() == ""
    assert stream.held == 2


def test_pause_lets_go_what_is_held() -> None:
    stream = open_filter(MASK)
    stream.feed('{"a":"敏')
    assert stream.pause() == "敏"
    assert stream.held == 0
    assert stream.feed('x"}') + stream.flush() == 'x"}'
    stream = open_filter(REDACT)
    stream.feed('{"a":138')
    assert stream.pause() == r'"[\"\\"'
    assert stream.feed(',"b":2}') + stream.flush() == ',"b":2}'


def test_deep_nesting_is_bounded_and_then_plain() -> None:
    text = "[" * 200_000 + '"敏感'
    stream = open_filter(MASK)
    assert run(stream, [text]) == "[" * 200_000 + '"**'
    stream = open_filter(MASK)
    assert (
        run(stream, ["[" * MAX_DEPTH, r'"\"', '感"', "]" * MAX_DEPTH])
        == "[" * MAX_DEPTH + r'"\"感"' + "]" * MAX_DEPTH
    )


def test_long_number_is_plain_text() -> None:
    digits = "2" * MAX_SCALAR_CHARS
    for rest, left in (("138", '["\\'), ("", "")):
        for pieces in ([f"[{digits}{rest}]"], list(f"[{digits}{rest}]")):
            stream = open_filter(REDACT)
            assert run(stream, pieces) == f"[{digits}{left}]"
            assert stream.peak_held <= MAX_SCALAR_CHARS


def test_offsets_of_many_escapes_take_bounded_memory() -> None:
    stream = open_filter(MASK)
    text = '"' + r"\u611f" * 50_000 + r"\u654f\u611f"
    for start in range(0, len(text), 999):
        stream.feed(text[start : start + 999])
    assert [(hit.start, hit.end) for hit in stream.hits] == [(len(text) - 12, len(text))]
    value = stream._value
    assert value is not None
    assert len(value._decoded) < 5000


def test_released_is_where_a_long_hold_begins() -> None:
    """However many escapes are held, none of them is forgotten."""
    rule = Rule("long", ("感" * 6000,), "mask", replacement="*")
    stream = open_filter(rule, max_hold_chars=10_000)
    stream.feed('["x' + r"\u611f" * 5500)
    assert (stream.released, stream.held) == (3, 5500 * 6)


def filtered(text: str, rules: CompiledRules) -> str:
    """A text through a filter of its own."""
    stream = rules.stream()
    assert stream is not None
    return stream.feed(text) + stream.flush()


def value_of(text: str, number: Callable[[str], Any]) -> Any:
    """A document with its objects as lists of members, for two keys may become one."""
    return json.loads(
        text, object_pairs_hook=lambda pairs: ("object", pairs), parse_int=number, parse_float=number
    )


def expected_value(value: Any, rules: CompiledRules) -> Any:
    if isinstance(value, str):
        return filtered(value, rules)
    if isinstance(value, tuple):
        return "object", [(filtered(key, rules), expected_value(item, rules)) for key, item in value[1]]
    return [expected_value(item, rules) for item in value] if isinstance(value, list) else value


class Number(str):
    """The digits of a number; equal to the string that a rewritten one becomes."""


def layout(text: str) -> str:
    """A text without what is in its strings."""
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)


def fuzz_json(num_cases: int, seed: int) -> None:
    rng = random.Random(seed)
    rules = compiled(MASK, REDACT, FLAG)
    for _ in range(num_cases):
        text = written(random_value(rng), rng)
        expected = expected_value(value_of(text, Number), rules)
        for pieces in (
            splits(text, rng, 2) if len(text) < 60 else ([text], list(text), random_split(text, rng))
        ):
            out = run(open_filter(MASK, REDACT, FLAG), pieces)
            assert value_of(out, Number) == expected, text
            assert JsonCheck().feed(out) is None
        if "138" not in text:
            assert layout(out) == layout(text)


def test_json_stays_json_of_filtered_values() -> None:
    fuzz_json(400, 1)


@pytest.mark.long
def test_much_json_stays_json_of_filtered_values() -> None:
    fuzz_json(20_000, 2)


def reads(text: str) -> str:
    """A text as a reader takes it that knows `\\u` escapes anywhere."""
    return re.sub(r"\\u([0-9a-fA-F]{4})|\\.", lambda e: chr(int(e[1], 16)) if e[1] else e[0], text)


def watched(stream: JsonValueFilter, pieces: Sequence[str], whole: str) -> None:
    """All that must hold after each piece of any text."""
    out, num_fed, settled = "", 0, 0
    for piece in pieces:
        out += stream.feed(piece)
        num_fed += len(piece)
        assert whole.startswith(out)
        assert settled <= stream.released <= num_fed
        assert stream.blocked or stream.released + stream.held == num_fed
        settled = stream.released
    assert out + stream.flush() == whole
    assert stream.held == 0
    assert stream.blocked or stream.released == num_fed


def fuzz_any_text(num_cases: int, seed: int) -> None:
    rng = random.Random(seed)
    num_blocked = num_hits = 0
    for _ in range(num_cases):
        text = broken(written(random_value(rng, 2), rng), rng)
        text = "".join(
            rng.choice([char, char, char, *PIECES]) if rng.random() < 0.1 else char for char in text
        )
        rules = (MASK, PLAIN_REDACT, FLAG, *([BLOCK] if rng.random() < 0.5 else []))
        first = open_filter(*rules)
        whole = run(first, [text])
        num_blocked += first.blocked
        num_hits += len(first.hits)
        assert not any(word in reads(whole) for word in DENIED), text
        for pieces in splits(text, rng, 2) if len(text) < 50 else (list(text), random_split(text, rng)):
            stream = open_filter(*rules)
            watched(stream, pieces, whole)
            assert (stream.hits, stream.blocked, stream.released) == (
                first.hits,
                first.blocked,
                first.released,
            )
        for hit in first.hits:
            check_hit(hit, text)
    assert num_blocked > num_cases // 50
    assert num_hits > num_cases // 5


def check_hit(hit: Hit, text: str) -> None:
    words = next(rule.match for rule in (MASK, REDACT, FLAG, BLOCK) if rule.id == hit.rule_id)
    assert reads(text[hit.start : hit.end]).lower() in words


def test_any_text_is_filtered_the_same_however_it_is_cut() -> None:
    fuzz_any_text(400, 3)


@pytest.mark.long
def test_many_texts_are_filtered_the_same_however_they_are_cut() -> None:
    fuzz_any_text(20_000, 4)


def test_text_that_is_not_json_is_filtered_as_it_is() -> None:
    rng = random.Random(5)
    rules = compiled(MASK, REDACT)
    for _ in range(200):
        text = "x" + "".join(rng.choices('敏感词a138"{}[]:, 1', k=rng.randint(0, 12)))
        assert run(open_filter(MASK, REDACT), [text]) == filtered(text, rules)
