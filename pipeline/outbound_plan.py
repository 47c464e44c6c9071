"""Which stages the way out of one request has: made once, opened for each of its choices.

Not here: the stages, and how they work together (`outbound.py`, `channels.py`, `channel_text.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from filters.json_schema import Schema
from filters.json_values import JsonValueFilter
from filters.text_filter import TextFilter
from pipeline.answer_check import AnswerCheck
from pipeline.channel_text import ChannelText
from pipeline.channels import Channels
from pipeline.control_dropper import ControlAutomaton, ControlDropper
from pipeline.detokenizer import open_detokenizer
from pipeline.events import CONTENT, REASONING, TOOL_ARGUMENTS
from pipeline.logprob_queue import LogprobQueue
from pipeline.outbound import Outbound
from pipeline.ports import OutputParser
from pipeline.stop_strings import StopMatcher
from pipeline.text_outbound import TextOutbound
from pipeline.values import EngineCall, Generation
from pipeline.vocabulary import Vocabulary


class OutputRules(Protocol):
    """The rules of one channel. `filters.stream.CompiledRules` is one."""

    @property
    def is_active(self) -> bool:
        """Some rule changes what leaves."""

    @property
    def look_back(self) -> int:
        """How many characters before those that a stream holds a match may depend on."""

    def stream(self) -> TextFilter | None:
        """A filter for one text; None without rules."""

    def completes(self, context: str, text: str) -> bool:
        """Whether `text`, said after `context`, would complete something that is not to leave."""


@dataclass(frozen=True, slots=True, eq=False)
class OutboundPlan:
    """The stages of one request.

    `vocabulary`: None where the server takes and gives text. `rules`: by channel. `controls`: what is dropped
    from all that users see, None for a request that wants it. `open_parser`: None where all is content;
    `reads_reasoning`: it tells reasoning from content. `schema`: what a JSON answer must obey besides the
    grammar.
    """

    vocabulary: Vocabulary | None
    generation: Generation
    stops: StopMatcher | None
    rules: Callable[[str], OutputRules]
    controls: ControlAutomaton | None = None
    open_parser: Callable[[EngineCall], OutputParser | None] | None = None
    reads_reasoning: bool = False
    include_reasoning: bool = True
    schema: Schema | None = None
    fails_on_problem: bool = True
    escape: Callable[[str], str] | None = None

    def open(self, call: EngineCall) -> Outbound:
        """The way out of one choice."""
        generation = self.generation
        assert self.vocabulary is not None, "ids need a vocabulary"
        parser = self.open_parser(call) if self.open_parser is not None else None
        queue = self._queue() if generation.logprobs is not None else None
        check = AnswerCheck(self.schema) if generation.answer_format is not None else None
        channels = Channels(
            self._open_channel(CONTENT, check, queue),
            open_channel=self._open_channel,
            parser=parser,
            reads_reasoning=self.reads_reasoning,
            include_reasoning=self.include_reasoning,
            queue=queue,
            check=check,
            fails_on_problem=self.fails_on_problem,
        )
        # Parsers read special tokens; what users see of them is dropped behind the parser.
        skips = generation.skip_special_tokens and parser is None
        detokenizer = open_detokenizer(self.vocabulary, skips, call.prompt.tokens)
        stops = None if self.stops is None else self.stops.fresh()
        return Outbound(detokenizer, channels, stops, generation.include_stop_str_in_output, queue)

    def open_text(self) -> TextOutbound:
        """The way out of one choice whose server gives text: without what needs ids (logprobs, parsers)."""
        check = AnswerCheck(self.schema) if self.generation.answer_format is not None else None
        return TextOutbound(
            Channels(
                self._open_channel(CONTENT, check),
                open_channel=self._open_channel,
                include_reasoning=self.include_reasoning,
                check=check,
                fails_on_problem=self.fails_on_problem,
            )
        )

    def _open_channel(
        self, channel: str, check: AnswerCheck | None = None, queue: LogprobQueue | None = None
    ) -> ChannelText:
        return ChannelText(
            channel,
            None if self.controls is None else ControlDropper(self.controls),
            check,
            self.fails_on_problem,
            self._filter(channel),
            self.escape if channel in (CONTENT, REASONING) else None,
            queue,
        )

    def _filter(self, channel: str) -> TextFilter | None:
        """What is JSON is filtered value by value, and stays JSON."""
        rules = self.rules(channel)
        text_filter = rules.stream()
        is_json = channel == TOOL_ARGUMENTS or (
            channel == CONTENT and self.generation.answer_format is not None
        )
        return JsonValueFilter(rules.stream) if is_json and text_filter is not None else text_filter

    def _queue(self) -> LogprobQueue:
        rules = self.rules(CONTENT)
        assert self.vocabulary is not None, "logprobs are of ids"
        completes = rules.completes if rules.is_active else None
        return LogprobQueue(self.vocabulary.token_text, completes, rules.look_back)


def stop_matcher(generation: Generation) -> StopMatcher | None:
    """What finds the stop strings of a request, made once for all its choices: up to 3 ms for the longest."""
    if not generation.stop:
        return None
    include = generation.include_stop_str_in_output
    return StopMatcher(generation.stop, include, generation.sampling.get("min_tokens", 0))
