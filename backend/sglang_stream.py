"""The stream of SGLang's `/generate`, read into ids.

Source: SGLang 0.4.6 and 0.5.23, `srt/managers/tokenizer_manager.py`. An event has all `output_ids` so far, or
with `--incremental-streaming-output` (once `--stream-output`) the new ones; `meta_info.completion_tokens`
tells which. A list of all may be longer than that number: it grows until it is written. The logprobs go
along. From 0.4 ids come only with `--skip-tokenizer-init`. The id that ended a choice is the last one.
What is no answer, and ids beyond those that were asked for: as in `upstream_tokens.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from backend.lenient import count, holds_nothing, milliseconds
from backend.upstream_errors import words_of
from backend.upstream_faults import server_error
from backend.upstream_ports import MAX_ANSWER_BYTES
from backend.upstream_tokens import TokenId, check_positions
from pipeline.ports import Sink
from pipeline.values import EngineCall, FirstToken, TokenLogprobs

DONE: Final = b"[DONE]"
_LEAST: Final = -9999.0  # vLLM's number for minus infinity, which JSON has none for
Entry = tuple[float | None, TokenId, Any]  # logprob, id, its text or null


class Reason(msgspec.Struct):
    type: str
    matched: Any = None
    message: Any = None
    status_code: Any = None


class Meta(msgspec.Struct):
    completion_tokens: Annotated[int, msgspec.Meta(ge=0)]
    finish_reason: Reason | str | None = None
    prompt_tokens: Any = None
    cached_tokens: Any = None
    queue_time: Any = None  # seconds; with --enable-metrics
    forward_entry_time: Any = None
    prefill_finished_time: Any = None
    output_token_logprobs: list[Entry] | None = None
    output_top_logprobs: list[list[Entry] | None] | None = None


class Event(msgspec.Struct):
    output_ids: list[TokenId] | None = None
    meta_info: Meta | None = None
    error: Any = None


ID_BYTES: Final = 8  # with its comma
LOGPROB_BYTES: Final = 40  # a list of the number, the id and null

_decode: Final = msgspec.json.Decoder(Event).decode


class SglangReader:
    """`upstream_ports.AnswerReader`."""

    __slots__ = ("_max_tokens", "_num_tokens", "_num_top", "_sink", "_stop_ids", "max_bytes")

    def __init__(self, call: EngineCall, sink: Sink) -> None:
        self._sink = sink
        self._num_top: int | None = call.sampling.get("logprobs")
        self._stop_ids: Sequence[int] = call.sampling.get("stop_token_ids") or ()
        self._max_tokens = call.max_tokens
        self._num_tokens = 0  # told to the sink
        # The n-th event may have all n ids again, and their logprobs.
        num_each = ID_BYTES + (0 if self._num_top is None else LOGPROB_BYTES * (1 + self._num_top))
        self.max_bytes = MAX_ANSWER_BYTES + call.max_tokens**2 // 2 * num_each

    @property
    def has_finish(self) -> bool:
        return False  # it comes with everything else

    def refused(self, status: int, body: bytes) -> bool:
        """`AnswerReader`: there is no other way to ask."""
        return False

    def event(self, payload: bytes, now_s: float) -> bool:
        try:
            event = _decode(payload)
        except (ValueError, RecursionError) as error:
            return self._unreadable(payload, error)
        meta = event.meta_info
        if event.error is not None:
            words, code = words_of({"error": event.error})
            return self._fail(code, words)
        if meta is None:
            return False
        reason = Reason(meta.finish_reason) if isinstance(meta.finish_reason, str) else meta.finish_reason
        if reason is not None and (reason.type not in ("stop", "length") or isinstance(reason.matched, str)):
            # No stop strings are sent: a string is what went wrong, as "NaN happened" (`schedule_batch.py`).
            words, _ = words_of(reason.message or reason.matched or reason.type)
            return self._fail(reason.status_code, words)
        if event.output_ids is None:
            return self._fail(None, "it gives no token ids; before 0.5 it needs --skip-tokenizer-init")
        return self._tell(event.output_ids, meta, reason, now_s)

    def closed(self, now_s: float) -> bool:
        return False  # the finish was the last event

    def _unreadable(self, payload: bytes, error: Exception) -> bool:
        if payload.strip() == DONE:
            return self._fail(None, "its stream is over without a finish reason")
        if holds_nothing(payload):
            return False
        raise ValueError("an event that cannot be read") from error

    def _tell(self, told: list[int], meta: Meta, reason: Reason | None, now_s: float) -> bool:
        """The new ones of these ids. Those that were not asked for are left out, and end it by its length."""
        start = self._start(len(told), meta.completion_tokens)
        ids = told[start:] if start else told
        num_left = self._max_tokens - self._num_tokens
        finish, stop = (None, None) if reason is None else (reason.type, self._stop(reason))
        if len(ids) > num_left:
            ids, finish, stop = ids[:num_left], "length", None
        if not ids and finish is None:
            return False
        first = _first(meta) if not self._num_tokens else None
        logprobs = None
        if self._num_top is not None:
            logprobs = _logprobs(meta, start, len(ids), self._num_top)
            check_positions(logprobs, ids)
        self._num_tokens += len(ids)
        self._sink.tokens(ids, finish, stop, first, logprobs, now_s)
        return finish is not None

    def _start(self, num_ids: int, num_completion: int) -> int:
        """Where the new ids begin in a list. Raises `ValueError` where some were left out."""
        if num_ids >= num_completion:
            return self._num_tokens  # all so far
        if self._num_tokens + num_ids == num_completion:
            return 0
        raise ValueError(
            f"{num_ids} ids came after {self._num_tokens}, and {num_completion} were made: some are lost"
        )

    def _stop(self, reason: Reason) -> int | None:
        """SGLang names the end-of-sequence token, too; it is nobody's stop token."""
        matched = (
            reason.matched[-1] if isinstance(reason.matched, list) and reason.matched else reason.matched
        )
        return matched if isinstance(matched, int) and matched in self._stop_ids else None

    def _fail(self, code: Any, words: str) -> bool:
        code = code if type(code) is int else None
        self._sink.failed(server_error(code, words, has_begun=self._num_tokens > 0))
        return True


