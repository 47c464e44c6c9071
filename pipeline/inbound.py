"""Hops 3 to 6 without I/O: validate, scan, render, encode, assemble.

    start(request, now_s) -> Ready                   everything was short enough to do at once
                          -> Encode ... resume -> Ready    the caller encodes elsewhere, off the event loop

One `Inbound` per model, shared by all requests: what a request needs later is in its `Encode`. No clock:
`done(stage)` is called at the end of each stage, and the caller knows what time it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from filters.hit import Hit
from filters.patterns import Patterns
from pipeline.assembly import GenerationDefaults, assemble
from pipeline.conversation import PART_SEPARATOR
from pipeline.encoding import MAX_INLINE_CHARACTERS, Encoder, pack_ids
from pipeline.errors import InvalidRequest
from pipeline.input_scan import scan_ids, scan_request
from pipeline.leaves import prompt_path
from pipeline.model_text import ModelText
from pipeline.token_buffer import TokenBuffer
from pipeline.validation import ControlPolicy, InputLimits, Validator
from pipeline.values import ChatRequest, CompletionRequest, EngineCall, ModelInfo, Prompt


@dataclass(frozen=True, slots=True)
class InboundOptions:
    """The gateway's settings for requests on their way in. `rules`: those for input; None is no rules."""

    limits: InputLimits = field(default_factory=InputLimits)
    control_characters: ControlPolicy = field(default_factory=ControlPolicy)
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    rules: Patterns | None = None


@dataclass(frozen=True, slots=True)
class Encode:
    """A need: these texts are too long to encode on the event loop. `run` does it, in any thread."""

    texts: tuple[str, ...]
    add_special_tokens: bool
    encoder: Encoder
    request: ChatRequest | CompletionRequest
    hits: tuple[Hit, ...]

    def run(self) -> list[bytes]:
        """The packed ids of each text, for `Inbound.resume`."""
        return self.encoder.encode_batch(self.texts, self.add_special_tokens)


@dataclass(frozen=True, slots=True)
class Ready:
    """The calls of all choices, prompt by prompt, and what the input rules found."""

    calls: list[EngineCall]
    hits: tuple[Hit, ...]

    @property
    def prompts(self) -> list[Prompt]:
        """Each prompt once; choices of one prompt share it."""
        return list({id(call.prompt): call.prompt for call in self.calls}.values())


Done = Callable[[str], None]


class Inbound:
    """The way in of one model. Its stages: validate, scan, render, tokenize, assemble."""

    def __init__(self, text: ModelText, info: ModelInfo, options: InboundOptions) -> None:
        self._text = text
        self._info = info
        self._validator = Validator(options.limits, options.control_characters)
        self._rules = options.rules
        self._defaults = options.defaults
        template = text.chat_template
        takes_parts = template is not None and template.content_format.takes_parts
        self._part_separator = "" if takes_parts else PART_SEPARATOR

    def start(
        self, request: ChatRequest | CompletionRequest, now_s: float, done: Done = lambda stage: None
    ) -> Encode | Ready:
        """Do all that is quick. `now_s`: seconds since 1970, for templates that print a date.

        Raises `ClientError`: `InvalidRequest`, `ContentBlocked` or `ContextTooLong`.
        """
        self._check_token_ids(request)
        request = self._validator.check(request)
        done("validate")
        hits: tuple[Hit, ...] = ()
        if self._rules is not None:
            hits = self._hits_of_ids(request, self._rules)
            request, more_hits = scan_request(request, self._rules, self._part_separator)
            hits += more_hits
            done("scan")
        texts, add_special_tokens = self._texts(request, now_s)
        done("render")
        need = Encode(texts, add_special_tokens, self._text.encoder, request, hits)
        if sum(map(len, texts)) > MAX_INLINE_CHARACTERS:
            return need
        encode = self._text.encoder.encode
        return self.resume(need, [encode(text, add_special_tokens) for text in texts], done)

    def resume(self, need: Encode, encoded: Sequence[bytes], done: Done = lambda stage: None) -> Ready:
        """Go on with the ids of `need.texts`. Raises `ClientError`."""
        done("tokenize")
        request = need.request
        if isinstance(request, ChatRequest):
            prompts = [_buffer(ids) for ids in encoded]
        else:
            pieces = iter(encoded)
            prompts = [
                _buffer(next(pieces) if isinstance(prompt, str) else self._checked(request, index))
                for index, prompt in enumerate(request.prompts)
            ]
        calls = assemble(request, prompts, self._info, self._defaults)
        done("assemble")
        return Ready(calls, need.hits)

    def _texts(self, request: ChatRequest | CompletionRequest, now_s: float) -> tuple[tuple[str, ...], bool]:
        """What to encode, and whether the tokenizer adds special tokens (a template has put its own)."""
        if isinstance(request, CompletionRequest):
            texts = tuple(prompt for prompt in request.prompts if isinstance(prompt, str))
            return texts, request.add_special_tokens
        template = self._text.chat_template
        if template is None:
            raise InvalidRequest(
                f"The model {self._info.name} has no chat template; use /v1/completions.", "messages"
            )
        return (template.render(request, now_s),), False

    def _checked(self, request: CompletionRequest, index: int) -> bytes:
        """A prompt of ids, packed."""
        ids = request.prompts[index]
        assert not isinstance(ids, str)
        self._check_range(ids, prompt_path(request, index))
        return pack_ids(ids)

    def _hits_of_ids(self, request: ChatRequest | CompletionRequest, rules: Patterns) -> tuple[Hit, ...]:
        """What the rules find in prompts that came as token ids."""
        hits: tuple[Hit, ...] = ()
        if isinstance(request, CompletionRequest):
            for index, prompt in enumerate(request.prompts):
                if not isinstance(prompt, str):
                    path = prompt_path(request, index)
                    self._check_range(prompt, path)
                    text = self._text.tokenizer.decode(list(prompt), skip_special_tokens=False)
                    hits += scan_ids(text, rules, path)
        return hits

    def _check_token_ids(self, request: ChatRequest | CompletionRequest) -> None:
        """Ids beyond the vocabulary would fail in the engine, too late for a 400."""
        sampling = request.generation.sampling
        self._check_range(sampling.get("allowed_token_ids") or (), "allowed_token_ids")
        self._check_range([int(token_id) for token_id in sampling.get("logit_bias") or ()], "logit_bias")

    def _check_range(self, ids: Sequence[int], path: str) -> None:
        num_ids = len(self._text.vocabulary)
        if ids and not (min(ids) >= 0 and max(ids) < num_ids):
            wrong = next(token_id for token_id in ids if not 0 <= token_id < num_ids)
            raise InvalidRequest(
                f"{path} holds the token id {wrong}; this model's ids go from 0 to {num_ids - 1}.", path
            )


def _buffer(ids: bytes) -> memoryview:
    buffer = TokenBuffer()
    buffer.append(ids)
    return buffer.view()
