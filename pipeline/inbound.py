"""Hops 3 to 6 without I/O: fill a template, validate, scan, render, tokenize, assemble.

    steps = inbound.prepare(request, now_s)       a generator: yields needs, is sent their answers
    Pause | Encode | Compute | Wait | LoadMedia   `pipeline/needs.py`
    Ready                                         its return value

One `Inbound` per model, shared by all requests: what a request needs later is in its generator. No clock:
`done(stage)` is called at the end of each stage, and the caller knows what time it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from filters.hit import Hit
from filters.patterns import Patterns
from pipeline.assembly import GenerationDefaults, assemble
from pipeline.context_policy import Room, fit, room_for
from pipeline.control_characters import ControlPolicy
from pipeline.conversation import PART_SEPARATOR, conversation, with_arguments_read
from pipeline.detokenizer import open_detokenizer
from pipeline.encoding import BYTES_PER_ID, pack_ids
from pipeline.errors import ContextTooLong, InvalidRequest
from pipeline.input_scan import scan_ids, scan_request
from pipeline.leaves import prompt_path
from pipeline.media import check_taken, loaded, media_of, refuse_places
from pipeline.model_text import ModelText
from pipeline.needs import Compute, Pause, Steps, pausing
from pipeline.prompt_templates import PromptTemplate, expanded
from pipeline.rendering import ChatTemplate, Rendered
from pipeline.seen_texts import SeenTexts
from pipeline.tokenizing import Tokenizing, Tokens, TokenStore
from pipeline.validation import InputLimits, Validator
from pipeline.values import ChatRequest, CompletionRequest, Dropped, EngineCall, Medium, ModelInfo, Prompt

# A text is refused by its beginning if that is longer than this for each token that fits, and is too long:
# English and code have 3 to 5 characters a token, Chinese 1 to 2.
_MAX_CHARACTERS_PER_TOKEN: Final = 16
_MAX_CUT_TOKENS: Final = 8  # that the cut itself may have made

# Messages, tool calls and tools of a chat that is rendered at once: 5 to 10 us each.
_MAX_QUICK_PARTS: Final = 500

# What stands around an answer in its place: a template may treat the first and the last turn differently.
_OTHER_TURN: Final = {"role": "user", "content": "x"}

_DECODED_IDS: Final = 2048  # at once, in 1 to 9 ms

Done = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class InputRules:
    """One version of the rules for input, and the memory of what was scanned under it."""

    patterns: Patterns
    seen: SeenTexts | None = None


@dataclass(frozen=True, slots=True)
class InboundOptions:
    """The gateway's settings for requests on their way in."""

    limits: InputLimits = field(default_factory=InputLimits)
    control_characters: ControlPolicy = field(default_factory=ControlPolicy)
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    templates: Mapping[str, PromptTemplate] = field(default_factory=dict)
    context_policy: str = "error"
    raw_control_strings: bool = True  # in prompts of raw completions they mean what they spell
    max_media: int = 16  # of each kind, in one chat
    upstream_fields: frozenset[str] = frozenset()  # of a body that also go to servers of text


@dataclass(frozen=True, slots=True)
class Ready:
    """The calls of all choices, prompt by prompt, what the input rules found, and what had to be left out."""

    calls: list[EngineCall]
    hits: tuple[Hit, ...]
    dropped: Dropped | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """Each prompt once; choices of one prompt share it."""
        return list({id(call.prompt): call.prompt for call in self.calls}.values())


@dataclass(frozen=True, slots=True)
class _Chat:
    """How the versions of one chat are rendered: whole, and with its oldest turns dropped.

    `text`: all of its texts, if they are known. `room`: refuse at once what is far from fitting.
    """

    template: ChatTemplate
    now_s: float
    text: str | None = None
    room: Room | None = None