def _first(meta: Meta) -> FirstToken:
    begun_s, ended_s = meta.forward_entry_time, meta.prefill_finished_time
    is_told = milliseconds(begun_s) is not None and milliseconds(ended_s) is not None
    return FirstToken(
        cached_tokens=count(meta.cached_tokens),
        queue_ms=milliseconds(meta.queue_time),
        prefill_ms=milliseconds(ended_s - begun_s) if is_told else None,
        prompt_tokens=count(meta.prompt_tokens),
    )


def _logprobs(meta: Meta, start: int, num_ids: int, num_top: int) -> list[TokenLogprobs]:
    """Those of the new ids. Raises `ValueError` where they are missing."""
    sampled = (meta.output_token_logprobs or [])[start : start + num_ids]
    tops = (meta.output_top_logprobs or [])[start : start + num_ids] if num_top else [None] * num_ids
    if len(sampled) != num_ids or len(tops) != num_ids:
        raise ValueError(f"{len(sampled)} logprobs with {len(tops)} lists came for {num_ids} tokens")
    return [_position(entry, (top or [])[:num_top]) for entry, top in zip(sampled, tops, strict=True)]


def _position(sampled: Entry, top: list[Entry]) -> TokenLogprobs:
    entries = [sampled, *top]
    ids = [token_id for _, token_id, _ in entries]
    rank = ids.index(sampled[1], 1) if sampled[1] in ids[1:] else 0
    return TokenLogprobs(ids, [_LEAST if value is None else value for value, _, _ in entries], rank)
