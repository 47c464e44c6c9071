"""Any OpenAI-compatible server as a `TextWire`: the request it gets, and its stream read into channels.

Tested with the dialects of vLLM, SGLang, TensorRT-LLM, TGI, llama.cpp and Ollama (`openai_chunk.py` has their
sources). A stream is complete when a finish reason has come, and then `[DONE]`, the usage or the end of the
body; one that ends without a finish reason broke off.

Not here: connections, statuses, retries (`upstream_server.py`); the forms of tool calls
(`tool_call_order.py`) and of errors (`upstream_errors.py`).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from backend.http_ports import HttpRequest
from backend.openai_chunk import FAULTS, FINISH, Choice, Chunk, calls_of, decode_chunk, fragments_of
from backend.tool_call_order import ToolCallOrder
from backend.upstream_errors import server_error, words_of
from pipeline.events import CONTENT, Fragment
from pipeline.ports import TextSink
from pipeline.values import TextCall, TextUsage

DONE: Final = b"[DONE]"
_OURS: Final = frozenset(("n", "stream", "stream_options"))  # decided here
_HEADERS: Final = ((b"content-type", b"application/json"), (b"accept", b"text/event-stream"))


class OpenAiWire:
    """`upstream_ports.TextWire` for one server.

    `asks_usage`: it is asked for its token counts, until it refuses that.
    """

    def __init__(self) -> None:
        self.asks_usage = True

    def request(self, call: TextCall, request_id: str) -> HttpRequest:
        """The POST for one choice, streamed."""
        body: dict[str, Any] = {name: value for name, value in call.fields.items() if name not in _OURS}
        body["model"], body["stream"] = call.model, True
        if self.asks_usage:
            body["stream_options"] = {"include_usage": True}
        return HttpRequest(
            "POST",
            call.target,
            (*_HEADERS, (b"x-request-id", request_id.encode("latin-1", "replace"))),
            msgspec.json.encode(body),
        )

    def reader(self, call: TextCall, sink: TextSink) -> ChunkReader:
        return ChunkReader(sink)

    def abort(self, request_id: str) -> None:
        """There is no common way to tell it but to close the connection."""

    def learn(self, status: int, body: bytes) -> bool:
        """A server refused a request. True: the next one is made in another way, so it may be sent again.

        Servers that check for unknown fields and are older than `stream_options` name it in a 400 or 422. So
        may several at once, which were all sent before the first refusal came; each is sent again only once.
        """
        if status not in (400, 422) or b"stream_options" not in body:
            return False
        self.asks_usage = False
        return True


class ChunkReader:
    """Reads one choice's events (`AnswerReader`)."""

    __slots__ = ("_calls", "_finish", "_num_tokens", "_sink", "_stop", "_usage")

    def __init__(self, sink: TextSink) -> None:
        self._sink = sink
        self._calls: ToolCallOrder | None = None  # from the first tool call on
        self._finish: str | None = None
        self._stop: int | str | None = None
        self._usage = TextUsage()
        self._num_tokens = 0  # told to the sink

    def event(self, payload: bytes, now_s: float) -> bool:
        """The payload of one event, or the whole body of an answer that is no stream."""
        if payload.startswith(DONE):
            return self._done(now_s)
        chunk = decode_chunk(payload)
        choices = chunk.choices
        if choices and chunk.usage is None and self._calls is None:
            choice = choices[0]
            delta = choice.delta
            if (
                delta is not None
                and type(delta.content) is str
                and delta.content
                and choice.finish_reason is None
                and not choice.index
                and not (delta.reasoning_content or delta.reasoning or delta.refusal)
                and not (delta.tool_calls or delta.function_call)
                and not chunk.error
            ):  # the token path
                self._num_tokens += 1
                self._sink.text((Fragment(CONTENT, delta.content),), 1, now_s)
                return False
        return self._look(chunk, now_s)

    def closed(self, now_s: float) -> bool:
        """The body is complete: a server that has told its finish need not say `[DONE]`."""
        return self._finish is not None and self._end(now_s)

    def _look(self, chunk: Chunk, now_s: float) -> bool:
        """An event that is not just a piece of content."""
        if chunk.is_error:
            words, code = words_of(chunk.error_value())
            return self._fail(code, words)
        choice = next((choice for choice in chunk.choices or () if not choice.index), None)
        self._note_usage(chunk)
        if choice is not None:
            if choice.finish_reason in FAULTS:
                return self._fail(None, f"it ended it with the reason {choice.finish_reason!r}")
            self._say(choice, None if chunk.usage is None else chunk.usage.completion_tokens, now_s)
            if choice.finish_reason:
                self._finish = FINISH.get(choice.finish_reason, choice.finish_reason)
                self._stop = _stop(choice)
        is_last = chunk.usage is not None and (choice is None or choice.message is not None)
        return is_last and self._finish is not None and self._end(now_s)

    def _note_usage(self, chunk: Chunk) -> None:
        """The newest counts; zeros are none."""
        if chunk.usage is not None and (chunk.usage.prompt_tokens or chunk.usage.completion_tokens):
            self._usage = chunk.usage.values()
        elif chunk.timings is not None and self._usage.completion_tokens is None:
            self._usage = chunk.timings.values()

    def _say(self, choice: Choice, counted: int | None, now_s: float) -> None:
        """Its text. `counted`: the tokens so far, where the server says so with each chunk."""
        fragments = fragments_of(choice)
        if self._calls is not None and fragments:
            fragments = list(self._calls.others(fragments))
        calls = calls_of(choice)
        has_text = bool(fragments or calls)
        if calls:
            if self._calls is None:
                self._calls = ToolCallOrder()
            fragments += self._calls.calls(calls)
        if has_text:
            num_tokens = max(0, counted - self._num_tokens) if counted else 1
            self._num_tokens += num_tokens
            self._sink.text(fragments, num_tokens, now_s)

    def _done(self, now_s: float) -> bool:
        if self._finish is None:
            return self._fail(None, "its stream is over without a finish reason")
        return self._end(now_s)

    def _end(self, now_s: float) -> bool:
        assert self._finish is not None
        try:
            rest = self._calls.flush() if self._calls is not None else []
        except ValueError as error:
            return self._fail(None, str(error))
        if rest:
            self._sink.text(rest, 0, now_s)
        self._sink.ended(self._finish, self._stop, self._usage, now_s)
        return True

    def _fail(self, code: int | None, words: str) -> bool:
        self._sink.failed(server_error(code, words, has_begun=self._num_tokens > 0))
        return True


def _stop(choice: Choice) -> int | str | None:
    """What ended it. SGLang names the end-of-sequence token there too, which is nobody's own stop."""
    if choice.stop_reason is not None:
        return choice.stop_reason
    return choice.matched_stop if isinstance(choice.matched_stop, str) else None
