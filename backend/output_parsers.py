"""Reasoning and tool calls in a model's answer, read by vLLM's own parsers: the ports `OutputParser(s)`.

vLLM reads an answer in two ways that do not always agree: in pieces as they come, and whole. Here the whole
parse is what counts. Reasoning and content stream as far as it cannot take them back; calls come from it, at
the end. So no split of an answer can lose a part of a call, and streamed answers equal others.

Calls stream too where they are JSON objects between markers: `hermes`, `qwen3_json`, `longcat`,
`llama3_json`, `llama4_json`, `deepseek_v3` and `deepseek_v31`. Our own reader (`parser_stream.py`) lets a
call begin when its name is a tool of the request and the `{` of its arguments has come; what it lets go is
in the model's spelling, which the whole parse may write anew. A name of no tool, and arguments that are no
object, wait for the whole parse, and so does all after them. `mistral` does not stream: its whole parse
corrects the types of arguments and makes call ids.

Where that differs from vLLM's whole parse, because the text has left by then:
* a call that has begun stays, also when the answer is cut off in it, and when the whole parse cannot read it
  or a call after it (a key too much, an end marker in a string, a line break in arguments of DeepSeek's).
  That parse would have all be content; then nothing more leaves, as no text does that follows a call;
* content before a call that `llama3_json` finds in the middle of a text stays (vLLM drops it);
* text before a start marker of reasoning stays (vLLM drops it), and so does white space before a text that
  calls follow, with the parsers that drop it (`qwen3_coder` and others of vLLM's engines);
* of a call that `mistral` cannot read in its format before version 11 all text stays (vLLM forgets what stood
  before the marker);
* the prompt may have ended the reasoning (vLLM's whole parse of `deepseek_r1` does not look at it, and calls
  the whole answer reasoning; its streamed answers do as we do).

An exception inside vLLM never ends a stream: the whole parse is tried at the end, and if that fails too, what
has not left is content, unless a call has begun. The same goes for what is too long to be parsed whole, which
would hold the event loop for more than 0.1 s or so: a content of 128,000 characters; 24,000 for `pythonic`
parsers; for vLLM's engines and `mistral` 24,000 from where a call can begin; fewer of DeepSeek's markers in
one line. `problems` counts such cases. Nothing of the text is logged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from backend import parser_vllm
from backend.parser_choice import ChoiceParser
from backend.parser_composed import Answer, ComposedParser
from backend.parser_ending import Whole
from backend.parser_parts import (
    CallsPart,
    EngineCalls,
    EnginePart,
    GatedCalls,
    MarkedReasoning,
    PlainContent,
    ReasoningPart,
)
from backend.parser_vllm import Kit
from pipeline.ports import OutputParser
from pipeline.values import ChatRequest, Json


def load_output_parsers(
    tool_parser: str | None, reasoning_parser: str | None, files: Mapping[str, bytes], model_name: str
) -> VllmOutputParsers:
    """vLLM's parsers of these names for a model's files (`pipeline.model_text.FILES`).

    Imports vLLM, which takes 5 s. Raises `ValueError`, in words for whoever configured them: vLLM is missing,
    it has no such parser, or the tokenizer lacks a token that the parser needs.
    """
    if not tool_parser and not reasoning_parser:
        raise ValueError("no parser is named")
    kit = parser_vllm.load_kit(tool_parser or None, reasoning_parser or None, files, model_name)
    return VllmOutputParsers(kit, bool(tool_parser), bool(reasoning_parser))


class VllmOutputParsers:
    """See `pipeline.ports.OutputParsers`. `problems`: name -> how often, since the start."""

    def __init__(self, kit: Kit, has_tools: bool, has_reasoning: bool) -> None:
        self._kit = kit
        self._has_tools = has_tools
        self._has_reasoning = has_reasoning
        self.problems: Counter[str] = Counter()

    @property
    def has_tools(self) -> bool:
        """See `OutputParsers`."""
        return self._has_tools

    @property
    def has_reasoning(self) -> bool:
        """See `OutputParsers`."""
        return self._has_reasoning

    def open(self, request: ChatRequest, prompt_ids: Sequence[int]) -> OutputParser:
        """See `OutputParsers`. 20 to 250 us. If vLLM fails here (at a template argument), all is content."""
        try:
            return _Opening(self._kit, request, prompt_ids, self.problems).open()
        except Exception:  # whatever vLLM's parsers raise
            self.problems["open_raised"] += 1
            plain = PlainContent()
            return ChoiceParser(
                plain, plain, lambda text, ids: ("", Whole(text, ())), [], None, self.problems
            )

    def reasoning_ended(self, request: ChatRequest, prompt_ids: Sequence[int]) -> bool | None:
        """See `OutputParsers`."""
        if not self._has_reasoning:
            return None
        # vLLM says True where the reasoning is not wanted. Its model thinks all the same, and then under the
        # grammar of the answer, which so becomes a part of the reasoning that nobody sees.
        try:
            return bool(self._kit.parser(request, None).is_reasoning_end(list(prompt_ids)))
        except Exception:  # whatever vLLM's parsers raise; the engine finds out by itself
            self.problems["open_raised"] += 1
            return None

    def reasoning_parser_kwargs(self, request: ChatRequest) -> Mapping[str, Json] | None:
        """See `OutputParsers`. What the chat template gets, but for the documents: no parser reads those."""
        if not self._has_reasoning:
            return None
        flags = {
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.continue_final_message,
        }
        return {"chat_template_kwargs": {**request.chat_template_kwargs, **flags}}


class _Opening:
    """One choice's parser in the making: what the request asks for decides on its parts."""

    def __init__(
        self, kit: Kit, request: ChatRequest, prompt_ids: Sequence[int], problems: Counter[str]
    ) -> None:
        self._kit = kit
        self._problems = problems
        self._chat = request
        self._prompt_ids = prompt_ids
        kind = request.tool_choice.kind
        self._is_forced = kind in ("required", "named")
        self._tools = None if self._is_forced else kit.tools(request)
        self._wants_calls = kind == "auto" and self._tools is not None
        self._request = kit.request(request, self._tools, "auto" if self._wants_calls else "none")
        self._parser = kit.parser(request, self._tools)
        self._reasoning = self._parser.reasoning_parser
        self._has_ended = self._reasoning is not None and bool(
            self._parser.is_reasoning_end(list(prompt_ids))
        )
        self._texts: list[str] = []
        self._prompt_left: list[int] | None = None

    def open(self) -> OutputParser:
        max_calls = None if self._chat.parallel_tool_calls else 1
        if parser_vllm.is_delegating(self._parser):
            reasoning, calls = self._reasoning_part(), self._calls_part()
            if reasoning is not None and calls is not None:
                whole = self._whole
                return ChoiceParser(reasoning, calls, whole, self._texts, max_calls, self._problems)
        self._prompt_left = list(self._prompt_ids)
        return ComposedParser(self._feed_composed, self._whole, max_calls, self._problems)

    def _reasoning_part(self) -> ReasoningPart | None:
        """None if too little is known of vLLM's parser."""
        reasoning = self._reasoning
        if reasoning is None or self._has_ended:
            return PlainContent()
        if parser_vllm.has_marked_reasoning(reasoning):
            start, end = reasoning.reasoning_start_str, reasoning.reasoning_end_str
            return MarkedReasoning(start, end) if start and end else PlainContent()
        markers = parser_vllm.text_markers(self._kit, reasoning)
        if markers is None:
            return None
        reasoning.adjust_initial_state_from_prompt(list(self._prompt_ids))
        return EnginePart(
            lambda text: reasoning.extract_reasoning_streaming("", text, text, (), (), ()),
            self._close_reasoning,
            markers,
        )

    def _close_reasoning(self) -> Any:
        """The engine's end; some engines call an answer content after all if its reasoning has no end."""
        reasoning = self._reasoning
        has_ended = reasoning.has_engine_confirmed_reasoning_end()
        delta = reasoning.finish_streaming()
        promoted = None
        if not has_ended:
            promoted = reasoning.get_streaming_fallback_content("".join(self._texts), self._request)
        return parser_vllm.with_content(delta, promoted)

    def _calls_part(self) -> CallsPart | None:
        """None if too little is known of vLLM's parser."""
        tools, request = self._parser.tool_parser, self._request
        if tools is None or self._is_forced or not (self._wants_calls or self._is_all_engine()):
            return PlainContent()
        stream = parser_vllm.stream_for(tools, self._tools)
        gate = parser_vllm.gate_for(tools, stream)
        if gate is None:
            return None
        if not tools.engine_based_streaming:
            return GatedCalls(gate, self._whole_calls, self._problems, stream)
        markers = parser_vllm.text_markers(self._kit, tools)
        if markers is None:
            return None
        engine = EnginePart(
            lambda text: tools.extract_tool_calls_streaming("", text, text, (), (), (), request),
            tools.finish_streaming,
            markers,
        )
        return EngineCalls(gate, engine, self._whole_calls, self._problems)

    def _is_all_engine(self) -> bool:
        parts = (self._reasoning, self._parser.tool_parser)
        return all(part is None or part.engine_based_streaming for part in parts)

    def _feed_composed(self, text: str, ids: list[int], finished: bool) -> Any:
        # vLLM looks at the prompt once.
        prompt_ids, self._prompt_left = self._prompt_left, None
        return self._parser.parse_delta(text, ids, self._request, prompt_ids, finished=finished)

    def _whole_calls(self, content: str) -> Whole:
        tools = self._kit.parser(self._chat, self._tools).tool_parser
        parser_vllm.check_length(tools, content)
        whole = parser_vllm.whole_calls(tools, self._request, content)
        return whole if self._wants_calls else Whole(whole.content, ())

    def _whole(self, text: str, ids: Sequence[int]) -> Answer:
        """vLLM's whole parse of an answer. Where the prompt has ended the reasoning, of the content alone."""
        parser = self._kit.parser(self._chat, self._tools)
        if not parser_vllm.is_delegating(parser):
            parser_vllm.check_unknown_length(text)
            parser_vllm.convert_at_the_end(parser)
            parser.set_prompt_token_ids(list(self._prompt_ids))
            reasoning, content, calls = parser.parse(text, self._request, True, list(ids))
            return reasoning or "", Whole(
                content or "", [parser_vllm.call_of(each, each.id) for each in calls or ()]
            )
        reasoning, content = None, text
        if self._reasoning is not None and not self._has_ended:
            reasoning, content = parser.reasoning_parser.extract_reasoning(text, self._request)
        is_plain = parser.tool_parser is None or self._is_forced
        if is_plain or not (self._wants_calls or self._is_all_engine()):
            return reasoning or "", Whole(content or "", ())
        return reasoning or "", self._whole_calls(content or "")
