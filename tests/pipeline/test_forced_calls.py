"""Calls that the engine was made to say, read from their JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from pipeline.events import CONTENT, REASONING, TOOL_ARGUMENTS, TOOL_NAME, Fragment
from pipeline.forced_calls import Forced, NamedCall, RequiredCalls
from pipeline.ports import OutputParser
from tests.pipeline.splits import splits

Said = list[tuple[str, str, int]]
WHITESPACE = ["", "", "", " ", "\n", "\t \r\n"]


def said(parser: OutputParser, pieces: Iterable[str]) -> Said:
    """Channel, text and call, with the pieces of one text joined. No fragment is empty."""
    fragments = [fragment for piece in pieces for fragment in parser.feed(piece, ())]
    joined: Said = []
    for fragment in [*fragments, *parser.finish()]:
        assert fragment.text
        channel, text, call, call_id = fragment
        assert call_id is None
        if channel != TOOL_NAME and joined and joined[-1][0] == channel and joined[-1][2] == call:
            text = joined.pop()[1] + text
        joined.append((channel, text, call))
    return joined


def check_splits(make: Callable[[], OutputParser], text: str, expected: Said, seed: int = 0) -> None:
    for pieces in splits(text, random.Random(seed)):
        assert said(make(), pieces) == expected, pieces


def named(arguments: str, content: str = "") -> Said:
    last = [(CONTENT, content, 0)] if content else []
    return [(TOOL_NAME, "f", 0), (TOOL_ARGUMENTS, arguments, 0), *last]


def calls(*pairs: tuple[str, str]) -> Said:
    both = [((TOOL_NAME, name, i), (TOOL_ARGUMENTS, text, i)) for i, (name, text) in enumerate(pairs)]
    return [each for pair in both for each in pair if each[1]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n\t\r", []),
        ("{}", named("{}")),
        (' \n{"q": "a b"}\n ', named('{"q": "a b"}')),
        (r'{"q": "}\"{\\"}', named(r'{"q": "}\"{\\"}')),
        ('{ "q" : [ {"a":[]} , "敏感词 😀" ] }', named('{ "q" : [ {"a":[]} , "敏感词 😀" ] }')),
        ('{"q": "unfinished ', named('{"q": "unfinished ')),
        ('{"q": 1}<|im_end|>', named('{"q": 1}', "<|im_end|>")),
        ('{"q": 1} \n{"q": 2} ', named('{"q": 1}', '{"q": 2} ')),
        ("[1, 2] ", named("[1, 2]")),
        ('"a]" x', named('"a]"', "x")),
        ("12", named("12")),
        (" not JSON, and ", named("not JSON, and ")),
    ],
)
def test_a_named_call_has_the_text_as_arguments(text: str, expected: Said) -> None:
    check_splits(lambda: NamedCall("f"), text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("\n ", []),
        ('[{"name":"f","parameters":{"a":1}}]', calls(("f", '{"a":1}'))),
        (' [ { "name" : "f" , "parameters" : { "a" : 1 } } ] ', calls(("f", '{ "a" : 1 }'))),
        ('[{"parameters":{"a":1},"name":"f"}]', calls(("f", '{"a":1}'))),
        (
            '[{"name":"f","parameters":{}},\n{"parameters":[],"name":"g"},{"name":"f","parameters":""}]',
            calls(("f", "{}"), ("g", "[]"), ("f", '""')),
        ),
        (r'[{"name":"a\"\\\u00e9\n","parameters":{}}]', calls(('a"\\é\n', "{}"))),
        (r'[{"n\u0061me":"f","parameters":{"name":"\"}]"}}]', calls(("f", r'{"name":"\"}]"}'))),
        ('[{"name":"f"}]', calls(("f", "{}"))),  # arguments are always JSON
        # Cut off: what has left is all there is.
        ("[", []),
        ('[{"name":"ge', []),
        ('[{"name":"f"', calls(("f", ""))),
        ('[{"name":"f","parameters":{"a":"x ', calls(("f", '{"a":"x '))),
        ('[{"parameters":{"a":1},"na', []),
        ('[{"name":"f","parameters":{}},{"name":"g","para', [*calls(("f", "{}")), (TOOL_NAME, "g", 1)]),
    ],
)
def test_required_calls_are_read_from_the_array(text: str, expected: Said) -> None:
    check_splits(RequiredCalls, text, expected)


@pytest.mark.parametrize(
    "text",
    [
        " I cannot do that.",
        "[]",
        "[1]",
        "[[",
        "{}",
        "[{}]",
        '[{"name":3}]',
        '[{"name":""}]',
        '[{"name":"\\ud800"}]',
        '[{"name":"\\x"}]',
        '[{"name":"a\nb"}]',
        '[{"other":1}]',
        '[{"parameters":{},"parameters":{}}]',
        '[{"parameters":null}]',
        '[{"parameters":{"a": [1]}}] and more',
        '[{"parameters":{}, ]',
        '[ {"parameters":{} , "name" : 1',
        '{"name":"f","parameters":{}}',
    ],
)
def test_a_text_without_the_form_of_calls_is_content(text: str) -> None:
    check_splits(RequiredCalls, text, [(CONTENT, text, 0)])


@pytest.mark.parametrize(
    ("rest", "content"),
    [
        ("]<|im_end|>", "<|im_end|>"),
        ("] [", "["),
        (" x", "x"),
        (", ]", "]"),
        (', {"parameters" : {"b":2} , x', '{"parameters" : {"b":2} , x'),
        (', {"name":7}]', '{"name":7}]'),
    ],
)
def test_what_follows_the_calls_and_is_none_is_content(rest: str, content: str) -> None:
    expected = [*calls(("f", "{}")), (CONTENT, content, 0)]
    check_splits(RequiredCalls, '[{"name":"f","parameters":{}}' + rest, expected)


def test_what_does_not_fit_within_a_call_is_content() -> None:
    check_splits(RequiredCalls, '[{"name":"f", x', [(TOOL_NAME, "f", 0), (CONTENT, "x", 0)])
    check_splits(RequiredCalls, '[{"name":"f","name":"g"}]', [(TOOL_NAME, "f", 0), (CONTENT, ':"g"}]', 0)])


def test_a_name_leaves_at_its_quote_and_arguments_at_once() -> None:
    parser = RequiredCalls()
    assert list(parser.feed('[{"name":"get', ())) == []
    assert list(parser.feed('"', ())) == [Fragment(TOOL_NAME, "get")]
    assert list(parser.feed(',"parameters": ', ())) == []
    for piece in ("{", '"a', " b", '"', ":1", "}"):
        assert list(parser.feed(piece, ())) == [Fragment(TOOL_ARGUMENTS, piece)]


def test_random_calls_give_the_same_at_every_split() -> None:
    rng = random.Random(8)
    for seed in range(60):
        text, expected = random_calls(rng)
        check_splits(RequiredCalls, text, expected, seed)


def test_random_calls_that_are_cut_off_give_a_beginning_of_the_whole() -> None:
    rng = random.Random(9)
    for _ in range(60):
        text, whole = random_calls(rng)
        for end in range(len(text)):
            part = said(RequiredCalls(), [text[:end]])
            assert part[:-1] == whole[: len(part[:-1])]
            if part:
                channel, beginning, call = part[-1]
                assert whole[len(part) - 1][1].startswith(beginning)
                assert (channel, call) == (whole[len(part) - 1][0], whole[len(part) - 1][2])


def random_calls(rng: random.Random) -> tuple[str, Said]:
    """Calls as JSON in a random spelling, and what must be read from it."""
    pairs, items = [], []
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(["f", "get_weather", "查", 'a"b', "\\", "a/b"])
        arguments = spelled(random_object(rng), rng)
        members = [
            spelled("name", rng) + ":" + spaced(spelled(name, rng), rng),
            spelled("parameters", rng) + spaced(":", rng) + arguments,
        ]
        rng.shuffle(members)
        items.append("{" + ",".join(spaced(member, rng) for member in members) + "}")
        pairs.append((name, arguments))
    return spaced("[" + ",".join(spaced(item, rng) for item in items) + "]", rng), calls(*pairs)


def spaced(text: str, rng: random.Random) -> str:
    return rng.choice(WHITESPACE) + text + rng.choice(WHITESPACE)


def spelled(value: Any, rng: random.Random) -> str:
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))


def random_object(rng: random.Random) -> dict[str, Any]:
    leaves: Sequence[Any] = [
        1,
        -2.5,
        True,
        None,
        "",
        "}",
        '"',
        "\\",
        "敏感",
        "😀",
        "[{",
        [],
        {},
        [{"a": "]"}],
    ]
    return {rng.choice(["a", "b", '"}', "\\"]): rng.choice(leaves) for _ in range(rng.randint(0, 3))}


class Thinking:
    """Reasoning up to the first `/`."""

    def __init__(self) -> None:
        self._channel = REASONING

    def feed(self, text: str, ids: Sequence[int]) -> Sequence[Fragment]:
        thought, slash, rest = text.partition("/") if self._channel == REASONING else ("", "/", text)
        out = [Fragment(REASONING, thought)] if thought else []
        if slash:
            self._channel = CONTENT
        return [*out, Fragment(CONTENT, rest)] if rest else out

    def finish(self) -> Sequence[Fragment]:
        return [Fragment(CONTENT, " {}")] if self._channel == CONTENT else []


def test_reasoning_comes_before_forced_calls() -> None:
    text = 'so [{"name"…/ {"a":1}'
    expected = [
        (REASONING, 'so [{"name"…', 0),
        (TOOL_NAME, "f", 0),
        (TOOL_ARGUMENTS, '{"a":1}', 0),
        (CONTENT, "{}", 0),  # given by the other parser at its end
    ]
    check_splits(lambda: Forced(Thinking(), NamedCall("f")), text, expected)


def test_without_a_parser_of_reasoning_all_is_the_calls() -> None:
    check_splits(lambda: Forced(None, NamedCall("f")), '{"a":1}', named('{"a":1}'))
    assert said(Forced(Thinking(), RequiredCalls()), ["only thoughts"]) == [(REASONING, "only thoughts", 0)]
