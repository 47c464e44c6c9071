"""One event of an OpenAI-compatible server as typed values: `chat.completion.chunk`, `text_completion`.

Only fields that are read are decoded; all others are skipped. Those that text is in have types; the rest
may be anything, and is passed over where it is not understood. A whole `chat.completion` reads alike, for
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

from backend.lenient import count, repaired
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
MAX_DIGITS: Final = 9  # of a call's number
FAULTS: Final = frozenset(("abort", "aborted", "cancelled", "canceled", "error", "timeout", "not_finished"))


class Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None  # a string; some give the object


class ToolCall(msgspec.Struct):
    index: Any = None
    id: Any = None
    function: Function | None = None


class Delta(msgspec.Struct):
    content: str | list[Any] | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Function | None = None


class Choice(msgspec.Struct):
    index: Any = 0
    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None


class Chunk(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Any = None
    timings: Any = None
    error: Any = None
    error_type: Any = None
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


decode_chunk: Final = msgspec.json.Decoder(Chunk).decode  # raises `ValueError`, `RecursionError`


def mended_chunk(payload: bytes) -> Chunk:
    """The same for what `decode_chunk` refuses, if that is for trifles. Raises `ValueError`."""
    return decode_chunk(repaired(payload))


def usage_of(found: Any) -> TextUsage | None:
    """The counts in a `usage`; zeros are none."""
    if not isinstance(found, dict):
        return None
    prompt, completion = count(found.get("prompt_tokens")), count(found.get("completion_tokens"))
    if not (prompt or completion):
        return None
    cached = count(_within(found, "prompt_tokens_details", "cached_tokens"))
    reasoning = count(_within(found, "completion_tokens_details", "reasoning_tokens"))
    return TextUsage(
        prompt, completion, cached, count(found.get("reasoning_tokens")) if reasoning is None else reasoning
    )


def timings_of(found: Any) -> TextUsage | None:
    """llama.cpp's: what was in the cache, computed of the prompt, and generated."""
    if not isinstance(found, dict):
        return None
    cached, computed = count(found.get("cache_n")), count(found.get("prompt_n"))
    prompt = None if computed is None else count(computed + (cached or 0))
    return TextUsage(prompt, count(found.get("predicted_n")), cached)


def _within(found: dict[str, Any], outer: str, inner: str) -> Any:
    details = found.get(outer)
    return details.get(inner) if isinstance(details, dict) else None


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
        CallDelta(_place(call.index), _id(call.id), call.function.name, _arguments(call.function.arguments))
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


def _place(index: Any) -> int | None:
    """Which call a delta goes on with. A string of digits is a number, too."""
    if isinstance(index, str) and index.isdecimal() and len(index) <= MAX_DIGITS:
        return int(index)
    return int(index) if type(index) in (int, float) and index == index // 1 else None


def _id(value: Any) -> str | None:
    return value or None if isinstance(value, str) else None
