"""Calls that leave as they pass, without vLLM. Against its whole parse: test_output_parsers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from backend.parser_ending import Begun, Call, Whole
from backend.parser_gates import BareObjectGate, Gate, MarkerGate, TaggedObjectGate
from backend.parser_parts import GatedCalls
from backend.parser_stream import CallStream, NamedCalls, ObjectCalls
from pipeline.events import CONTENT, TOOL_ARGUMENTS, TOOL_NAME, Fragment
from tests.pipeline.splits import splits

NAMES = {"f", "g", "é"}
KEYS = ("arguments", "parameters")
STREAMS: dict[str, Callable[[], CallStream]] = {
    "tagged": lambda: ObjectCalls(NAMES, set(KEYS), "<call>", "</call>"),
    "bare": lambda: ObjectCalls(NAMES, set(KEYS)),
    "fenced": lambda: NamedCalls(NAMES, "<one>", "\n```\n", "\n```</one>"),
    "named": lambda: NamedCalls(NAMES, "<one>", "<sep>", "</one>"),
}
GATES: dict[str, Callable[[CallStream], Gate]] = {
    "tagged": lambda stream: TaggedObjectGate("<call>", KEYS, stream=stream),
    "bare": lambda stream: BareObjectGate(KEYS, stream=stream),
    "fenced": lambda stream: MarkerGate("<all>", stream=stream),
    "named": lambda stream: MarkerGate("<all>", stream=stream),
}
F = '{"name": "f", "arguments": {"a": 1}}'
LONG = '{"name": "}{", "b": [{"}": "\\"}"}, {}], "arguments": {"name": "g"}}'

# format, what follows the marker, the calls of which something leaves
CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("tagged", F, [("f", '{"a": 1}')]),
    ("tagged", f"{F}</call>", [("f", '{"a": 1}')]),
    ("tagged", f" \n{F}\n </call> text {{}} <cal <call>\t{F}", [("f", '{"a": 1}')] * 2),
    ("tagged", f'{{"name": "g", "arguments": {LONG}}}</call>', [("g", LONG)]),
    ("tagged", '\n{ "name"\t:"f" , "arguments" :\n{ "a" : 1 } }', [("f", '{ "a" : 1 }')]),
    ("tagged", '{"name": "f", "arguments": {"a": "x ', [("f", '{"a": "x ')]),
    ("tagged", '{"name": "f", "arguments": {', [("f", "{")]),
    ("tagged", '{"name": "f", "arguments": ', []),
    ("tagged", '{"n\\u0061me": "\\u00e9", "arguments": {}}', [("é", "{}")]),
    ("tagged", '{"arguments": {"a": "}"}, "name": "f"}', [("f", '{"a": "}"}')]),
    ("tagged", '{"arguments": {"a": "}"}, "name": "f', []),
    ("tagged", '{"arguments": {"a": oops}, "name": "f"}', []),
    ("tagged", '{"type": "function", "name": "f", "arguments": {}}', [("f", "{}")]),
    ("tagged", '{"type": "\n", "name": "f", "arguments": {}}', []),
    (
        "tagged",
        '{"arguments": {}, "name": "g"}</call><call>{"name": "f", "arguments": {"a": 1}}',
        [("g", "{}"), ("f", '{"a": 1}')],
    ),
    ("tagged", '{"type": 3, "name": "f", "arguments": {}}', []),
    ("tagged", '{"name": "no tool", "arguments": {}}', []),
    ("tagged", '{"name": "f", "name": "g", "arguments": {}}', []),
    ("tagged", '{"name": "f", "arguments": {}, "name": "g"}</call><call>' + F, [("f", "{}")]),
    ("tagged", '{"name": "f", "arguments": {}, "parameters": {"b": 1}}</call><call>' + F, [("f", "{}")]),
    ("tagged", '{"name": "f", "arguments": null}', []),
    ("tagged", '{"name": "f", "arguments": "{}"}', []),
    ("tagged", '{"name": "f", "arguments": [1]}', []),
    ("tagged", '{"name": "f"}</call><call>' + F, []),
    ("tagged", '{"name": "f", }', []),
    ("tagged", '{"name": "f"; "arguments": {}}', []),
    ("tagged", "{'name': 'f', 'arguments': {}}", []),
    ("tagged", '{"name": "f\n", "arguments": {}}', []),
    ("tagged", '{"name": "\\ud800", "arguments": {}}', []),
    ("tagged", '["name", "f"]', []),
    ("tagged", f"{F} x</call><call>{F}", [("f", '{"a": 1}')]),
    ("tagged", f"{F}<call>{F}", [("f", '{"a": 1}')]),
    ("bare", F[1:], [("f", '{"a": 1}')]),
    ("bare", f"{F[1:]}; {F}", [("f", '{"a": 1}')] * 2),
    ("bare", f"{F[1:]}{F}", [("f", '{"a": 1}')]),  # vLLM does not see the second either
    (
        "bare",
        '"name": "f", "parameters": {}} and {"name": "g", "parameters": {}}',
        [("f", "{}"), ("g", "{}")],
    ),
    ("bare", '"parameters": {}, "arguments": {}, "name": "f"}', []),
    ("bare", '"name": "f", "parameters": {}} and {x} ' + F, [("f", "{}")]),
    ("named", '<one>f<sep>{"a": 1}</one><one>g<sep>{}</one>', [("f", '{"a": 1}'), ("g", "{}")]),
    ("named", '\n<one<one>f<sep> {"a": 1} </one></all>', [("f", '{"a": 1}')]),
    ("named", "<one>no tool<sep>{}</one><one>g<sep>{}</one>", []),
    ("named", "<one>f<sep>[]</one>", []),
    ("named", "<one>f<sep>{}x</one><one>g<sep>{}</one>", [("f", "{}")]),
    ("named", f"<one>{'f' * 999}<sep>{{}}", []),
    ("fenced", '<one>f\n```\n{"a": 1}\n```</one>\n<one>g\n```\n{"b": ', [("f", '{"a": 1}'), ("g", '{"b": ')]),
    ("fenced", '<one>f\n```\n{"a": 1}```</one>\n<one>g\n```\n{"b": ', [("f", '{"a": 1}')]),
]


@pytest.mark.parametrize(("form", "text", "calls"), CASES)
def test_calls_leave_as_far_as_they_can_be_read(form: str, text: str, calls: list[tuple[str, str]]) -> None:
    for split in splits(text, random.Random(1)):
        stream = STREAMS[form]()
        fragments: list[Fragment] = []
        for piece in split:
            assert stream.feed(piece) is stream.has_begun
            fragments += stream.take()
        assert stream.begun == [Begun(*call) for call in calls]
        assert joined(fragments) == calls


def joined(fragments: list[Fragment]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for channel, text, call, call_id in fragments:
        assert text
        assert call_id is None
        if channel == TOOL_NAME:
            calls.append((text, ""))
        else:
            assert channel == TOOL_ARGUMENTS
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
        assert call == len(calls) - 1
    return calls


def test_a_call_leaves_with_the_brace_of_its_arguments_and_these_as_they_pass() -> None:
    stream = STREAMS["tagged"]()
    for character in '{"name": "f", "arguments": ':
        stream.feed(character)
        assert not stream.take()
    stream.feed("{")
    assert list(stream.take()) == [Fragment(TOOL_NAME, "f"), Fragment(TOOL_ARGUMENTS, "{")]
    for piece in ('"', "a", '": "', "long ", "}{", '"', "}"):
        stream.feed(piece)
        assert list(stream.take()) == [Fragment(TOOL_ARGUMENTS, piece)]


def part(form: str, whole: Whole, problems: Counter[str]) -> GatedCalls:
    stream = STREAMS[form]()
    return GatedCalls(GATES[form](stream), lambda text: whole, problems, stream)


JSON = [
    F,
    F[:-1] + ", }",
    F[:-3],
    '{"name": "f"',
    ', "arguments": {',
    '"a": "',
    "}",
    "}}",
    "{",
    "\n",
    '"',
    "]",
    "; ",
    "\\",
    "x",
    ",",
    " ",
]
NAMED = [
    "<one>",
    "f",
    "<one>f<sep>{",
    "<one>f\n```\n{",
    "}</one>",
    "}\n```</one>",
    "\n```\n",
    "<sep>",
    '{"',
    "x",
    "}",
]
PIECES = {
    "tagged": ("<call>", [*JSON, "</call>", "<call>", "</call><call>"]),
    "bare": ("{", [*JSON, F[1:]]),
    "named": ("<all>", NAMED),
    "fenced": ("<all>", NAMED),
}


@pytest.mark.parametrize("form", GATES)
def test_no_split_changes_what_leaves_of_content_and_calls(form: str) -> None:
    """A gate may give a text free while the reader is sure of a call: whatever comes first must count."""
    rng = random.Random(2)
    begin, pieces = PIECES[form]
    num_calls = 0
    for _ in range(250):
        text = rng.choice(["x ", " ", ""]) + begin
        text += "".join(rng.choice(pieces) for _ in range(rng.randint(1, 7)))
        ends = set()
        for split in splits(text, rng):
            calls = part(form, Whole("", ()), Counter())
            fragments = [each for piece in split if piece for each in calls.feed(piece)]
            content = "".join(each.text for each in fragments if each.channel == CONTENT)
            named = joined([each for each in fragments if each.channel != CONTENT])
            assert text.startswith(content)
            assert not named or content.strip() in ("", "x")  # not what follows the marker
            ends.add((content, tuple(named), calls.rest()))
        assert len(ends) == 1, text
        num_calls += bool(ends.pop()[1])
    assert num_calls > 10


LEFT = "x <call>" + F[:-2]  # so far: the call f with {"a": 1
SECOND = "}</call><call>" + F.replace('"f"', '"g"')[:-1]
ENDINGS = [
    # what follows, what the whole parse finds, what leaves at the end, problems
    ("}}", Whole("x ", [Call("f", '{"a":  1}')]), [], 0),
    ("}}", Whole("x ", [Call("f", '{"a": 1}'), Call("h", "1", "id")]), [("h", "1")], 0),
    ("}", Whole("x ", [Call("f", '{"a": 2}'), Call("h", "1", "id")]), [("h", "1")], 1),
    ("", Whole("x ", [Call("f", '{"a": 1, "b": 2}')]), [', "b": 2}'], 0),
    ("}", Whole("x ", [Call("f", '{"a": 1} x')]), [], 1),
    ("", Whole("x ", [Call("f", '{"b": 2}')]), [], 1),
    ("}}", Whole("x ", [Call("h", '{"a": 1}'), Call("f", "{}")]), [], 1),
    ("}}", Whole("x <call>" + F, []), [], 1),
    ("", Whole("x " + LEFT, []), [], 1),
    ("}" + SECOND, Whole("x ", [Call("f", '{"a": 1}')]), [], 1),
    ("}" + SECOND, Whole("x ", [Call("f", '{"a": 1}'), Call("g", '{"a": 1}')]), [], 0),
]


@pytest.mark.parametrize(("more", "whole", "last", "num_problems"), ENDINGS)
def test_the_end_adds_what_the_whole_parse_has_and_takes_nothing_back(
    more: str, whole: Whole, last: list[tuple[str, str] | str], num_problems: int
) -> None:
    for split in splits(LEFT + more, random.Random(3)):
        problems: Counter[str] = Counter()
        calls = part("tagged", whole, problems)
        left = [each for piece in split if piece for each in calls.feed(piece)]
        assert "".join(each.text for each in left if each.channel == CONTENT) == "x "
        assert calls.begun[0] == Begun("f", '{"a": 1' + more[:1])
        assert calls.rest() == ""
        num = len(calls.begun)
        expected: list[Fragment] = []
        for each in last:
            if isinstance(each, str):
                expected.append(Fragment(TOOL_ARGUMENTS, each, num - 1))
            else:
                expected += [Fragment(TOOL_NAME, each[0], num, "id"), Fragment(TOOL_ARGUMENTS, each[1], num)]
        assert list(calls.finish()) == expected
        assert problems == ({"contradiction": num_problems} if num_problems else {})
