"""Python's grammar against the expression that vLLM has for lists of calls."""

from __future__ import annotations

import random

import pytest

from backend.parser_python import PythonCalls
from tests.backend.vllm_parts import import_vllm

pytestmark = pytest.mark.engine
NAMES = ["f", "get_x", "a1", "_f", "a.b", "1a", "ä"]
NAMES_OFTEN = [*["f"] * 9, *NAMES]
VALUES = ["1", "'x'", "'(a, b=c)]'", "[1, 2]", "{'a': None}", "x", "g(1)", "-1.5"]


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    import_vllm()


def random_call(rng: random.Random) -> str:
    equals = rng.choice(["=", "=", "=", " = "])
    arguments = [f"{rng.choice(NAMES_OFTEN)}{equals}{rng.choice(VALUES)}" for _ in range(rng.randint(0, 2))]
    arguments = arguments or rng.choice([[], [], ["1"], ["x"]])
    blank = rng.choice(["", "", "", " "])
    return f"{rng.choice(NAMES_OFTEN)}({blank}{', '.join(arguments)})"


def test_the_verdict_is_that_of_vllm() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers.pythonic_tool_parser import PythonicToolParser

    rng = random.Random(8)
    request = ChatCompletionRequest(model="m", messages=[])
    num_called = 0
    for _ in range(600):
        calls = ", ".join(random_call(rng) for _ in range(rng.randint(1, 2)))
        text = rng.choice(["[", "[", "[", "[ "]) + calls + rng.choice(["]", "]", "]\n", "] x", ""])
        theirs, ours = PythonicToolParser(None), PythonicToolParser(None)
        ours.TOOL_CALL_REGEX = PythonCalls()
        expected = theirs.extract_tool_calls(text, request)
        found = ours.extract_tool_calls(text, request)
        num_called += expected.tools_called
        assert (found.tools_called, found.content) == (expected.tools_called, expected.content), text
        assert [call.function for call in found.tool_calls] == [call.function for call in expected.tool_calls]
    assert num_called > 40
