"""What a tool choice makes of the engine's parameters, and who reads its text."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import jsonschema
import pytest

from pipeline.assembly import GenerationDefaults, assemble
from pipeline.encoding import pack_ids
from pipeline.errors import InvalidRequest
from pipeline.events import CONTENT, TOOL_ARGUMENTS, TOOL_NAME, Fragment
from pipeline.ports import OutputParsers
from pipeline.tool_choice import check_tool_choice, forced_schema, open_parser, with_forced_calls
from pipeline.values import ChatRequest, ModelInfo, ToolChoice
from tests.pipeline.called_tools import BAD, GOOD, REQUIRED, TOOLS, WORDS, request, tool
from tests.pipeline.requests import completion, generation


class Parsers:
    """Parsers of a model's own formats, by what they read."""

    def __init__(self, has_tools: bool, has_reasoning: bool) -> None:
        self.has_tools, self.has_reasoning = has_tools, has_reasoning

    def open(self, request: ChatRequest, prompt_ids: Sequence[int]) -> Own:
        assert list(prompt_ids) == [1, 2]
        assert self.has_reasoning or request.tool_choice.kind in ("none", "auto"), "it would read the calls"
        return Own()

    def reasoning_ended(self, request: ChatRequest, prompt_ids: Sequence[int]) -> bool | None:
        raise AssertionError

    def reasoning_parser_kwargs(self, request: ChatRequest) -> None:
        raise AssertionError


class Own:
    def feed(self, text: str, ids: Sequence[int]) -> Sequence[Fragment]:
        return [Fragment(CONTENT, text)]

    def finish(self) -> Sequence[Fragment]:
        return ()


# -- the schema ----------------------------------------------------------------------------------------


def test_a_choice_that_forces_nothing_has_no_schema() -> None:
    for kind in ("none", "auto"):
        free = request(ToolChoice(kind), *TOOLS)
        assert forced_schema(free) is None
        assert with_forced_calls({"seed": 1}, free) == {"seed": 1}
    assert with_forced_calls({"seed": 1}, completion("x")) == {"seed": 1}


def test_a_named_tool_is_forced_by_its_own_parameters() -> None:
    assert forced_schema(request(ToolChoice("named", "words"), *TOOLS)) == WORDS
    assert forced_schema(request(ToolChoice("named", "now"), *TOOLS)) == {"type": "object", "properties": {}}
    assert forced_schema(request(ToolChoice("named", "x"), tool("x", {})))["type"] == "object"


def test_a_named_tool_that_validation_has_renamed_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        forced_schema(request(ToolChoice("named", "a\x01"), tool("a")))
    assert caught.value.param == "tool_choice"


def test_required_takes_calls_of_the_tools_and_nothing_else() -> None:
    validator = jsonschema.Draft202012Validator(forced_schema(request(REQUIRED, *TOOLS)))
    for calls in [*GOOD, [*GOOD[0], *GOOD[4], *GOOD[5]]]:
        validator.validate(calls)
    for calls in [*BAD, [*GOOD[0], *BAD[2]]]:
        assert not validator.is_valid(calls), calls


def test_without_parallel_calls_there_is_one() -> None:
    schema = forced_schema(request(REQUIRED, *TOOLS, parallel_tool_calls=False))
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(GOOD[4])
    assert not validator.is_valid([*GOOD[4], *GOOD[4]])


def test_the_tools_themselves_stay_as_they_are() -> None:
    tools = copy.deepcopy(TOOLS)
    forced_schema(request(REQUIRED, *tools))
    assert tools == TOOLS


def test_a_forced_call_replaces_the_answers_format_in_the_call_to_the_engine() -> None:
    gen = generation(sampling={"seed": 3, "structured_outputs": {"json_object": True}}, n=2)
    model = ModelInfo("m", 100, 4, {}, "f")
    forced = request(ToolChoice("named", "words"), *TOOLS, gen=gen)
    calls = assemble(forced, [memoryview(pack_ids([1, 2]))], model, GenerationDefaults())
    assert [call.sampling for call in calls] == [
        {"seed": seed, "structured_outputs": {"json": WORDS}} for seed in (3, 4)
    ]


# -- the text ------------------------------------------------------------------------------------------


def channels(parsers: OutputParsers | None, choice: ToolChoice, text: str) -> list[str] | None:
    parser = open_parser(parsers, request(choice, *TOOLS), [1, 2])
    return None if parser is None else [each.channel for each in [*parser.feed(text, ()), *parser.finish()]]


@pytest.mark.parametrize("parsers", [None, Parsers(True, False), Parsers(True, True), Parsers(False, True)])
def test_forced_calls_are_read_whatever_parsers_there_are(parsers: Parsers | None) -> None:
    both = [TOOL_NAME, TOOL_ARGUMENTS]
    assert channels(parsers, ToolChoice("named", "now"), "{}") == both
    assert channels(parsers, REQUIRED, '[{"name":"now","parameters":{}}]') == both


def test_an_unforced_text_is_read_by_the_models_parsers() -> None:
    for kind in ("none", "auto"):
        assert channels(None, ToolChoice(kind), "{}") is None
        assert channels(Parsers(True, False), ToolChoice(kind), "{}") == [CONTENT]


class TwoCalls(Own):
    def feed(self, text: str, ids: Sequence[int]) -> Sequence[Fragment]:
        return [Fragment(TOOL_NAME, text), Fragment(TOOL_NAME, text, 1), Fragment(CONTENT, text)]

    def finish(self) -> Sequence[Fragment]:
        return [Fragment(TOOL_ARGUMENTS, "{}", 1), Fragment(CONTENT, "!")]


@pytest.mark.parametrize("parallel", [True, False])
def test_a_client_that_wants_no_parallel_calls_gets_the_first(
    parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsers = Parsers(True, False)
    monkeypatch.setattr(parsers, "open", lambda request, prompt_ids: TwoCalls())
    parser = open_parser(parsers, request(ToolChoice("auto"), *TOOLS, parallel_tool_calls=parallel), [1, 2])
    assert parser is not None
    said = [*parser.feed("f", ()), *parser.finish()]
    assert [each.call for each in said] == ([0, 1, 0, 1, 0] if parallel else [0, 0, 0])
    assert [each.channel for each in said if each.call == 0] == [TOOL_NAME, CONTENT, CONTENT]


# -- what needs a parser -------------------------------------------------------------------------------


@pytest.mark.parametrize("parsers", [None, Parsers(False, True)])
def test_auto_needs_a_tool_call_parser(parsers: Parsers | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_tool_choice(request(ToolChoice("auto"), *TOOLS), parsers)
    assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_field")
    assert "requires a tool-call parser" in caught.value.message
    assert len(caught.value.message) < 300
    check_tool_choice(request(ToolChoice("auto"), *TOOLS), Parsers(True, False))


def test_other_choices_need_none() -> None:
    for choice in (ToolChoice("none"), REQUIRED, ToolChoice("named", "now")):
        check_tool_choice(request(choice, *TOOLS), None)
