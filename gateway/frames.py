"""The bytes of an answer in OpenAI's shapes: stream chunks and whole objects, for chat and for raw
completions. What stands in a logprobs object is in `gateway/answer_logprobs.py`.

Only the text differs from token to token, so a stream's chunk is cut once into what stands around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from gateway.answer_logprobs import TokenTexts, chat_logprobs, completion_logprobs
from gateway.outlet import Body
from gateway.whole_message import WholeMessage
from pipeline.events import CONTENT, REASONING, Finish, PositionLogprobs, ToolCallDelta
from pipeline.values import Dropped, Usage

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
Json = Any

_encode: Final = msgspec.json.Encoder().encode
TEXT_MARK: Final = "\x00text\x00"  # stands for the text in a choice that is to be cut at it

# Legal inside a JSON string, but `str.splitlines` and httpx's `iter_lines` take them for line ends.
_LINE_ENDS: Final = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def json_string(text: str) -> bytes:
    """A JSON string that no client cuts at."""
    encoded = _encode(text)
    if not (text.isascii() or text.isprintable()):  # line ends are not printable
        for line_end, escaped in _LINE_ENDS:
            if line_end in encoded:
                encoded = encoded.replace(line_end, escaped)
    return encoded


def json_bytes(value: Json) -> bytes:
    """Like `json_string`, for any value."""
    encoded = _encode(value)
    for line_end, escaped in _LINE_ENDS:
        if line_end in encoded:
            encoded = encoded.replace(line_end, escaped)
    return encoded


def data_frame(value: Json) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def json_line(value: Json) -> bytes:
    return json_bytes(value) + b"\n"


class Shape(Protocol):
    """How one kind of answer is written. Shared by all choices of a request."""

    kind: str

    def opening(self, index: int) -> Json | None:
        """The choice that opens a stream, if this kind has one."""

    def delta(self, index: int, text: str, logprobs: Json, channel: str = CONTENT) -> Json:
        """A stream choice with text of `CONTENT` or `REASONING`."""

    def tool_call(self, index: int, call: ToolCallDelta) -> Json:
        """A stream choice with a piece of a tool call. The first piece, with the name, has its id."""

    def ending(self, index: int, finish: Finish) -> Json:
        """The stream choice that ends it."""

    def whole(self, index: int, message: WholeMessage, logprobs: Json, finish: Finish) -> Json:
        """The choice of an answer that is not streamed."""

    def logprobs(self, entries: Sequence[PositionLogprobs], texts: TokenTexts) -> Json: ...

    def chunk(self, choices: Sequence[Json]) -> dict[str, Json]: ...

    def document(self, choices: Sequence[Json], usage: Json) -> dict[str, Json]: ...


class ChatShape:
    """`chat.completion.chunk` and `chat.completion`.

    `reasoning_content`: reasoning stands under this name, too, for clients that know no other.
    """

    kind = "chat"

    def __init__(self, request_id: str, created: int, model: str, reasoning_content: bool = False) -> None:
        self._head = {"id": f"chatcmpl-{request_id}", "created": created, "model": model}
        self._reasoning_names = ("reasoning", "reasoning_content") if reasoning_content else ("reasoning",)

    def opening(self, index: int) -> Json:
        return _chat_choice(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, text: str, logprobs: Json, channel: str = CONTENT) -> Json:
        if channel == CONTENT:
            return _chat_choice(index, {"content": text}, logprobs)
        assert channel == REASONING, channel
        return _chat_choice(index, dict.fromkeys(self._reasoning_names, text), logprobs)

    def tool_call(self, index: int, call: ToolCallDelta) -> Json:
        piece: dict[str, Json] = {"index": call.call}
        if call.name is None:
            piece["function"] = {"arguments": call.arguments}
        else:
            piece |= _function_call(call.call_id, call.name, call.arguments)
        return _chat_choice(index, {"tool_calls": [piece]})

    def ending(self, index: int, finish: Finish) -> Json:
        return _chat_choice(index, {}) | _end(finish)

    def whole(self, index: int, message: WholeMessage, logprobs: Json, finish: Finish) -> Json:
        content = "".join(message.content)
        written: dict[str, Json] = {
            "role": "assistant",
            "content": content if content or not message.calls else None,
            "refusal": None,
        }
        if message.reasoning:
            written |= dict.fromkeys(self._reasoning_names, "".join(message.reasoning))
        if message.calls:
            written["tool_calls"] = [
                _function_call(call.call_id, call.name, "".join(call.arguments)) for call in message.calls
            ]
        return {"index": index, "message": written, "logprobs": logprobs, **_end(finish)}

    def logprobs(self, entries: Sequence[PositionLogprobs], texts: TokenTexts) -> Json:
        return chat_logprobs(entries, texts)

    def chunk(self, choices: Sequence[Json]) -> dict[str, Json]:
        return self._object("chat.completion.chunk", choices)

    def document(self, choices: Sequence[Json], usage: Json) -> dict[str, Json]:
        return self._object("chat.completion", choices) | {"usage": usage}

    def _object(self, kind: str, choices: Sequence[Json]) -> dict[str, Json]:
        head = self._head
        return {
            "id": head["id"],
            "object": kind,
            "created": head["created"],
            "model": head["model"],
            "choices": choices,
        }


class CompletionShape:
    """`text_completion`, streamed or whole. It has content only."""

    kind = "completion"

    def __init__(self, request_id: str, created: int, model: str) -> None:
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": created,
            "model": model,
        }

    def opening(self, index: int) -> Json | None:
        return None

    def delta(self, index: int, text: str, logprobs: Json, channel: str = CONTENT) -> Json:
        assert channel == CONTENT, channel
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def tool_call(self, index: int, call: ToolCallDelta) -> Json:
        raise AssertionError("a raw completion has no tool calls")

    def ending(self, index: int, finish: Finish) -> Json:
        return self.whole(index, WholeMessage(), None, finish)

    def whole(self, index: int, message: WholeMessage, logprobs: Json, finish: Finish) -> Json:
        assert not message.reasoning, "a raw completion has content only"
        assert not message.calls, "a raw completion has content only"
        return {"index": index, "text": "".join(message.content), "logprobs": logprobs, **_end(finish)}

    def logprobs(self, entries: Sequence[PositionLogprobs], texts: TokenTexts) -> Json:
        return completion_logprobs(entries, texts)

    def chunk(self, choices: Sequence[Json]) -> dict[str, Json]:
        return self._head | {"choices": choices}

    def document(self, choices: Sequence[Json], usage: Json) -> dict[str, Json]:
        return self._head | {"choices": choices, "usage": usage}


def text_template(shape: Shape, choice: Json, frame: Callable[[Json], bytes] = data_frame) -> list[bytes]:
    """The frame of a stream choice in which only the text differs, cut at it: one join a token.

    `choice` has `TEXT_MARK` where the text goes, once or more.
    """
    return frame(shape.chunk([choice])).split(_encode(TEXT_MARK))


class ContentFrames:
    """The content of one choice of a stream, in frames that differ in the text alone: the token path."""

    __slots__ = ("_after", "_before", "_kept", "_outlet", "num_frames")

    def __init__(self, around: Sequence[bytes], outlet: Body, kept: list[str] | None) -> None:
        self._before, self._after = around
        self._outlet = outlet
        self._kept = kept
        self.num_frames = 0

    def write(self, text: str) -> None:
        if self._kept is not None:
            self._kept.append(text)
        self.num_frames += 1
        self._outlet.push(b"".join((self._before, json_string(text), self._after)))


def usage_object(usage: Usage | None) -> dict[str, Json] | None:
    if usage is None:
        return None
    counts: dict[str, Json] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} | _dropped(usage.dropped),
    }
    if usage.reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return counts


def _dropped(dropped: Dropped | None) -> dict[str, Json]:
    """What a context policy left out of the prompt; nothing if that is nothing."""
    if dropped is None:
        return {}
    counts = {"dropped_messages": dropped.num_messages, "dropped_tokens": dropped.num_tokens}
    return counts | ({"dropped_characters": dropped.num_characters} if dropped.num_characters else {})


def _chat_choice(index: int, delta: dict[str, Json], logprobs: Json = None) -> dict[str, Json]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _function_call(call_id: str | None, name: str, arguments: str) -> dict[str, Json]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _end(finish: Finish) -> dict[str, Json]:
    """How a choice ended. What OpenAI does not have stands beside the message, never within."""
    end: dict[str, Json] = {"finish_reason": finish.reason, "stop_reason": finish.stop_reason}
    if finish.reason == "content_filter":
        end["content_filter_results"] = {"blocked": True}
    if finish.problem is not None:
        end["format_results"] = {"valid": False, "problem": finish.problem}
    return end
