"""The stream of SGLang's `/generate`, read into ids.

Source: SGLang 0.4.6 and 0.5.23, `srt/managers/tokenizer_manager.py`. An event has all `output_ids` so far, or
with `--incremental-streaming-output` (once `--stream-output`) the new ones; `meta_info.completion_tokens`
tells which. A list of all may be longer than that number: it grows until it is written. The logprobs go
along. From 0.4 ids come only with `--skip-tokenizer-init`. The id that ended a choice is the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from backend.upstream_errors import UpstreamFailed, server_error, words_of
from pipeline.ports import Sink
from pipeline.values import EngineCall, FirstToken, TokenLogprobs

DONE: Final = b"[DONE]"
_LEAST: Final = -9999.0  # vLLM's number for minus infinity, which JSON has none for
Entry = tuple[float | None, int, Any]  # logprob, id, its text or null


class Reason(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class Meta(msgspec.Struct):
    completion_tokens: int
    finish_reason: Reason | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    queue_time: float | None = None  # seconds; with --enable-metrics
    forward_entry_time: float | None = None
    prefill_finished_time: float | None = None
    output_token_logprobs: list[Entry] | None = None
    output_top_logprobs: list[list[Entry] | None] | None = None


class Event(msgspec.Struct):
    output_ids: list[int] | None = None
    meta_info: Meta | None = None
    error: Any = None


_decode: Final = msgspec.json.Decoder(Event).decode


class GenerateReader:
    """`upstream_ports.AnswerReader`."""

    __slots__ = ("_num_tokens", "_num_top", "_sink", "_stop_ids")

    def __init__(self, call: EngineCall, sink: Sink) -> None:
        self._sink = sink
        self._num_top: int | None = call.sampling.get("logprobs")
        self._stop_ids: Sequence[int] = call.sampling.get("stop_token_ids") or ()
        self._num_tokens = 0  # told to the sink

    def event(self, payload: bytes, now_s: float) -> bool:
        if payload == DONE:
            return self._fail(None, "its stream is over without a finish reason")
        event = _decode(payload)
        meta = event.meta_info
        if event.error is not None:
            words, code = words_of({"error": event.error})
            return self._fail(code, words)
        if meta is None:
            return False
        reason = meta.finish_reason
        if reason is not None and (reason.type not in ("stop", "length") or isinstance(reason.matched, str)):
            # No stop strings are sent: a string is what went wrong, as "NaN happened" (`schedule_batch.py`).
            return self._fail(reason.status_code, reason.message or str(reason.matched or reason.type))
        if event.output_ids is None:
            return self._fail(None, "it gives no token ids; before 0.5 it needs --skip-tokenizer-init")
        start = self._start(len(event.output_ids), meta.completion_tokens)
        ids = event.output_ids[start:] if start else event.output_ids
        if not ids and reason is None:
            return False
        first = _first(meta) if not self._num_tokens else None
        logprobs = None if self._num_top is None else _logprobs(meta, start, len(ids), self._num_top)
        self._num_tokens += len(ids)
        if reason is None:
            self._sink.tokens(ids, None, None, first, logprobs, now_s)
            return False
        self._sink.tokens(ids, reason.type, self._stop(reason), first, logprobs, now_s)
        return True

    def closed(self, now_s: float) -> bool:
        return False  # the finish was the last event

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

    def _fail(self, code: int | None, words: str) -> bool:
        if self._num_tokens or code is None:
            error = UpstreamFailed(f"The upstream server gave up the request: {words[:500]}")
            self._sink.failed(error)
        else:
            self._sink.failed(server_error(code, words))
        return True


def _first(meta: Meta) -> FirstToken:
    begun_s, ended_s = meta.forward_entry_time, meta.prefill_finished_time
    return FirstToken(
        cached_tokens=meta.cached_tokens,
        queue_ms=None if meta.queue_time is None else max(0.0, meta.queue_time * 1e3),
        prefill_ms=None if begun_s is None or ended_s is None else max(0.0, (ended_s - begun_s) * 1e3),
        prompt_tokens=meta.prompt_tokens,
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
