"""The shape of what the generation routes answer, for the OpenAPI document.

Frames are written by `gateway/frames.py`, not through these structs: a test reads what it writes back into
them and misses no field, so that the two cannot drift apart.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Finish = Annotated[
    Literal["stop", "length", "tool_calls", "content_filter"], Meta(description="Why the generation ended.")
]


class Answer(msgspec.Struct, kw_only=True):
    """Base of every shape here."""


class PromptTokensDetails(Answer):
    """Of the prompt's tokens, those that the engine had cached; and what a context policy left out before."""

    cached_tokens: Annotated[int | None, Meta(description="null where the engine's server does not tell.")]
    dropped_messages: Annotated[
        int | UnsetType,
        Meta(description="Whole messages. Only after something was dropped, as the next two."),
    ] = UNSET
    dropped_tokens: Annotated[
        int | UnsetType, Meta(description="By how much the prompt is shorter than the whole one.")
    ] = UNSET
    dropped_characters: Annotated[
        int | UnsetType, Meta(description="Cut out of the longest text by `middle_out`.")
    ] = UNSET


class CompletionTokensDetails(Answer):
    """Of the completion's tokens, those of the reasoning."""

    reasoning_tokens: int


class UsageCounts(Answer):
    """Token counts as the engine made them; what a filter withheld still counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Annotated[
        CompletionTokensDetails | UnsetType, Meta(description="Only with a reasoning parser.")
    ] = UNSET


class TokenLogprob(Answer):
    """A token, its log probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """A generated token with the most likely ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """One entry per generated token."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(Answer):
    """Four lists with one entry per generated token."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class FormatResults(Answer):
    """What is wrong with an answer that breaks its `response_format` and was let through."""

    valid: Literal[False]
    problem: str


class Choice(Answer):
    """What all choices have."""

    index: int
    finish_reason: Finish | None
    stop_reason: Annotated[
        int | str | UnsetType | None, Meta(description="The stop string or stop token id that ended it.")
    ] = UNSET
    content_filter_results: Annotated[
        dict[str, Any] | UnsetType, Meta(description="Only after a content filter ended it.")
    ] = UNSET
    format_results: Annotated[
        FormatResults | UnsetType, Meta(description="Only if the answer breaks its `response_format`.")
    ] = UNSET


class CalledFunction(Answer):
    """A function that the model calls."""

    name: str
    arguments: Annotated[str, Meta(description="JSON, as the model wrote it.")]


class AnsweredToolCall(Answer):
    """A whole tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    """The answer."""

    role: Literal["assistant"]
    content: Annotated[str | None, Meta(description="Null if there are only tool calls.")]
    refusal: str | None = None
    reasoning: Annotated[
        str | UnsetType, Meta(description="Only with a reasoning parser, if the model reasoned.")
    ] = UNSET
    reasoning_content: Annotated[
        str | UnsetType, Meta(description="The same text, if the server is set to send this name, too.")
    ] = UNSET
    tool_calls: list[AnsweredToolCall] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    """One whole answer."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class FunctionDelta(Answer):
    """The name comes whole; the arguments come in pieces."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallPiece(Answer, kw_only=True):
    """The next piece of the tool call with this index. Only the first has an id, a type and a name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(Answer):
    """What is new; empty on the last chunk of a choice."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChunkChoice(Choice, kw_only=True):
    """The next piece of one answer."""

    delta: Delta
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice, kw_only=True):
    """One continuation, or the next piece of it."""

    text: str
    logprobs: CompletionLogprobs | None


class ChatCompletion(Answer):
    """The answer to a chat that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: Annotated[int, Meta(description="Unix seconds.")]
    model: str
    choices: list[ChatChoice]
    usage: UsageCounts


class ChatChunk(Answer):
    """One event, or line, of a streamed chat. The usage chunk, if asked for, is last and has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageCounts | UnsetType | None = UNSET
    timings: Annotated[
        dict[str, float | None] | UnsetType, Meta(description="Stages in milliseconds, with include_timings.")
    ] = UNSET


class Completion(Answer):
    """The answer to a raw completion, or one event or line of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageCounts | UnsetType | None = UNSET
    timings: dict[str, float | None] | UnsetType = UNSET


class ErrorFields(Answer):
    """What went wrong."""

    message: str
    type: Annotated[str, Meta(examples=["invalid_request_error", "overloaded_error", "engine_error"])]
    param: Annotated[str | None, Meta(description="The field at fault.", examples=["messages[2].content"])]
    code: Annotated[str | None, Meta(examples=["context_length_exceeded", "queue_full", "worker_lost"])]


class ErrorDocument(Answer):
    """The body of every error, and the last event or line of a stream that failed (without [DONE])."""

    error: ErrorFields


class StreamStarted(Answer):
    """A resumable stream."""

    id: str
    object: Literal["stream"]
    url: Annotated[str, Meta(description="Of its events, with the token: what EventSource is given.")]
    token: Annotated[str, Meta(description="Opens this stream alone.")]
    expires_at: Annotated[int, Meta(description="Seconds since 1970; after that it is surely forgotten.")]
