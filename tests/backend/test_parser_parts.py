"""The parts of a parser that need no vLLM. The others, and all against vLLM: test_output_parsers."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from backend.parser_ending import Call, Whole
from backend.parser_gates import MarkerGate, Markers
from backend.parser_parts import EngineCalls, EnginePart, GatedCalls, MarkedReasoning
from pipeline.events import CONTENT, REASONING, TOOL_ARGUMENTS, TOOL_NAME, Fragment
from tests.pipeline.splits import splits

REASONED = [
    # text, reasoning, content
    ("<think>so</think>then", "so", "then"),
    ("so</think>then</think><think>", "so", "then</think><think>"),
    (" \n<think>so", "so", ""),
    (" \nso <think> it</thi", " \nso <think> it</thi", ""),
    ("<think><think>so</think>", "<think>so", ""),
    ("<think></think>", "", ""),
    ("<th", "<th", ""),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), REASONED)
def test_reasoning_is_what_stands_before_the_end_marker(text: str, reasoning: str, content: str) -> None:
    for split in splits(text, random.Random(1)):
        part = MarkedReasoning("<think>", "</think>")
        fragments = [each for piece in split if piece for each in part.feed(piece)]
        fragments += part.finish()
        joined = {REASONING: "", CONTENT: ""}
        for each in fragments:
            assert each.text
            joined[each.channel] += each.text
        assert joined == {REASONING: reasoning, CONTENT: content}


def test_all_but_a_beginning_of_the_end_marker_leaves_at_once() -> None:
    part = MarkedReasoning("<think>", "</think>")
    assert not part.feed("<think>")
    assert part.feed("a < b <") == (Fragment(REASONING, "a < b "),)
    assert part.feed("/b") == (Fragment(REASONING, "</b"),)


def whole(content: str, *calls: Call) -> Any:
    return lambda text: Whole(content, calls)


def test_the_whole_parse_adds_content_and_calls() -> None:
    problems: Counter[str] = Counter()
    part = GatedCalls(MarkerGate("<call>"), whole("so ", Call("f", "{}", "id")), problems)
    assert part.feed("so <call>f") == (Fragment(CONTENT, "so "),)
    assert list(part.finish()) == [
        Fragment(TOOL_NAME, "f", 0, "id"),
        Fragment(TOOL_ARGUMENTS, "{}", 0),
    ]
    assert not problems


def test_a_whole_parse_that_contradicts_what_has_left_is_counted() -> None:
    problems: Counter[str] = Counter()
    part = GatedCalls(MarkerGate("<call>"), whole("other", Call("f", "{}")), problems)
    part.feed("so <call>f")
    assert [each.channel for each in part.finish()] == [TOOL_NAME, TOOL_ARGUMENTS]
    assert problems == {"contradiction": 1}
    part = GatedCalls(MarkerGate("<call>"), whole("f"), problems)
    part.feed("so <call>f")
    assert list(part.finish()) == [
        Fragment(CONTENT, "<call>f")
    ]  # no call, and text forgotten: all of it stays
    assert problems == {"contradiction": 2}


class Engine:
    """Stands in for one of vLLM's: holds back `<`, and drops nothing."""

    def __init__(self) -> None:
        self.fed: list[str] = []
        self.held = ""

    def feed(self, text: str) -> Any:
        self.fed.append(text)
        text = self.held + text
        self.held = text[-1:] if text.endswith("<") else ""
        return self.delta(text.removesuffix("<"))

    def close(self) -> Any:
        return self.delta(self.held)

    def delta(self, text: str) -> Any:
        return SimpleNamespace(content=text, reasoning=None, tool_calls=()) if text else None


def test_plain_text_goes_past_an_engine_that_holds_nothing() -> None:
    engine = Engine()
    part = EnginePart(engine.feed, engine.close, Markers(["<x>"], []))
    pieces = ["a", "b", "c <", "<", "<", "d", "e", "f <b> g", "<x>", "h", "i"]
    text = "".join(each.text for piece in pieces for each in part.feed(piece))
    assert text == "".join(pieces)
    assert engine.fed == ["a", "c <", "<", "<", "d", "e", "<x>", "h"]


def test_white_space_before_calls_of_an_engine_is_dropped() -> None:
    engine = Engine()
    made = EnginePart(engine.feed, engine.close, Markers(["<call>"], []))
    seen: list[str] = []

    def parse(text: str) -> Whole:
        seen.append(text)
        return Whole("x", [Call("f", "{}")])

    part = EngineCalls(MarkerGate("<call>"), made, parse, Counter())
    left = [
        each.text for piece in ("so", " \n", "it ", "<", "b> \n", "<call>", "f") for each in part.feed(piece)
    ]
    assert "".join(left) == "so \nit <b>"
    assert [each.text for each in part.finish()] == ["f", "{}"]
    assert seen == ["x \n<call>f"]
