"""Any OpenAI-compatible server as a `TextWire`: the request it gets, and its stream read into channels.

Tested with the dialects of vLLM, SGLang, TensorRT-LLM, TGI, llama.cpp and Ollama (`openai_chunk.py` has their
sources). A stream is complete when a finish reason has come, and then `[DONE]`, the usage or the end of the
body; one that ends without a finish reason broke off.

Not here: connections, statuses, retries (`upstream_server.py`); the forms of tool calls
(`tool_call_order.py`) and of errors (`upstream_errors.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Any, Final

import msgspec

from backend.http_ports import HttpRequest
from backend.lenient import checked_reason, count, holds_nothing, is_first, stop_of
from backend.openai_chunk import (
    FAULTS,
    FINISH,
    Choice,
    Chunk,
    calls_of,
    decode_chunk,
    fragments_of,
    mended_chunk,
    timings_of,
    usage_of,
)
from backend.tool_call_order import CallDelta, ToolCallOrder
from backend.upstream_errors import blames, words_of
from backend.upstream_faults import server_error
from backend.upstream_ports import MAX_ANSWER_BYTES, STREAM_HEADERS
from pipeline.events import CONTENT, Fragment
from pipeline.ports import TextSink
from pipeline.values import TextCall, TextUsage

DONE: Final = b"[DONE]"
USAGE_FIELD: Final = "stream_options"
HEAL_S: Final = 600.0  # after it a server that refused the field is asked again
_OURS: Final = frozenset(("n", "stream", USAGE_FIELD))  # decided here


class OpenAiWire:
    """`upstream_ports.TextWire` for one server.

    It is asked for its token counts. One that refuses the field for that is not asked for `HEAL_S`: what it
    refuses may change, or the refusal have been an accident.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._plain_until_s = -inf
        self._is_next_plain = False

    @property
    def asks_usage(self) -> bool:
        return self._clock() >= self._plain_until_s

    def request(self, call: TextCall, request_id: str) -> HttpRequest:
        """The POST for one choice, streamed."""
        body: dict[str, Any] = {name: value for name, value in call.fields.items() if name not in _OURS}
        body["model"], body["stream"] = call.model, True
        is_plain, self._is_next_plain = self._is_next_plain, False
        if not is_plain and self.asks_usage:
            body[USAGE_FIELD] = {"include_usage": True}
        return HttpRequest(
            "POST",
            call.target,
            (*STREAM_HEADERS, (b"x-request-id", request_id.encode("latin-1", "replace"))),
            msgspec.json.encode(body),
        )

    def reader(self, call: TextCall, sink: TextSink) -> ChunkReader:
        return ChunkReader(sink, self)

    def abort(self, request_id: str) -> None:
        """There is no common way to tell it but to close the connection."""

    def try_plain(self) -> None:
        """The next request is made without the field."""
        self._is_next_plain = True

    def stay_plain(self) -> None:
        """A request that was refused with the field has succeeded without it."""
        self._plain_until_s = self._clock() + HEAL_S


class ChunkReader:
    """Reads one choice's events (`AnswerReader`)."""

    max_bytes = MAX_ANSWER_BYTES
    __slots__ = (
        *("_calls", "_finish", "_is_second", "_num_tokens", "_sink", "_stop", "_usage", "_wire"),
        "has_finish",
    )

    def __init__(self, sink: TextSink, wire: OpenAiWire) -> None:
        self._sink = sink
        self._wire = wire
        self._is_second = False  # sent again, without asking for counts
        self._calls: ToolCallOrder | None = None  # from the first tool call on
        self._finish = ""
        self.has_finish = False
        self._stop: int | str | None = None
        self._usage = TextUsage()
        self._num_tokens = 0  # told to the sink

    def refused(self, status: int, body: bytes) -> bool:
        """`AnswerReader`. Servers that check for unknown fields and are older than `stream_options` name it.

        What is wrong may be another thing all the same, so nothing is remembered until the second request has
        succeeded.
        """
        if status not in (400, 422) or not blames(body, USAGE_FIELD):
            return False
        self._is_second = True
        self._wire.try_plain()
        return True

    def event(self, payload: bytes, now_s: float) -> bool:
        """The payload of one event, or the whole body of an answer that is no stream."""
        if payload.startswith(DONE):
            return self._done(now_s)
        try:
            chunk = decode_chunk(payload)
        except (ValueError, RecursionError):
            mended = self._mended(payload)
            if mended is None:
                return False
            chunk = mended
        choices = chunk.choices
        if choices and chunk.usage is None and self._calls is None and len(choices) == 1:
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
        return self.has_finish and self._end(now_s)

    def _mended(self, payload: bytes) -> Chunk | None:
        """What cannot be read as it is; None where nothing of the answer is in it. Raises `ValueError`."""
        try:
            return mended_chunk(payload)
        except ValueError:
            if self.has_finish or holds_nothing(payload):
                return None
            raise

    def _look(self, chunk: Chunk, now_s: float) -> bool:
        """An event that is not just a piece of content."""
        if chunk.is_error:
            if self.has_finish:  # nothing of the answer is missing
                return self._end(now_s)
            words, code = words_of(chunk.error_value())
            return self._fail(code, words)
        self._usage = usage_of(chunk.usage) or self._usage
        if self._usage.completion_tokens is None:
            self._usage = timings_of(chunk.timings) or self._usage
        ours = [choice for choice in chunk.choices or () if is_first(choice.index)]
        for choice in ours:
            if not self.has_finish and choice.finish_reason in FAULTS:
                return self._fail(None, f"it ended it with the reason {choice.finish_reason!r}")
            self._say(choice, chunk.usage, now_s)
            if choice.finish_reason and not self.has_finish:
                reason = checked_reason(choice.finish_reason)
                self._finish, self.has_finish = FINISH.get(reason, reason), True
                self._stop = _stop(choice)
        is_last = isinstance(chunk.usage, dict) and (not ours or ours[-1].message is not None)
        return is_last and self.has_finish and self._end(now_s)

    def _say(self, choice: Choice, usage: Any, now_s: float) -> None:
        """Its text. `usage`: of the tokens so far, where the server says so with each chunk."""
        fragments = fragments_of(choice)
        if self._calls is not None and fragments:
            fragments = list(self._calls.others(fragments))
        calls = calls_of(choice)
        has_text = bool(fragments or calls)
        if calls:
            fragments += self._ordered(calls)
        if has_text:
            counted = count(usage.get("completion_tokens")) if isinstance(usage, dict) else None
            num_tokens = max(0, counted - self._num_tokens) if counted else 1
            self._num_tokens += num_tokens
            self._sink.text(fragments, num_tokens, now_s)

    def _ordered(self, calls: Sequence[CallDelta]) -> Sequence[Fragment]:
        if self._calls is None:
            self._calls = ToolCallOrder()
        try:
            return self._calls.calls(calls)
        except ValueError:
            if self.has_finish:  # what comes after it cannot undo it
                return ()
            raise

    def _done(self, now_s: float) -> bool:
        if not self.has_finish:
            return self._fail(None, "its stream is over without a finish reason")
        return self._end(now_s)

    def _end(self, now_s: float) -> bool:
        if self._is_second:
            self._wire.stay_plain()
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
        return stop_of(choice.stop_reason)
    return stop_of(choice.matched_stop) if isinstance(choice.matched_stop, str) else None
