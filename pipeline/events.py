"""What the way out gives: fragments of one choice's text by channel, and the events that deliver them.

A fragment is what a parser makes of the engine's text, before anything is withheld or rewritten. An event is
what may leave: every kind of delivery (SSE, one JSON document, WebSocket) is made of these three.

Named tuples, because several are made per token: 0.2 us each, a frozen dataclass takes 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pipeline.values import FinishReason, TokenLogprobs

# `filters.rules.CHANNELS` has the same names.
CONTENT: Final = "content"
REASONING: Final = "reasoning"
TOOL_NAME: Final = "tool_name"
TOOL_ARGUMENTS: Final = "tool_arguments"


class Fragment(NamedTuple):
    """A piece of one channel, raw.

    A `TOOL_NAME` fragment is a whole name and begins the call `call`; the `TOOL_ARGUMENTS` fragments of that
    number follow it. Calls are numbered from 0, in order, and the fragments of one call are never mixed with
    those of another.
    """

    channel: str
    text: str
    call: int = 0
    call_id: str | None = None  # with a name, where the model's format has ids of its own


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The logprobs of one token and the raw characters [start, end) of its channel that it made."""

    token_id: int
    start: int
    end: int
    logprobs: TokenLogprobs


class TextDelta(NamedTuple):
    """Text of `CONTENT` or `REASONING` that may leave, and the logprobs of tokens whose text has all left."""

    channel: str
    text: str
    logprobs: Sequence[PositionLogprobs] = ()


class ToolCallDelta(NamedTuple):
    """A piece of a tool call. The first of each call has its name; all `arguments` join to JSON."""

    call: int
    name: str | None
    arguments: str
    call_id: str | None = None


class Finish(NamedTuple):
    """The last event of a choice. `stop_reason`: the stop string or stop token id that ended it.

    `problem`: what is wrong with an answer that breaks its `response_format` and was let through; else None.
    """

    reason: FinishReason
    stop_reason: int | str | None = None
    problem: str | None = None


Event = TextDelta | ToolCallDelta | Finish
