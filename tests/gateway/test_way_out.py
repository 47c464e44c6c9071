"""Which stages an answer goes through, by request, model and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from filters.rules import RuleSet
from gateway.encoders import Encoders
from gateway.metrics import Metrics
from gateway.models import Model, Models, ParserError
from gateway.rules_version import RuleOptions, compile_rules
from gateway.way_out import OutputOptions, WayOut
from pipeline.errors import InvalidRequest
from pipeline.events import REASONING, Fragment
from pipeline.forced_calls import Forced
from pipeline.inbound import InboundOptions
from pipeline.ports import OutputParser
from pipeline.values import (
    AnswerFormat,
    ChatRequest,
    CompletionRequest,
    Delivery,
    EngineCall,
    Generation,
    Prompt,
    ToolChoice,
)
from tests.gateway.answering import call
from tests.gateway.serving import INFO
from tests.gateway.test_models import encoders, models_of
from tests.pipeline.model_files import model_files

__all__ = ["encoders"]  # a fixture

RULES = compile_rules(RuleSet(), RuleOptions(), 1)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PROMPT = Prompt(memoryview(b"\1\0\0\0\2\0\0\0"), 2, 0)


class Parser:
    """All is reasoning."""

    def feed(self, text: str, ids: Sequence[int]) -> Sequence[Fragment]:
        return [Fragment(REASONING, text)]

    def finish(self) -> Sequence[Fragment]:
        return []


class Parsers:
    """`pipeline.ports.OutputParsers` that remembers the prompts that it was shown."""

    def __init__(self, has_tools: bool, has_reasoning: bool) -> None:
        self.has_tools = has_tools
        self.has_reasoning = has_reasoning
        self.problems: dict[str, int] = {}
        self.prompts: list[list[int]] = []

    def open(self, request: ChatRequest, prompt_ids: Sequence[int]) -> OutputParser:
        self.prompts.append(list(prompt_ids))
        return Parser()

    def reasoning_ended(self, request: ChatRequest, prompt_ids: Sequence[int]) -> bool | None:
        return list(prompt_ids) == [1, 2]

    def reasoning_parser_kwargs(self, request: ChatRequest) -> Mapping[str, Any] | None:
        return {"chat_template_kwargs": dict(request.chat_template_kwargs)}


def chat(tool_choice: str = "none", tools: bool = False, **options: Any) -> ChatRequest:
    generation = Generation(options.pop("sampling", {}), **options.pop("generation", {}))
    choice = ToolChoice(tool_choice, "f" if tool_choice == "named" else "")  # type: ignore[arg-type]
    delivery = Delivery(**options.pop("delivery", {}))
    return ChatRequest(
        "m", [], generation, delivery, [TOOL] if tools else None, tool_choice=choice, **options
    )


@pytest.fixture
async def model(encoders: Encoders) -> Model:
    models = models_of(encoders)
    await models.load(INFO, model_files())
    return models.get(INFO.name)


def opened(model: Model, parsers: Parsers | None, request: ChatRequest) -> OutputParser | None:
    plan = WayOut(OutputOptions()).plan(replace(model, parsers=parsers), request, RULES)
    assert plan.reads_reasoning == (parsers is not None and parsers.has_reasoning)
    return None if plan.open_parser is None else plan.open_parser(call(prompt=PROMPT))


@pytest.mark.parametrize(
    ("parsers", "tool_choice", "kind"),
    [
        (None, "none", type(None)),
        (None, "required", Forced),
        (None, "named", Forced),
        ((True, False), "none", type(None)),
        ((True, False), "auto", Parser),
        ((True, False), "required", Forced),
        ((False, True), "none", Parser),
        ((True, True), "named", Forced),
    ],
)
async def test_parser_is_opened_only_where_something_is_to_be_told_apart(
    model: Model, parsers: tuple[bool, bool] | None, tool_choice: str, kind: type
) -> None:
    made = None if parsers is None else Parsers(*parsers)
    parser = opened(model, made, chat(tool_choice, tools=tool_choice != "none"))
    assert type(parser) is kind
    if made is not None and made.prompts:
        assert made.prompts == [[1, 2]]


async def test_raw_completion_has_no_parser(model: Model) -> None:
    request = CompletionRequest("m", ["a"], Generation({}), Delivery())
    plan = WayOut(OutputOptions()).plan(replace(model, parsers=Parsers(True, True)), request, RULES)
    assert (plan.open_parser, plan.reads_reasoning, plan.include_reasoning) == (None, False, True)


async def test_tools_that_nothing_reads_are_refused(model: Model) -> None:
    way_out = WayOut(OutputOptions())
    with pytest.raises(InvalidRequest, match="requires a tool-call parser"):
        way_out.check(replace(model, parsers=Parsers(False, True)), chat("auto", tools=True))
    way_out.check(replace(model, parsers=Parsers(True, False)), chat("auto", tools=True))
    way_out.check(model, chat("required", tools=True))


async def test_engine_is_told_of_the_reasoning_where_a_grammar_goes_along(model: Model) -> None:
    way_out, plain = WayOut(OutputOptions()), call(prompt=PROMPT)
    grammar = replace(plain, sampling={"structured_outputs": {"json_object": True}})
    reading = replace(model, parsers=Parsers(False, True))
    request = chat(chat_template_kwargs={"enable_thinking": True})

    def told(model: Model, engine_call: EngineCall) -> tuple[object, object]:
        (given,) = way_out.calls(model, request, [engine_call])
        return given.reasoning_ended, given.reasoning_parser_kwargs

    assert told(reading, grammar) == (True, {"chat_template_kwargs": {"enable_thinking": True}})
    assert told(reading, plain) == (None, None)
    assert told(model, grammar) == (None, None)


async def test_request_may_choose_its_escape_and_see_control_strings(model: Model) -> None:
    def planned(setting: str, escape: str | None, skip: bool = True) -> Any:
        request = chat(delivery={"escape": escape}, generation={"skip_special_tokens": skip})
        return WayOut(OutputOptions(setting)).plan(model, request, RULES)

    assert planned("none", None).escape is None
    assert planned("html", None).escape("<") == "&lt;"
    assert planned("html", "markdown").escape("<") == "\\<"
    assert planned("html", "none").escape is None
    assert planned("none", None).controls is model.text.controls
    assert planned("none", None, skip=False).controls is None


async def test_format_policy_and_schema_reach_the_plan(model: Model) -> None:
    generation = {"answer_format": AnswerFormat({"type": "object"})}
    for fails in (True, False):
        way_out = WayOut(OutputOptions(fails_on_problem=fails))
        plan = way_out.plan(model, chat(generation=generation), RULES)
        assert (plan.schema is not None, plan.fails_on_problem) == (True, fails)
    assert way_out.plan(model, chat(generation={"answer_format": AnswerFormat()}), RULES).schema is None


async def test_problems_of_parsers_are_counted_once(encoders: Encoders) -> None:
    parsers, metrics = Parsers(True, True), Metrics()
    models = with_parsers(encoders, lambda info, files: parsers)
    await models.load(INFO, model_files())
    for count, shown in ((2, 2), (2, 2), (5, 5)):
        parsers.problems["contradiction"] = count
        models.publish(metrics)
        labels = {"gen_ai_request_model": INFO.name, "problem": "contradiction"}
        assert metrics.registry.get_sample_value("headrace_parser_problems_total", labels) == shown


async def test_parser_that_does_not_suit_a_model_is_an_error_of_its_own(encoders: Encoders) -> None:
    def refuse(info: object, files: object) -> None:
        raise ValueError("there is no parser 'hermess'")

    with pytest.raises(ParserError, match=r"'m'.*no parser 'hermess'"):
        await with_parsers(encoders, refuse).load(INFO, model_files())


def with_parsers(encoders: Encoders, load: Any) -> Models:
    models = models_of(encoders)
    return Models(InboundOptions(), models._store, models._needs, encoders.executor, None, load)
