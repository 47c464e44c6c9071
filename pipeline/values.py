"""One frozen value per hop, in flow order. No behaviour beyond trivial properties.

bytes -> ChatRequest | CompletionRequest -> Prompt -> EngineCall -> (engine) -> FirstToken, TokenLogprobs ->
Usage; or, where the engine's server takes text, -> TextCall -> (server) -> TextUsage -> Usage
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]

Json = Any  # a decoded JSON value; looked into only where a field's meaning is known

MediaKind = Literal["image", "audio"]


@dataclass(frozen=True, slots=True)
class MediaRef:
    """An image or a sound as a message names it. What is behind it has not been looked at."""

    kind: MediaKind
    url: str = field(repr=False)  # `data:` with the bytes themselves, `http:` or `https:`
    path: str  # where it stands in the request, for errors: messages[0].content[1]
    # What it turned out to be, once that is known: a conversation's next turn loads nothing again. Left empty
    # where files that were fetched would fill the memory (`gateway/media.py`).
    found: list[Medium] = field(default_factory=list, compare=False, repr=False)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Medium:
    """An image or a sound, loaded and found to be within the limits. `data` is the file, not decoded."""

    kind: MediaKind
    data: bytes = field(repr=False)
    format: str  # png, jpeg, webp, gif, wav, mp3, …
    digest: str  # of `data`, in hex: equal ones are the same medium to caches


@dataclass(frozen=True, slots=True)
class MediaSupport:
    """How a model takes one kind of media."""

    token_id: int  # its placeholder: the template writes one for each medium, the engine makes it many
    max_count: int  # in one prompt


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The answer must be JSON: any object, or what a schema allows."""

    schema: Json = None  # None: any object; else a JSON schema, decoded (an object, or true)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may call tools. `name`: the one that it must call, with `named`."""

    kind: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """What the client asked of the generation, by vLLM's names.

    Only values that the body really gave are in `sampling`.
    """

    sampling: Mapping[
        str, Json
    ]  # temperature, top_p, seed, min_tokens, stop_token_ids, logit_bias, structured_outputs, …
    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none wanted; k: the sampled token and the k most likely ones
    answer_format: AnswerFormat | None = None  # JSON that the answer must be
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """How the answer travels."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    include_timings: bool = False
    escape: str | None = None  # of `filters.escaping.ESCAPES`; None: the gateway's default


@dataclass(frozen=True, slots=True)
class TemplateUse:
    """A named prompt template of the configuration, and what goes into its slots."""

    name: str
    variables: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a context policy left out of a prompt that was too long."""

    policy: str
    num_messages: int
    num_tokens: int
    num_characters: int = 0  # cut out of one text


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Hop 1 of a chat: the validated body. Every string leaf in it is untrusted.

    A message has a `role` and a `content` (a text, None, or a list of parts: `{"type": "text", "text": …}`,
    `{"type": "image" | "audio", "media": MediaRef}`), and may have a `name`, `reasoning`, `tool_calls`
    (`{"id", "type", "function": {"name", "arguments"}}`, the arguments as JSON in a string, an object or
    None) and a `tool_call_id`. `gateway/chat_messages.py` makes them so; nothing after it checks types again.
    """

    model: str
    messages: Sequence[Mapping[str, Json]]
    generation: Generation
    delivery: Delivery
    tools: Sequence[Mapping[str, Json]] | None = None
    documents: Sequence[Mapping[str, Json]] | None = None
    chat_template_kwargs: Mapping[str, Json] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: TemplateUse | None = None  # its messages come before `messages`
    context_policy: str | None = None  # None: the gateway's default
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    include_reasoning: bool = True


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Hop 1 of a raw completion: texts, or lists of token ids."""

    model: str
    prompts: Sequence[str | Sequence[int]]
    generation: Generation
    delivery: Delivery
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids. `ids` is int32 little-endian, 4 bytes a token."""

    ids: memoryview
    num_tokens: int
    affinity: int  # hash of the ids up to the first prefix boundary; equal ones prefer the same worker

    @property
    def tokens(self) -> memoryview:
        """The ids as integers, not copied."""
        return self.ids.cast("B").cast("i")


@dataclass(frozen=True, slots=True)
class EngineCall:
    """All that an engine needs for one choice of one prompt."""

    model: str
    prompt: Prompt
    sampling: Mapping[
        str, Json
    ]  # complete: request values over gateway defaults over the model's generation_config
    max_tokens: int
    priority: int = 0
    cache_salt: str | None = None
    fingerprint: str = ""  # of the model that the ids are for (`ModelInfo`); empty: whichever has the name
    # Whether the prompt has ended the reasoning, and what the engine's own reasoning parser must know:
    # else a grammar would constrain the thinking. None: the engine finds out by itself.
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Mapping[str, Json] | None = None
    media: tuple[Medium, ...] = ()  # one for each placeholder in the prompt, in their order by kind

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt.num_tokens

    @property
    def affinity(self) -> int:
        return self.prompt.affinity


@dataclass(frozen=True, slots=True)
class TextCall:
    """All that a server needs for one choice that renders and tokenizes by itself.

    `fields`: of the request's body as the client gave them, without what the way there decides (`n`,
    `stream`, `stream_options`) and without this gateway's own.
    """

    model: str
    target: str  # /v1/chat/completions or /v1/completions
    fields: Mapping[str, Json] = field(repr=False)
    num_prompt_tokens: int  # a guess by the number of characters: weighs in routing and in the queue's bounds
    affinity: int  # hash of the beginning of its text; equal ones prefer the same server
    max_tokens: int  # at most; weighs in routing
    fingerprint: str = ""  # as in `EngineCall`
    prompt_index: int = 0  # which of the request's prompts; choices of one prompt share it


@dataclass(frozen=True, slots=True)
class TextUsage:
    """What a server says that it counted. None: it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What the engine tells with a choice's first token, and a stock vLLM server with the last one.

    Durations in milliseconds, never clocks. None: it does not tell.
    """

    cached_tokens: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    prompt_tokens: int | None = None  # with its media, which are many tokens each; None: as many as were sent


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: the sampled token first, then the k most likely ones, best first."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    rank: int = 0  # of the sampled token; 1 is the most likely


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the engine made them; what a filter withheld still counts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # None: not known
    dropped: Dropped | None = None
    reasoning_tokens: int | None = None  # of the completion tokens; None: not known
    # Of the prompt tokens. A prompt with both kinds has none here: the engine tells the sum alone.
    media_tokens: Mapping[MediaKind, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a gateway knows of a served model, from the workers' hello."""

    name: str
    max_model_len: int
    block_size: int
    default_sampling: Mapping[str, Json]
    fingerprint: str
    scripted: bool = False
    created: int = 0
    reasoning_parser: str | None = None  # of the engine; it must be the gateway's too
    is_text: bool = False  # its server takes and gives text: no ids, no tokenizer here
    media: Mapping[MediaKind, MediaSupport] = field(default_factory=dict)  # what it takes beside text
