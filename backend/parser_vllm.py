"""vLLM's parsers of one model, and what must be known of each kind to feed them in pieces.

The only module here that imports vLLM, and only inside `load_kit`: 5 s. What is fed to the parsers and when:
`parser_parts.py`. Only names that vLLM documents as its parsers' interface are used, but for
`_parser_engine`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from backend.parser_ending import Call, TooLong, Whole, escape_halves, whole_characters
from backend.parser_gates import BareObjectGate, Gate, MarkerGate, Markers, PythonGate, TaggedObjectGate
from backend.parser_python import PythonCalls
from backend.parser_stream import CallStream, NamedCalls, ObjectCalls
from backend.parser_tokenizer import parser_tokenizer
from pipeline.model_text import CONFIG
from pipeline.values import ChatRequest

# They log what the model said, with `debug` and in the tracebacks of `exception`.
_LOGGERS_OF_TEXT: Final = ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser")
_MAX_NAMES_CHARS: Final = 1000
_MAX_KEPT: Final = 16  # configs of engines; vLLM has one or two of each kind
# Of a content that is parsed whole, for at most 0.1 s or so. 128,000 characters of calls take `hermes` 28 and
# `llama3_json` 60 ms. Of 32,000 the worst found take `qwen3_coder` 160 ms (HTML), `mistral` 130 (calls)
# and 290 ms (`[{` without end), and `pythonic` 85 ms (a list); of 16,000 they take 58, 57, 108 and 23 ms.
_MAX_CHARS: Final = 128_000
_MAX_SLOW_CHARS: Final = 24_000
# DeepSeek's expressions look from each begin of a call at each separator, up to the end of a line: 16,000
# characters of nothing else take 0.46 s with 3.5e9 of such steps, 64,000 take 29 s.
_MAX_STEPS: Final = 500_000_000
_RANDOM_ID: Final = re.compile(r"chatcmpl-tool-")  # ids that vLLM makes up where the format has none

# By the class whose whole parse it is: where a call can begin for it. `self` is vLLM's parser. With how to
# read its calls as they pass, where that can be done.
_GATES: Final[Mapping[str, Callable[[Any, CallStream | None], Gate]]] = {
    "Hermes2ProToolParser": lambda self, stream: TaggedObjectGate(
        self.tool_call_start_token, ("arguments",), stream=stream
    ),
    "Llama3JsonToolParser": lambda self, stream: BareObjectGate(("arguments", "parameters"), stream=stream),
    "DeepSeekV3ToolParser": lambda self, stream: MarkerGate(self.tool_calls_start_token, stream=stream),
    "DeepSeekV31ToolParser": lambda self, stream: MarkerGate(self.tool_calls_start_token, stream=stream),
    "PythonicToolParser": lambda self, stream: PythonGate(),
    "Llama4PythonicToolParser": lambda self, stream: PythonGate("<|python_start|>"),
}
_SEPARATOR: Final = "<｜tool▁sep｜>"  # of DeepSeek's; their classes have no name for it
_STREAMS: Final[Mapping[str, Callable[[Any, Collection[str]], CallStream]]] = {
    "Hermes2ProToolParser": lambda self, names: ObjectCalls(
        names, {"arguments"}, self.tool_call_start_token, self.tool_call_end_token
    ),
    "Llama3JsonToolParser": lambda self, names: ObjectCalls(names, {"arguments", "parameters"}),
    "DeepSeekV3ToolParser": lambda self, names: NamedCalls(
        names,
        f"{self.tool_call_start_token}function{_SEPARATOR}",
        "\n```json\n",
        f"\n```{self.tool_call_end_token}",
    ),
    "DeepSeekV31ToolParser": lambda self, names: NamedCalls(
        names, self.tool_call_start_token, _SEPARATOR, self.tool_call_end_token
    ),
}
_TEXT_STATES: Final = ("CONTENT", "REASONING")  # of vLLM's engines
# Whole parses that are: from the beginning up to an end marker.
_MARKED_REASONING: Final = ("BaseThinkingReasoningParser", "DeepSeekV3ReasoningParser")


@dataclass(frozen=True, slots=True)
class Kit:
    """One model's parsers. vLLM makes one of them per choice: `parser`."""

    parser_class: Any
    tokenizer: Any
    blank_request: Any
    tool_class: Any
    model_config: Any
    markers: dict[int, tuple[Any, Markers]] = field(
        default_factory=dict
    )  # by the identity of an engine's config

    def parser(self, request: ChatRequest, tools: Sequence[Any] | None) -> Any:
        """A parser for one choice: 60 to 100 us."""
        # A copy: one of vLLM's parsers writes into it.
        return self.parser_class(
            self.tokenizer,
            tools,
            chat_template_kwargs=dict(request.chat_template_kwargs),
            model_config=self.model_config,
        )

    def tools(self, request: ChatRequest) -> list[Any] | None:
        """The request's tools as vLLM's parsers want them."""
        return [self.tool_class.model_validate(tool) for tool in request.tools or ()] or None

    def request(self, request: ChatRequest, tools: Sequence[Any] | None, choice: str) -> Any:
        """What vLLM's parsers look at of a request."""
        made = copy.copy(self.blank_request)  # 2.5 us; pydantic's ways of making one take 70 to 200
        made.messages, made.tools, made.tool_choice = request.messages, tools, choice
        return made


