"""Hops 3 and 6 for a model whose server renders and tokenizes by itself: validate, scan, and a body for it.

The same surface as `inbound.py`, as far as text goes: no template, no ids, no context policy, for nothing
here can count tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

from filters.hit import Hit
from pipeline.errors import InvalidRequest
from pipeline.inbound import Done, InboundOptions, InputRules
from pipeline.input_scan import scan_request
from pipeline.leaves import prompt_path
from pipeline.media import media_of
from pipeline.media_errors import TooManyMedia
from pipeline.needs import LoadMedia, Steps, pausing
from pipeline.prompt_templates import expanded
from pipeline.text_fields import WITH_TEXT, chat_fields, completion_fields, steering_fields
from pipeline.validation import Validator
from pipeline.values import (
    ChatRequest,
    CompletionRequest,
    Delivery,
    Generation,
    Json,
    Medium,
    ModelInfo,
    TextCall,
)

CHAT_TARGET: Final = "/v1/chat/completions"
COMPLETION_TARGET: Final = "/v1/completions"
_CHARACTERS_PER_TOKEN: Final = 4  # English and code; it only weighs prompts against each other
_AFFINITY_CHARS: Final = 1024  # some 256 tokens: the system prompt and what follows it
_AFFINITY_TEXTS: Final = 16  # that they are looked for in
_AFFINITY_IDS: Final = 256
_AFFINITY_BYTES: Final = 8
_PART_SEPARATOR: Final = ""  # servers join parts in several ways: a word that was cut is found when joined


@dataclass(frozen=True, slots=True)
class TextReady:
    """The calls of all choices, prompt by prompt, and what the input rules found."""

    calls: list[TextCall]
    hits: tuple[Hit, ...]


class TextInbound:
    """The way in of one model."""

    def __init__(self, info: ModelInfo, options: InboundOptions) -> None:
        self.info = info
        self._options = options
        self._validator = Validator(options.limits, options.control_characters)

    def prepare(
        self,
        request: ChatRequest | CompletionRequest,
        source: Mapping[str, Json] | None = None,
        rules: InputRules | None = None,
        done: Done = lambda stage: None,
    ) -> Steps[TextReady]:
        """The calls that a request asks for. `source`: the client's body, decoded, where there is one.

        Raises `ClientError`: `InvalidRequest` or `ContentBlocked`.
        """
        self._refuse(request, rules)
        steering = steering_fields(request.generation, source, self._options.upstream_fields)
        if isinstance(request, ChatRequest):
            request = expanded(request, self._options.templates)
            self._check_media(request)
        request = self._validator.check(request).request
        done("validate")
        hits: tuple[Hit, ...] = ()
        if rules is not None:
            scan = scan_request(request, rules.patterns, _PART_SEPARATOR, rules.seen)
            request, hits = yield from pausing(scan)
            steering, more_hits = yield from self._scanned(steering, rules)
            hits += more_hits
            done("scan")
        if isinstance(request, CompletionRequest):
            bodies = [completion_fields(request, index) for index in range(len(request.prompts))]
        else:
            media: tuple[Medium, ...] = ()
            if refs := media_of(request.messages):
                media = yield LoadMedia(refs)
                done("media")
            bodies = [chat_fields(request, source, media)]
        calls = [
            call
            for index, body in enumerate(bodies)
            for call in self._choices(request, index, steering | body)
        ]
        done("assemble")
        return TextReady(calls, hits)

    def check(self, request: ChatRequest) -> None:
        """Raises `ClientError` for texts and media that no prompt may hold, without making one."""
        self._check_media(request)
        self._validator.check(request)

    def _refuse(self, request: ChatRequest | CompletionRequest, rules: InputRules | None) -> None:
        """Raises `InvalidRequest` for what needs token ids."""
        whose = f"The server of the model {self.info.name} gives text, not tokens"
        if request.generation.logprobs is not None:
            raise InvalidRequest(f"{whose}: 'logprobs' is not supported.", "logprobs", "unsupported_field")
        if isinstance(request, ChatRequest):
            policy = request.context_policy
            if policy is not None and policy != "error":
                raise InvalidRequest(
                    f"{whose}: 'context_policy' can only be 'error', got {policy!r}.",
                    "context_policy",
                    "unsupported_field",
                )
        elif rules is not None:
            for index, prompt in enumerate(request.prompts):
                if not isinstance(prompt, str):
                    path = prompt_path(request, index)
                    raise InvalidRequest(
                        f"{whose}: content rules cannot read '{path}', which is {len(prompt)} token ids.",
                        path,
                    )

    def _scanned(
        self, steering: dict[str, Json], rules: InputRules
    ) -> Steps[tuple[dict[str, Json], tuple[Hit, ...]]]:
        """The fields that a server may write into the prompt, as it may see them."""
        names = {*WITH_TEXT, *self._options.upstream_fields}
        texts = {name: value for name, value in steering.items() if name in names}
        if not texts:
            return steering, ()
        # As if they were variables of a template: a scan knows where a request's texts are.
        carrier = ChatRequest("", (), Generation({}), Delivery(), chat_template_kwargs=texts)
        scan = scan_request(carrier, rules.patterns, _PART_SEPARATOR, rules.seen)
        scanned, hits = yield from pausing(scan)
        return steering | dict(scanned.chat_template_kwargs), hits

    def _check_media(self, request: ChatRequest) -> None:
        """Which media the model takes is known to its server alone."""
        refs = media_of(request.messages)
        for kind in dict.fromkeys(ref.kind for ref in refs):
            num = sum(ref.kind == kind for ref in refs)
            if num > self._options.max_media:
                raise TooManyMedia(kind, num, self._options.max_media)

    def _choices(
        self, request: ChatRequest | CompletionRequest, index: int, body: dict[str, Json]
    ) -> Iterator[TextCall]:
        generation = request.generation
        is_chat = isinstance(request, ChatRequest)
        num_characters, affinity = _measure(request, index)
        call = TextCall(
            model=self.info.name,
            target=CHAT_TARGET if is_chat else COMPLETION_TARGET,
            fields=body,
            num_prompt_tokens=num_characters // _CHARACTERS_PER_TOKEN,
            affinity=affinity,
            max_tokens=generation.max_tokens or self._options.defaults.max_tokens,
            fingerprint=self.info.fingerprint,
            prompt_index=index,
        )
        seed = generation.sampling.get("seed")
        for choice in range(generation.n):
            yield call if not choice or seed is None else replace(call, fields=body | {"seed": seed + choice})


def _measure(request: ChatRequest | CompletionRequest, index: int) -> tuple[int, int]:
    """How many characters a prompt has, and a hash of its beginning."""
    if isinstance(request, ChatRequest):
        texts = [text for message in request.messages for text in _texts(message)]
        return sum(map(len, texts)), _hash("\0".join(texts[:_AFFINITY_TEXTS])[:_AFFINITY_CHARS])
    prompt = request.prompts[index]
    if isinstance(prompt, str):
        return len(prompt), _hash(prompt[:_AFFINITY_CHARS])
    return _CHARACTERS_PER_TOKEN * len(prompt), _hash(str(prompt[:_AFFINITY_IDS]))


def _texts(message: Mapping[str, Json]) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif content:
        yield from (part["text"] for part in content if part.get("type") == "text")


def _hash(text: str) -> int:
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_AFFINITY_BYTES).digest()
    return int.from_bytes(digest, "little")
