"""The models that this gateway serves, each with its way in, built when its first worker is connected.

Not here: which worker serves a model (`backend/pool.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from backend.catalog import MisfitError
from gateway.answer_logprobs import TokenTexts
from gateway.metrics import Metrics
from gateway.needs import NeedServer
from gateway.prompt_settings import WarmPrompt, warm_requests
from pipeline.encoding import BYTES_PER_ID
from pipeline.errors import HeadraceError, InvalidRequest, NoWorker, UnknownModel
from pipeline.inbound import Inbound, InboundOptions
from pipeline.model_text import ModelText
from pipeline.ports import OutputParsers
from pipeline.prompt_templates import beginnings, paired_requests
from pipeline.text_inbound import TextInbound
from pipeline.tokenizing import TokenStore
from pipeline.values import MediaKind, MediaSupport, ModelInfo

LoadParsers = Callable[[ModelInfo, Mapping[str, bytes]], OutputParsers | None]

logger = logging.getLogger("headrace.models")


class ParserError(MisfitError):
    """A parser of reasoning or tool calls is not there, or does not suit the model; the message says why."""


@dataclass(frozen=True, slots=True)
class Model:
    """One served model: what its workers say of it, its text side, and the way in of its requests."""

    info: ModelInfo
    text: ModelText
    inbound: Inbound
    parsers: OutputParsers | None = None  # of reasoning and tool calls

    @property
    def vocabulary(self) -> TokenTexts:
        """The texts of its tokens, for logprobs."""
        return self.text.vocabulary


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model whose servers render, tokenize and parse by themselves."""

    info: ModelInfo
    inbound: TextInbound

    @property
    def vocabulary(self) -> TokenTexts:
        return _NoTokens()


class _NoTokens:
    """Of a model whose tokens nobody here knows: requests for their logprobs are refused."""

    def token_text(self, token_id: int, /) -> str:
        raise AssertionError("a model without tokens has no logprobs")

    def token_bytes(self, token_id: int, /) -> bytes:
        raise AssertionError("a model without tokens has no logprobs")


AnyModel = Model | TextModel


class Models:
    """Model name -> how requests for it are made.

    A model stays known when its last worker has gone: that is 503, not 404. `chat_template` replaces the
    models' own. `load_parsers`: called in a thread; raises `ValueError` for what does not fit the model.
    """

    def __init__(
        self,
        options: InboundOptions,
        store: TokenStore,
        needs: NeedServer,
        pool: Executor,
        chat_template: str | None = None,
        load_parsers: LoadParsers = lambda info, files: None,
    ) -> None:
        self._options = options
        self._store = store
        self._needs = needs
        self._pool = pool
        self._chat_template = chat_template
        self._load_parsers = load_parsers
        self._models: dict[str, AnyModel] = {}
        self._num_problems: dict[tuple[str, str], int] = {}  # that the metrics have

    def publish(self, metrics: Metrics) -> None:
        """Bring the counters of what parsers could not do up to date."""
        for model in self._id_models():
            problems = {} if model.parsers is None else model.parsers.problems
            for problem, count in problems.items():
                key = model.info.name, problem
                metrics.parser_problems.labels(*key).inc(max(0, count - self._num_problems.get(key, 0)))
                self._num_problems[key] = count

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._models)

    async def load(self, info: ModelInfo, files: Mapping[str, bytes]) -> None:
        """Build a model's text side off the event loop: a large tokenizer takes seconds.

        Raises `ParserError`, and `ValueError` for a broken file.
        """
        if info.is_text:
            self._models[info.name] = TextModel(info, TextInbound(info, self._options))
            return
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._pool, ModelText.from_files, files, self._chat_template)
        try:
            parsers = await loop.run_in_executor(self._pool, self._load_parsers, info, files)
        except ValueError as error:
            raise ParserError(f"The model {info.name!r}: {error}") from error
        model = Model(info, text, Inbound(text, info, self._options, self._store), parsers)
        _tell(model)
        await self._keep_static(model)
        before = self._models.get(info.name)
        self._models[info.name] = model
        if isinstance(before, Model):
            self._forget(before.text.fingerprint)

    def _id_models(self) -> list[Model]:
        return [model for model in self._models.values() if isinstance(model, Model)]

    def _forget(self, fingerprint: str) -> None:
        """The segments of a model that nobody serves any more, also those that are kept for good."""
        if all(model.text.fingerprint != fingerprint for model in self._id_models()):
            self._store.cache.forget(fingerprint)

    async def _keep_static(self, model: Model) -> None:
        """Tokenize what prompt templates have in common with every request that uses them."""
        for name, template in self._options.templates.items():
            first, second = paired_requests(beginnings(template, {}), model.info.name)
            try:
                num_tokens = await self._needs.serve(model.inbound.keep_common(first, second, time.time()))
            except HeadraceError as error:
                logger.warning("template %r does not suit the model %s: %s", name, model.info.name, error)
            else:
                logger.info("template %r: %d static tokens with %s", name, num_tokens, model.info.name)

    async def prefix_ids(self, name: str, warm: WarmPrompt) -> bytes:
        """The packed ids that all prompts of a model share that begin with a warm prompt.

        Raises what rendering raises.
        """
        model = self.get(name)
        if isinstance(model, TextModel):
            raise InvalidRequest(f"The server of the model {name} takes text; it cannot be warmed from here.")
        inbound = model.inbound
        first, second = [
            (await self._needs.serve(inbound.tokens_of(request, time.time()))).ids
            for request in warm_requests(warm, self._options.templates, name)
        ]
        return _common_beginning(first, second)

    def get(self, name: str) -> AnyModel:
        """Raises `UnknownModel`, or `NoWorker` while no worker has connected yet."""
        model = self._models.get(name)
        if model is None:
            if not self._models:
                raise NoWorker("No worker has connected yet.")
            raise UnknownModel(name, self.names)
        return model

    def within(self, model: Model, max_model_len: int, media: Mapping[MediaKind, MediaSupport]) -> Model:
        """The model with the context length and the media that its workers have now."""
        if model.info.max_model_len == max_model_len and model.info.media == media:
            return model
        info = replace(model.info, max_model_len=max_model_len, media=media)
        inbound = Inbound(model.text, info, self._options, self._store)
        model = self._models[info.name] = replace(model, info=info, inbound=inbound)
        return model


def _common_beginning(first: bytes, second: bytes) -> bytes:
    """The packed ids that both begin with, found by halving: 100,000 ids take microseconds."""
    shared, limit = 0, min(len(first), len(second)) // BYTES_PER_ID
    while shared < limit:
        middle = (shared + limit + 1) // 2
        if first[: middle * BYTES_PER_ID] == second[: middle * BYTES_PER_ID]:
            shared = middle
        else:
            limit = middle - 1
    return first[: shared * BYTES_PER_ID]


def _tell(model: Model) -> None:
    """What an operator should know of a model's template and tokenizer."""
    text, name = model.text, model.info.name
    if text.chat_template is None:
        logger.info("%s has no chat template: raw completions only", name)
        return
    if not text.is_segmentable:
        logger.warning("the tokenizer of %s is not exact in segments: no token cache for its prompts", name)
    if not text.chat_template.follows_marks:
        logger.warning(
            "the chat template of %s takes its own control strings apart: it does not see those in messages",
            name,
        )