def load_kit(
    tool_parser: str | None, reasoning_parser: str | None, files: Mapping[str, bytes], model_name: str
) -> Kit:
    """Import vLLM's parsers by name. Raises `ValueError` in words for whoever configured them."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "tool_parser and reasoning_parser are vLLM's, which is not installed here: `pip install "
            "'headrace[cpu]'` for a machine without a GPU, `pip install 'headrace[gpu]'` for one with a GPU"
        )
    for name in _LOGGERS_OF_TEXT:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    from vllm.entrypoints.openai.chat_completion import protocol
    from vllm.parser.parser_manager import ParserManager

    _check_name("tool_parser", tool_parser, "vllm.tool_parsers", "ToolParserManager")
    _check_name("reasoning_parser", reasoning_parser, "vllm.reasoning", "ReasoningParserManager")
    tokenizer = parser_tokenizer(files)
    config = json.loads(files.get(CONFIG, b"{}"))
    try:
        parser_class = ParserManager.get_parser(
            tool_parser_name=tool_parser,
            reasoning_parser_name=reasoning_parser,
            enable_auto_tools=True,
            model_name=model_name,
            is_harmony=config.get("model_type") == "gpt_oss",
            tokenizer=tokenizer,
        )
    except Exception as error:  # of many kinds: whatever a parser raises where its tokens are missing
        raise ValueError(f"vLLM's parsers cannot be used: {error}") from error
    return Kit(
        parser_class,
        tokenizer,
        protocol.ChatCompletionRequest(model=model_name, messages=[]),
        protocol.ChatCompletionToolsParam,
        SimpleNamespace(hf_config=SimpleNamespace(model_type=config.get("model_type"))),
    )


def _check_name(setting: str, name: str | None, module: str, manager: str) -> None:
    if name is None:
        return
    known = getattr(importlib.import_module(module), manager).list_registered()
    if name not in known:
        names = ", ".join(known)
        if len(names) > _MAX_NAMES_CHARS:
            names = names[:_MAX_NAMES_CHARS].rpartition(", ")[0] + ", …"
        raise ValueError(f"{setting}: vLLM has no parser {name!r}; it has {names}")


def is_delegating(parser: Any) -> bool:
    """Whether reasoning and calls are told apart by two objects, one after the other."""
    return bool(type(parser).parse.__qualname__.startswith("DelegatingParser."))


def gate_for(tools: Any, stream: CallStream | None = None) -> Gate | None:
    """Where a call can begin for this parser of calls, if that is known; `stream` reads along."""
    if tools.engine_based_streaming:
        markers = _tool_markers(tools) if hasattr(tools, "_parser_engine") else ()
        return MarkerGate(*markers) if markers else None
    make = _GATES.get(_definer(tools, "extract_tool_calls"))
    return make(tools, stream) if make else None


def stream_for(tools: Any, definitions: Sequence[Any] | None) -> CallStream | None:
    """What reads this parser's calls as they pass, if something can. `definitions`: the request's tools."""
    make = _STREAMS.get(_definer(tools, "extract_tool_calls"))
    return make(tools, {each.function.name for each in definitions or ()}) if make else None


def _tool_markers(adapter: Any) -> Sequence[str]:
    """What leads an engine from text into a call; nothing if it has states of other kinds."""
    config = adapter._parser_engine.parser_engine_config
    markers: list[str] = []
    for (state, terminal), transition in config.transitions.items():
        target = transition.next_state.name
        if state.name not in _TEXT_STATES or target in _TEXT_STATES:
            continue
        if not target.startswith("TOOL_"):
            return ()
        markers += _spellings(config, terminal)
    return list(dict.fromkeys(markers))


def has_marked_reasoning(reasoning: Any) -> bool:
    """Whether a start and an end marker are all there is to it."""
    return _definer(reasoning, "extract_reasoning") in _MARKED_REASONING


def text_markers(kit: Kit, adapter: Any) -> Markers | None:
    """What is not plain text to an engine that reads text or reasoning; None if that is not known."""
    engine = getattr(adapter, "_parser_engine", None)
    config = None if engine is None else engine.parser_engine_config
    if config is None or not config.lexer_shape.has_only_literals:
        return None
    kept = kit.markers.get(id(config))
    if kept is not None and kept[0] is config:
        return kept[1]
    terminals = [terminal for state, terminal in config.transitions if state.name in _TEXT_STATES]
    literals = [each for terminal in terminals for each in _spellings(config, terminal)]
    markers = Markers([*literals, *kit.tokenizer.all_special_tokens], list(config.terminal_literals))
    if len(kit.markers) < _MAX_KEPT:
        kit.markers[id(config)] = (config, markers)
    return markers


def _spellings(config: Any, terminal: str) -> Sequence[str]:
    spellings = config.terminals.get(terminal, ())
    return (spellings,) if isinstance(spellings, str) else spellings


def whole_calls(tools: Any, request: Any, content: str) -> Whole:
    """What vLLM's whole parse makes of a content, by the rules of its `DelegatingParser`."""
    engine = getattr(tools, "_parser_engine", None)
    if engine is not None:
        convert_at_the_end(engine)
    if hasattr(tools, "TOOL_CALL_REGEX") and _definer(tools, "extract_tool_calls") in _GATES:
        tools.TOOL_CALL_REGEX = PythonCalls()
    found = tools.extract_tool_calls(content, request=request)
    if not found.tools_called:
        return Whole((found.content or "") if tools.engine_based_streaming else content, ())
    text = found.content or ""
    return Whole(
        "" if text.isspace() else text, [call_of(each.function, each.id) for each in found.tool_calls]
    )


