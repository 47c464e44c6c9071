"""Where a tool call can begin, without vLLM. Against its parsers: test_output_parsers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from backend.parser_gates import BareObjectGate, Gate, MarkerGate, Markers, PythonGate, TaggedObjectGate
from tests.pipeline.splits import splits

ARGUMENTS = ("arguments",)
GATES: dict[str, Callable[[], Gate]] = {
    "marker": lambda: MarkerGate("<tool_call>", "<function="),
    "tagged": lambda: TaggedObjectGate("<tool_call>", ARGUMENTS),
    "bare": lambda: BareObjectGate((*ARGUMENTS, "parameters")),
    "python": PythonGate,
    "prefixed": lambda: PythonGate("<|python_start|>"),
}
CALL = '{"name": "f", "arguments": {"a": "} \\" {", "b": [1, {}]}}'

# gate, text, how much of it is content, whether a call may have begun
CASES = [
    ("marker", "plain < text", "plain < text", False),
    ("marker", "plain <tool", "plain ", False),
    ("marker", "plain <tool_call> or not", "plain ", True),
    ("marker", "plain <<function=", "plain <", True),
    ("tagged", f"look <tool_call>\n{CALL}\n</tool_call>", "look ", True),
    ("tagged", "use <tool_call> so", "use <tool_call> so", False),
    ("tagged", "<tool_call>", "", True),
    ("tagged", "<tool_call> \n{", "", True),
    ("tagged", "<tool_call>{}", "<tool_call>{}", False),
    ("tagged", '<tool_call>{"name": "f"} so', '<tool_call>{"name": "f"} so', False),
    ("tagged", '<tool_call>{"name": "f", "arguments": {"a": 1', "", True),
    ("tagged", '<tool_call>{"name": "f", "arguments": nonsense} so', None, False),
    ("bare", CALL, "", True),
    ("bare", f"{CALL} so {{", "", True),
    ("bare", '{"name": "f", "parameters": {}}; {"na', "", True),
    ("bare", "f(x) { return; } {", "f(x) { return; } {", False),
    ("bare", 'so {"a": 1} and', 'so {"a": 1} and', False),
    ("bare", 'so {"a": "x\ny', 'so {"a": "x\ny', False),
    ("bare", 'so {"a": "\\', "so ", True),
    ("python", "[now()] so", "", True),
    ("python", "[now", "", False),
    ("python", "[now](a link)", "[now](a link)", False),
    ("python", " [now()]", " [now()]", False),
    ("python", "[1]", "[1]", False),
    ("prefixed", "<|python_start|>[", "", True),
    ("prefixed", "<|python", "", False),
    ("prefixed", "<|python>", "<|python>", False),
    ("prefixed", "[now()", "", True),
]


@pytest.mark.parametrize(("gate", "text", "content", "is_open"), CASES)
def test_content_leaves_up_to_where_a_call_can_begin(
    gate: str, text: str, content: str | None, is_open: bool
) -> None:
    rng = random.Random(3)
    for split in splits(text, rng):
        opened = GATES[gate]()
        left = "".join(opened.feed(piece) for piece in split)
        assert left == (text if content is None else content)
        assert left + opened.rest() == text
        assert opened.is_open is is_open


@pytest.mark.parametrize("gate", GATES)
def test_no_split_changes_what_leaves(gate: str) -> None:
    rng = random.Random(4)
    pieces = [
        "<tool_call>",
        "<function=",
        "{",
        '{"',
        '"name": "f"',
        '"arguments": ',
        "}",
        "[",
        "now",
        "(",
        "\\",
        "\n",
        CALL,
    ]
    for _ in range(60):
        text = "".join(rng.choice(pieces)[: rng.randint(1, 99)] for _ in range(rng.randint(1, 5)))
        ends = set()
        for split in splits(text, rng):
            opened = GATES[gate]()
            left = "".join(opened.feed(piece) for piece in split)
            ends.add((left, opened.rest(), opened.is_open))
        assert len(ends) == 1, text


def test_markers_are_touched_by_their_beginnings_at_the_end_only() -> None:
    markers = Markers(["<think>", ""], ["</b"])
    touched = {"a<think>b", "a<think", "<", "a</", "x <t"}
    plain = {"", "a", "< b", "<b>", "</b", "think>", "</i>"}
    assert {text for text in touched | plain if markers.touch(text)} == touched