class Inbound:
    """The way in of one model."""

    def __init__(self, text: ModelText, info: ModelInfo, options: InboundOptions, store: TokenStore) -> None:
        self.info = info
        self._text = text
        self._options = options
        self._validator = Validator(options.limits, options.control_characters)
        self._tokenizing = Tokenizing(text, store)
        takes_parts = text.chat_template is not None and text.chat_template.content_format.takes_parts
        self._part_separator = "" if takes_parts else PART_SEPARATOR

    def prepare(
        self,
        request: ChatRequest | CompletionRequest,
        now_s: float,
        rules: InputRules | None = None,
        done: Done = lambda stage: None,
    ) -> Steps[Ready]:
        """The calls that a request asks for. `now_s`: seconds since 1970, for templates that print a date.

        Raises `ClientError`: `InvalidRequest`, `ContentBlocked` or `ContextTooLong`.
        """
        if isinstance(request, ChatRequest):
            request = self._read(expanded(request, self._options.templates))
            check_taken(media_of(request.messages), self.info, self._options.max_media)
        self._check_token_ids(request)
        checked = self._validator.check(request)
        request = checked.request
        done("validate")
        hits: tuple[Hit, ...] = ()
        if rules is not None:
            request, hits = yield from self._scanned(request, rules)
            done("scan")
        if isinstance(request, CompletionRequest):
            return (yield from self._completion(request, hits, done))
        text = checked.text if request is checked.request else None
        return (yield from self._chat(request, text, now_s, hits, done))

    def check(self, request: ChatRequest) -> None:
        """Raises `ClientError` for texts and media that no prompt may hold, without making one."""
        media = media_of(request.messages)
        check_taken(media, self.info, self._options.max_media)
        if media:
            conversation(request.messages, self._template(request).content_format, knows_developer=True)
        self._validator.check(self._read(request))

    def tokens_of(self, request: ChatRequest, now_s: float) -> Steps[Tokens]:
        """Render and tokenize a chat, no more: for what is known before any request."""
        return (yield from self._tokens(_Chat(self._template(request), now_s), request))

    def learn(
        self, request: ChatRequest, answer: str, now_s: float, rules: InputRules | None = None
    ) -> Steps[None]:
        """Remember what the answer to this request will be in the next turn's prompt: scanned, and tokenized.

        Raises `InvalidRequest` if the template does not take the answer between two short turns, and
        `ContentBlocked`.
        """
        messages = (_OTHER_TURN, {"role": "assistant", "content": answer}, _OTHER_TURN)
        turn = replace(request, messages=messages, template=None, tools=None, documents=None)
        if rules is not None:
            turn, _ = yield from pausing(scan_request(turn, rules.patterns, self._part_separator, rules.seen))
        yield from self._tokenizing.learn(self._template(turn).render(turn, now_s))

    def keep_common(self, first: ChatRequest, second: ChatRequest, now_s: float) -> Steps[int]:
        """Remember for good the segments that two chats share; returns how many tokens those have."""
        renders = [self._template(request).render(request, now_s) for request in (first, second)]
        others = frozenset(renders[1].segments)
        common = Rendered("", [segment for segment in renders[0].segments if segment in others])
        return (yield from self._tokenizing.tokens(common, pin=True)).num_tokens

    def _read(self, request: ChatRequest) -> ChatRequest:
        """The request with its tool arguments as the template sees them, so that escapes hide nothing."""
        template = self._text.template_for(request.tools)
        if template is None or template.arguments_as_text:
            return request
        messages = with_arguments_read(request.messages)
        return request if messages is request.messages else replace(request, messages=messages)

    def _scanned(
        self, request: ChatRequest | CompletionRequest, rules: InputRules
    ) -> Steps[tuple[ChatRequest | CompletionRequest, tuple[Hit, ...]]]:
        hits: tuple[Hit, ...] = ()
        if isinstance(request, CompletionRequest):
            for index, prompt in enumerate(request.prompts):
                if not isinstance(prompt, str):
                    path = prompt_path(request, index)
                    self._check_range(prompt, path)
                    text = yield from self._decoded(prompt)
                    hits += yield from pausing(scan_ids(text, rules.patterns, path, rules.seen))
        scan = scan_request(request, rules.patterns, self._part_separator, rules.seen)
        request, more_hits = yield from pausing(scan)
        return request, hits + more_hits

    def _decoded(self, ids: Sequence[int]) -> Steps[str]:
        """What `Tokenizer.decode` gives, which takes 0.4 s for a million ids, and holds the GIL."""
        detokenizer = open_detokenizer(self._text.vocabulary, skip_special_tokens=False)
        texts = []
        for start in range(0, len(ids), _DECODED_IDS):
            texts.append(detokenizer.feed(list(ids[start : start + _DECODED_IDS])))
            yield Pause()
        return "".join([*texts, detokenizer.flush()])

    # -- chats ---------------------------------------------------------------------------------------------

    def _chat(
        self, request: ChatRequest, text: str | None, now_s: float, hits: tuple[Hit, ...], done: Done
    ) -> Steps[Ready]:
        defaults = self._options.defaults
        policy = request.context_policy or self._options.context_policy
        room = room_for(request.generation, policy, defaults.max_tokens, self.info.max_model_len)
        chat = _Chat(self._template(request), now_s, text, room if policy == "error" else None)
        tokens = yield from self._tokens(chat, request, done)
        done("tokenize")
        dropped = None
        if tokens.num_tokens > room.num_tokens:
            fitted = yield from fit(request, policy, tokens.num_tokens, room, partial(self._count, chat))
            tokens = yield from self._tokens(chat, fitted.request)
            request, dropped = fitted.request, fitted.dropped
            done("fit")
        media: tuple[Medium, ...] = ()
        if self.info.media:  # before a buffer is taken: loading takes seconds
            media = yield from loaded(request.messages, tokens.ids, self.info)
            if media:
                done("media")
        ids = yield from self._tokenizing.in_buffer(tokens)
        calls = assemble(request, [ids], self.info, defaults, media)
        done("assemble")
        return Ready(calls, hits, dropped)

    def _template(self, request: ChatRequest) -> ChatTemplate:
        template = self._text.template_for(request.tools)
        if template is None:
            raise InvalidRequest(
                f"The model {self.info.name} has no chat template; use /v1/completions.", "messages"
            )
        return template

    def _count(self, chat: _Chat, request: ChatRequest) -> Steps[int]:
        return (yield from self._tokens(chat, request)).num_tokens

    def _tokens(self, chat: _Chat, request: ChatRequest, done: Done = lambda stage: None) -> Steps[Tokens]:
        render = partial(chat.template.render, request, chat.now_s, chat.text)
        rendered: Rendered = (yield Compute(render)) if _is_long(request) else render()
        done("render")
        if chat.room is not None:
            yield from self._refuse_hopeless(rendered, chat.room)
        # A control string without a mark is the user's, also one that was put together on the way.
        return (yield from self._tokenizing.tokens(rendered))

    def _refuse_hopeless(self, rendered: Rendered, room: Room) -> Steps[None]:
        """Raises `ContextTooLong` if the beginning alone is too long: a text of megabytes is not encoded."""
        max_characters = _MAX_CHARACTERS_PER_TOKEN * max(1, room.num_tokens)  # an answer may leave no room
        if rendered.num_characters <= 2 * max_characters:
            return
        ids = yield from self._tokenizing.raw([rendered.text[:max_characters]], add_special_tokens=False)
        least = max(1, len(ids[0]) // BYTES_PER_ID - _MAX_CUT_TOKENS)
        if least > room.num_tokens:
            raise ContextTooLong(least, room.max_tokens, room.max_model_len, is_least=True)

    # -- raw completions -----------------------------------------------------------------------------------

    def _completion(self, request: CompletionRequest, hits: tuple[Hit, ...], done: Done) -> Steps[Ready]:
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        means_controls = self._options.raw_control_strings
        encoded = iter(
            (yield from self._tokenizing.raw(texts, request.add_special_tokens, means_controls))
            if texts
            else ()
        )
        ids = [
            next(encoded) if isinstance(prompt, str) else self._checked(request, index)
            for index, prompt in enumerate(request.prompts)
        ]
        done("tokenize")
        for index, packed in enumerate(ids):
            refuse_places(packed, prompt_path(request, index), self.info)
        prompts = yield from self._tokenizing.whole_in_buffers(ids)
        calls = assemble(request, prompts, self.info, self._options.defaults)
        done("assemble")
        return Ready(calls, hits)

    def _checked(self, request: CompletionRequest, index: int) -> bytes:
        """A prompt of ids, packed."""
        ids = request.prompts[index]
        assert not isinstance(ids, str)
        self._check_range(ids, prompt_path(request, index))
        return pack_ids(ids)

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


def _is_long(request: ChatRequest) -> bool:
    """Whether rendering may hold the event loop for more than a few milliseconds."""
    num_calls = sum(len(message["tool_calls"]) for message in request.messages if "tool_calls" in message)
    return len(request.messages) + num_calls + len(request.tools or ()) > _MAX_QUICK_PARTS
