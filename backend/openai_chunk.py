"""One event of an OpenAI-compatible server as typed values: `chat.completion.chunk`, `text_completion`.

Only fields that are read are decoded; all others are skipped. A whole `chat.completion` reads alike, for
servers that do not stream what they are asked to stream.

What servers send besides OpenAI's fields, by their sources:

* vLLM (`entrypoints/openai/chat_completion/protocol.py`): `delta.reasoning`, before 0.12
  `delta.reasoning_content`; `choice.stop_reason`, a stop string or a stop token's id.
* SGLang (`entrypoints/openai/sse_utils.py`): `delta.reasoning_content`; `choice.matched_stop`, which names
  the end-of-sequence token too; `usage.reasoning_tokens`.
* TGI (`router/src/lib.rs`): the finish reasons `eos_token` and `stop_sequence`.
* llama.cpp (`tools/server/server-task.cpp`): `delta.content: null` beside the role, `timings` with the last
  chunk.
* Ollama (`middleware/openai.go`): `delta.reasoning`; a `usage` of zeros on each chunk of a completion.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backend.tool_call_order import CallDelta
from pipeline.events import CONTENT, REASONING, Fragment
from pipeline.values import TextUsage

# In OpenAI's words. Other reasons are kept as they are; those in FAULTS are no finish.
FINISH: Final = {
    "function_call": "tool_calls",
    "tool_use": "tool_calls",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "end_turn": "stop",
    "repetition": "stop",
    "max_tokens": "length",
    "model_length": "length",
    "safety": "content_filter",
}
FAULTS: Final = frozenset(("abort", "aborted", "cancelled", "canceled", "error", "timeout", "not_finished"))


class Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None  # a string; some give the object


class ToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: Function | None = None


class Delta(msgspec.Struct):
    content: str | list[Any] | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Function | None = None


class Choice(msgspec.Struct):
    index: int | None = 0
    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    matched_stop: Any = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class ChunkUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None

    def values(self) -> TextUsage:
        prompt, completion = self.prompt_tokens_details, self.completion_tokens_details
        reasoning = None if completion is None else completion.reasoning_tokens
        return TextUsage(
            self.prompt_tokens,
            self.completion_tokens,
            None if prompt is None else prompt.cached_tokens,
            self.reasoning_tokens if reasoning is None else reasoning,
        )


class Timings(msgspec.Struct):
    """llama.cpp's: what was in the cache, computed of the prompt, and generated."""

    cache_n: int | None = None
    prompt_n: int | None = None
    predicted_n: int | None = None

    def values(self) -> TextUsage:
        prompt = None if self.prompt_n is None else self.prompt_n + (self.cache_n or 0)
        return TextUsage(prompt, self.predicted_n, self.cache_n)


class Chunk(msgspec.Struct):
    object: str | None = None
    choices: list[Choice] | None = None
    usage: ChunkUsage | None = None
    timings: Timings | None = None
    error: Any = None
    error_type: str | None = None
    message: Any = None
    detail: Any = None
    code: Any = None

    @property
    def is_error(self) -> bool:
        is_empty = self.choices is None and self.usage is None
        return bool(self.error) or (is_empty and bool(self.message or self.detail))

    def error_value(self) -> dict[str, Any]:
        """As `upstream_errors.words_of` takes it."""
        return {
            "error": self.error,
            "error_type": self.error_type,
            "message": self.message,
            "detail": self.detail,
            "code": self.code,
        }


decode_chunk = msgspec.json.Decoder(Chunk).decode


def fragments_of(choice: Choice) -> list[Fragment]:
    """The text of a choice; in OpenAI's order what is thought comes first. Without tool calls."""
    if choice.text:
        return [Fragment(CONTENT, choice.text)]
    delta = choice.delta or choice.message
    if delta is None:
        return []
    fragments = []
    reasoning = delta.reasoning_content or delta.reasoning  # some servers send both, the same text
    if isinstance(reasoning, str) and reasoning:
        fragments.append(Fragment(REASONING, reasoning))
    fragments += [Fragment(CONTENT, text) for text in (_joined(delta.content), delta.refusal) if text]
    return fragments


def calls_of(choice: Choice) -> list[CallDelta]:
    """The pieces of tool calls in a choice."""
    delta = choice.delta or choice.message
    if delta is None:
        return []
    calls = [
        CallDelta(call.index, call.id or None, call.function.name, _arguments(call.function.arguments))
        for call in delta.tool_calls or ()
        if call.function is not None
    ]
    if delta.function_call is not None and not calls:
        function = delta.function_call  # the form before tools: one call, without an id
        calls.append(CallDelta(0, None, function.name, _arguments(function.arguments)))
    return calls


def _joined(content: str | list[Any] | None) -> str:
    """The text of a content that is a list of parts."""
    if not isinstance(content, list):
        return content or ""
    texts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return "".join(text for text in texts if isinstance(text, str))


def _arguments(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value).decode()
