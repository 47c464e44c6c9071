"""What a streamed answer shows frame by frame, written into its `Sample`. Sans I/O: bytes and times come in.

Not here: the exchange around it (`gateway/bench/client.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from backend.openai_chunk import FAULTS
from backend.sse_reader import SseReader
from backend.upstream_errors import body_words
from gateway.bench.phrases import one_line
from gateway.bench.plausible import MAX_TIMINGS, is_count, is_time
from gateway.bench.sample import Sample

MAX_EVENT_BYTES: Final = 16 << 20
MAX_DETAIL: Final = 300  # characters of what a server says
_MAX_BODY: Final = 4 * MAX_DETAIL
_MAX_NAME: Final = 64  # characters, of a timing or a finish_reason
# What msgspec raises for bytes that it cannot read: the last one for nesting without end.
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_EMPTY: Final = frozenset((b"null", b'""', b"[]", b"{}"))


class _Delta(msgspec.Struct):
    # Raw: what is in them does not matter, only whether there is something.
    content: Raw | UnsetType = UNSET
    reasoning: Raw | UnsetType = UNSET
    reasoning_content: Raw | UnsetType = UNSET
    tool_calls: Raw | UnsetType = UNSET
    refusal: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: Raw | UnsetType = UNSET
    finish_reason: str | None = None


class _Frame(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Raw | UnsetType = UNSET
    timings: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET
    object: Any = None


# 0.4 us for a usual frame, where `json.loads` takes 2.9: cheap enough to look into every one.
_decode: Final = msgspec.json.Decoder(_Frame).decode


class StreamFault(Exception):
    """The stream says, or shows, that it failed. `kind` is the word for `Sample.error`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class AnswerFrames:
    """Reads one answer. After `StreamFault` it reads no more."""

    def __init__(self, sample: Sample, keeps_text: bool = False) -> None:
        self._sample = sample
        self._events = SseReader(MAX_EVENT_BYTES)
        self.is_done = False  # [DONE] has come
        self._usage: Raw | UnsetType = UNSET
        self._timings: Raw | UnsetType = UNSET
        self._text: list[str] | None = [] if keeps_text else None

    @property
    def text(self) -> str:
        """The answer's content, where it is kept."""
        return "".join(self._text or ())

    def feed(self, data: bytes, now_s: float) -> None:
        """Body bytes that were read at `now_s`; frames of one read have one time."""
        try:
            events = self._events.feed(data)
        except ValueError as error:
            raise StreamFault("bad_frame", str(error)) from error
        frames_s = self._sample.frames_s
        for event in events:
            if self.is_done:
                continue
            if event == b"[DONE]":
                self.is_done = True
            elif self._has_output(event):
                frames_s.append(now_s)

    def finish(self) -> None:
        """The body is complete. Raises `StreamFault` if the answer is not."""
        sample = self._sample
        self._read_usage()
        if sample.finish is None or not self.is_done:
            missing = "a finish_reason" if sample.finish is None else "[DONE]"
            raise StreamFault("truncated", f"the stream ended without {missing}")
        if sample.finish in FAULTS:  # the server gave up on it
            raise StreamFault("aborted", f"the server ended the answer with finish_reason {sample.finish!r}")
        if not sample.frames_s:
            raise StreamFault("empty", f"no output; finish_reason {sample.finish!r}")

    def _has_output(self, event: bytes) -> bool:
        try:
            frame = _decode(event)
            if not event.isascii():
                event.decode()  # texts are not looked into, but what is no text is no answer
        except UNREADABLE as error:
            raise StreamFault("bad_frame", f"a frame is no chunk of an answer: {error}") from error
        if _is_there(frame.error) or frame.object == "error":
            raise StreamFault("error_frame", error_text(event))
        if _is_there(frame.usage):
            self._usage = frame.usage
        if _is_there(frame.timings):
            self._timings = frame.timings
        has_output = False
        for choice in frame.choices or ():
            if choice.finish_reason is not None:
                self._sample.finish = choice.finish_reason[:_MAX_NAME]
            has_output = self._choice_has_output(choice) or has_output
        return has_output

    def _choice_has_output(self, choice: _Choice) -> bool:
        delta = choice.delta
        content = choice.text if delta is None else delta.content
        if _is_there(content):
            if self._text is not None:
                self._text.append(_as_text(content))
            return True
        return delta is not None and (
            _is_there(delta.reasoning)
            or _is_there(delta.reasoning_content)
            or _is_there(delta.tool_calls)
            or _is_there(delta.refusal)
            or _is_there(delta.function_call)
        )

    def _read_usage(self) -> None:
        sample = self._sample
        usage = _mapping(self._usage)
        # No prompt is empty, nor an answer: a server that does not count may say 0.
        sample.prompt_tokens = _count(usage.get("prompt_tokens")) or None
        sample.output_tokens = _count(usage.get("completion_tokens")) or None
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            sample.cached_tokens = _count(details.get("cached_tokens"))
        if self._timings is not UNSET:
            timings = _mapping(self._timings)
            numbers = {name[:_MAX_NAME]: float(value) for name, value in timings.items() if is_time(value)}
            sample.timings = dict(list(numbers.items())[:MAX_TIMINGS])


def error_text(body: bytes) -> str:
    """What an error says, of OpenAI's shape or another: one line, bounded, with nothing but what prints."""
    told, _ = body_words(body)
    return one_line(told or body[:_MAX_BODY].decode(errors="replace"))[:MAX_DETAIL]


def _is_there(value: Raw | UnsetType) -> bool:
    return value is not UNSET and bytes(value) not in _EMPTY


def _as_text(value: Raw | UnsetType) -> str:
    assert value is not UNSET
    text = msgspec.json.decode(value)
    return text if isinstance(text, str) else ""


def _mapping(value: Raw | UnsetType) -> Mapping[str, Any]:
    try:
        found = None if value is UNSET else msgspec.json.decode(value)
    except UNREADABLE as error:
        raise StreamFault("bad_frame", f"a frame's counts cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _count(value: object) -> int | None:
    return value if is_count(value) else None