def convert_at_the_end(engine: Any) -> None:
    """Let an engine make a call's JSON once, at its end, where it would anew at each `<` or `"`.

    4 KB of HTML in one argument took `qwen3_coder` 4 s. A whole parse looks at the last JSON alone.
    """
    if hasattr(engine, "_stream_arg_deltas"):
        engine._stream_arg_deltas = False  # where values are converted
    if hasattr(engine, "_compute_arg_delta"):
        engine._compute_arg_delta = _no_delta  # where they are not: an object per character, 5 us


def _no_delta(index: int, raw: str) -> None:
    """In place of what an engine would stream of a call's arguments."""


def check_length(tools: Any, content: str) -> None:
    """Raise `TooLong` for a content whose whole parse by this parser could hold the event loop."""
    definer = _definer(tools, "extract_tool_calls")
    is_slow = tools.engine_based_streaming or (definer in _GATES and definer not in _STREAMS)
    if len(content) > (_MAX_SLOW_CHARS if is_slow else _MAX_CHARS):
        raise TooLong
    if definer.startswith("DeepSeek"):
        num_calls, num_names = content.count(tools.tool_call_start_token), content.count(_SEPARATOR)
        if num_calls * num_names * max(map(len, content.split("\n"))) > _MAX_STEPS:
            raise TooLong


def check_unknown_length(text: str) -> None:
    """The same for an answer and a parser of which nothing is known."""
    if len(text) > _MAX_CHARS:
        raise TooLong


def call_of(function: Any, call_id: str | None) -> Call:
    """One of vLLM's calls. Its id only where the model's format has ids of its own.

    vLLM resolves escapes, so half of a surrogate pair can stand in it, which no answer could be encoded with.
    """
    is_own = call_id and not _RANDOM_ID.match(call_id)
    name, arguments = whole_characters(function.name), escape_halves(function.arguments)
    return Call(name, arguments, whole_characters(call_id) if call_id and is_own else None)


def with_content(delta: Any, content: str | None) -> Any:
    """vLLM's delta with this content after its own."""
    if not content:
        return delta
    left = (delta.content or "") if delta is not None else ""
    reasoning = delta.reasoning if delta is not None else None
    return SimpleNamespace(reasoning=reasoning, content=left + content, tool_calls=())


def _definer(instance: Any, method: str) -> str:
    """The class that a method comes from."""
    return str(getattr(type(instance), method).__qualname__.split(".")[0])
