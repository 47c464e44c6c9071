"""The way out of a request: which parsers, rules, checks and escapes its answer goes through.

Not here: the stages (`pipeline/outbound.py`), and how events travel (`gateway/writers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from filters.escaping import escape_function
from gateway.compiled_schemas import compiled
from gateway.models import AnyModel, Model
from gateway.rules_version import RulesVersion
from pipeline.outbound_plan import OutboundPlan, stop_matcher
from pipeline.ports import OutputParser, OutputParsers
from pipeline.tool_choice import FORCED, check_tool_choice, open_parser
from pipeline.values import ChatRequest, CompletionRequest, EngineCall

Request = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """`escape`: of `filters.escaping.ESCAPES`, for requests that name none.

    `fails_on_problem`: an answer that breaks its `response_format` ends with an error; else it only says so.
    """

    escape: str = "none"
    fails_on_problem: bool = True


class WayOut:
    """Plans the way out of requests. One per process."""

    def __init__(self, options: OutputOptions) -> None:
        self._options = options

    def check(self, model: AnyModel, request: Request) -> None:
        """Raises `InvalidRequest` for tools that nothing here could read."""
        if isinstance(request, ChatRequest) and isinstance(model, Model):
            check_tool_choice(request, model.parsers)

    def calls(self, model: AnyModel, request: Request, calls: Sequence[EngineCall]) -> Sequence[EngineCall]:
        """The calls with what the engine must know of reasoning, where a grammar is to leave it free."""
        parsers = model.parsers if isinstance(model, Model) else None
        if parsers is None or not parsers.has_reasoning or not isinstance(request, ChatRequest):
            return calls
        kwargs = parsers.reasoning_parser_kwargs(request)
        return [
            replace(
                call,
                reasoning_ended=parsers.reasoning_ended(request, call.prompt.tokens),
                reasoning_parser_kwargs=kwargs,
            )
            if "structured_outputs" in call.sampling
            else call
            for call in calls
        ]

    def plan(self, model: AnyModel, request: Request, rules: RulesVersion) -> OutboundPlan:
        """The stages for all choices of a request."""
        generation = request.generation
        chat = request if isinstance(request, ChatRequest) else None
        answer_format = generation.answer_format
        escape = request.delivery.escape or self._options.escape
        schema = None if answer_format is None or answer_format.schema is None else answer_format.schema
        text = model.text if isinstance(model, Model) else None
        parsers = model.parsers if isinstance(model, Model) else None
        return OutboundPlan(
            vocabulary=None if text is None else text.vocabulary,
            generation=generation,
            stops=stop_matcher(generation),
            rules=rules.output_for,
            controls=text.controls if text is not None and generation.skip_special_tokens else None,
            open_parser=None if chat is None else _open_parser(parsers, chat),
            reads_reasoning=chat is not None and parsers is not None and parsers.has_reasoning,
            include_reasoning=chat is None or chat.include_reasoning,
            schema=None if schema is None else compiled(schema),
            fails_on_problem=self._options.fails_on_problem,
            escape=escape_function(escape),
        )


def _open_parser(
    parsers: OutputParsers | None, request: ChatRequest
) -> Callable[[EngineCall], OutputParser | None] | None:
    """What tells the channels of a chat's answer apart; None where all of it is content."""
    choice = request.tool_choice.kind
    has_reasoning = parsers is not None and parsers.has_reasoning
    if not (has_reasoning or choice in FORCED or (choice == "auto" and request.tools)):
        return None
    return lambda call: open_parser(parsers, request, call.prompt.tokens)
