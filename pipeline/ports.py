"""The seams, as Protocols: what the pipeline needs from above or beside, and what engines promise.

An `Engine` calls its `Sink` from the event loop, in order, never after `Sink.failed` or a finish, and never
from inside `submit`. Callbacks instead of async iterators, because waking a task costs as much as the whole
token path (2 to 3 us of the 12).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pipeline.errors import HeadraceError
from pipeline.events import Fragment
from pipeline.values import (
    ChatRequest,
    EngineCall,
    FirstToken,
    Json,
    MediaKind,
    MediaSupport,
    ModelInfo,
    TextCall,
    TextUsage,
    TokenLogprobs,
)


class Sink(Protocol):
    """Receives one choice's output from an engine."""

    def tokens(
        self,
        ids: list[int],
        finish: str | None,
        stop: int | str | None,
        first: FirstToken | None,
        logprobs: Sequence[TokenLogprobs] | None,
        now_s: float,
    ) -> None:
        """New ids of this choice.

        `finish` is vLLM's reason (stop, length, abort, error, repetition) on the last call, else None.
        `stop` is the stop token id that ended it, None for the end-of-sequence token. `first` comes once:
        with the first ids, or with the finish from a server that counts at the end. `logprobs` has one entry
        per id when asked for. `now_s` is the monotonic time when the frame was read.
        """

    def failed(self, error: HeadraceError) -> None:
        """The choice ends without a finish."""


class TextSink(Protocol):
    """Receives one choice's output from a server that gives text."""

    def text(self, fragments: Sequence[Fragment], num_tokens: int, now_s: float) -> None:
        """What an event of the server had, split into channels. `num_tokens`: in it, as far as that is known.

        `now_s` is the monotonic time when it was read.
        """

    def ended(self, finish: str, stop: int | str | None, usage: TextUsage, now_s: float) -> None:
        """The choice is complete. `finish` in OpenAI's words, `stop` as in `Sink.tokens`."""

    def failed(self, error: HeadraceError) -> None:
        """The choice ends without a finish."""


class Handle(Protocol):
    """A submitted choice."""

    @property
    def worker(self) -> str:
        """The worker's name, for logs and metrics."""

    def abort(self) -> None:
        """Stop it in the engine; idempotent. The sink is not called again."""


class Engine(Protocol):
    """Something that generates: a pool of linked workers, or an upstream server."""

    def models(self) -> Sequence[ModelInfo]:
        """Models with at least one ready worker."""

    def check_room(self, model: str) -> None:
        """Before any work is done for a request. Raises `UnknownModel`, `NoWorker`, or `QueueFull`."""

    def max_model_len(self, model: str) -> int:
        """The shortest context, in tokens, of the model's ready workers. Raises `NoWorker`."""

    def media(self, model: str) -> Mapping[MediaKind, MediaSupport]:
        """What the model's ready workers take beside text."""

    def submit(self, call: EngineCall, sink: Sink) -> Handle:
        """Hand a call to the best worker.

        Raises `NoWorker` or `QueueFull`. Does not wait: the worker's queue is the queue.
        """

    def submit_text(self, call: TextCall, sink: TextSink) -> Handle:
        """The same for a model whose servers take text (`ModelInfo.is_text`)."""


class OutputParser(Protocol):
    """Splits one choice's text into channels.

    Fed with the smallest units that the tokens allow: what it says cannot depend on how the ids arrived.
    """

    def feed(self, text: str, ids: Sequence[int]) -> Sequence[Fragment]:
        """The next whole characters, and the ids that made them. Special tokens stand in the text."""

    def finish(self) -> Sequence[Fragment]:
        """The text has ended: what was held back."""


class OutputParsers(Protocol):
    """One model's parsers of reasoning and tool calls. Shared by all its requests."""

    @property
    def has_tools(self) -> bool:
        """Whether it reads tool calls."""

    @property
    def has_reasoning(self) -> bool:
        """Whether it reads reasoning."""

    @property
    def problems(self) -> Mapping[str, int]:
        """What could not be read as it should, by its name, since the start; for metrics."""

    def open(self, request: ChatRequest, prompt_ids: Sequence[int]) -> OutputParser:
        """A parser for one choice. With a forced tool choice it reads the reasoning only."""

    def reasoning_ended(self, request: ChatRequest, prompt_ids: Sequence[int]) -> bool | None:
        """Whether the prompt has ended the reasoning already; None without a reasoning parser."""

    def reasoning_parser_kwargs(self, request: ChatRequest) -> Mapping[str, Json] | None:
        """What the engine's reasoning parser must know of the request."""
