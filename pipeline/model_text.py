"""All that text work needs of a model, from the bytes of its files. Nothing is read from disk here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer
from tokenizers import __version__ as tokenizers_version

from pipeline.control_dropper import ControlAutomaton
from pipeline.controls import control_strings
from pipeline.encoding import Encoder
from pipeline.rendering import ChatTemplate, template_literals
from pipeline.template_probe import examine, is_segmentable
from pipeline.vocabulary import Vocabulary

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS_MAP: Final = "special_tokens_map.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
GENERATION_CONFIG: Final = "generation_config.json"
CONFIG: Final = "config.json"
FILES: Final = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, CHAT_TEMPLATE, GENERATION_CONFIG, CONFIG)

# The named tokens that templates get as variables (Hugging Face's `SPECIAL_TOKENS_ATTRIBUTES`).
_NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True)
class ModelText:
    """One model's text side, shared by all its requests."""

    tokenizer: Tokenizer
    encoder: Encoder
    controls: ControlAutomaton  # what is dropped from all that users see
    vocabulary: Vocabulary
    chat_template: ChatTemplate | None  # None: the model takes raw prompts only
    tool_template: ChatTemplate | None  # the model's own for requests with tools, if it has one
    is_segmentable: bool  # the ids of a rendered chat are those of its segments, so they can be kept
    fingerprint: str  # of all that decides which ids a segment has
    eos_ids: frozenset[int]

    def template_for(self, tools: object) -> ChatTemplate | None:
        """The chat template for a request with these tools, or none."""
        return self.tool_template if tools and self.tool_template is not None else self.chat_template

    @property
    def special_ids(self) -> frozenset[int]:
        return self.vocabulary.special_ids

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], chat_template: str | None = None) -> ModelText:
        """Build it from file name -> bytes (`FILES`; only tokenizer.json must be there).

        `chat_template` replaces the model's own. Takes 0.5 to 2 s for a large vocabulary. Raises `ValueError`
        naming the file that is missing or broken.
        """
        if TOKENIZER not in files:
            raise ValueError(
                f"the model has no {TOKENIZER}; there are {', '.join(sorted(files)) or 'no files'}"
            )
        config = _load(files, TOKENIZER_CONFIG)
        special_tokens = named_tokens(_load(files, SPECIAL_TOKENS_MAP) | config)
        tokenizer = _tokenizer(files[TOKENIZER], config)
        sources = {"default": chat_template} if chat_template else _template_sources(files, config)
        literals = [literal for source in sources.values() for literal in template_literals(source)]
        controls = control_strings(tokenizer, literals)
        encoder = Encoder(tokenizer, controls)
        templates = {name: ChatTemplate(source, special_tokens, controls) for name, source in sources.items()}
        for template in templates.values():
            examine(template)
        return cls(
            tokenizer=tokenizer,
            encoder=encoder,
            controls=ControlAutomaton(controls),
            vocabulary=Vocabulary(tokenizer, controls.id_set),
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
            is_segmentable=all(is_segmentable(template, encoder) for template in templates.values()),
            fingerprint=_fingerprint(files[TOKENIZER], config, controls.ids),
            eos_ids=_eos_ids(files, tokenizer, special_tokens),
        )


def _load(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, not {type(value).__name__}")
    return value


def _tokenizer(data: bytes, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer as Hugging Face's `PreTrainedTokenizerFast` sets it up."""
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{TOKENIZER} is broken: {error}") from error
    # A file may ask to cut or pad texts, which is for training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    declared = config.get("added_tokens_decoder", {})
    missing = [
        _added_token(declared[token_id])
        for token_id in sorted(declared, key=int)
        if tokenizer.token_to_id(declared[token_id]["content"]) is None
    ]
    if missing:
        tokenizer.add_tokens(missing)
    return tokenizer


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(entry["content"], **{flag: bool(entry[flag]) for flag in flags if flag in entry})


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the named tokens; in the files each is a string or an object with `content`."""
    tokens = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _template_sources(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """The file of its own, else the ones in the configuration, by name."""
    if CHAT_TEMPLATE in files:
        try:
            return {"default": files[CHAT_TEMPLATE].decode()}
        except UnicodeDecodeError as error:
            raise ValueError(f"{CHAT_TEMPLATE} is not UTF-8: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        return {name: named[name] for name in ("default", "tool_use") if name in named}
    if source is not None and not isinstance(source, str):
        raise ValueError(f"chat_template in {TOKENIZER_CONFIG} must be a string, not {type(source).__name__}")
    return {} if source is None else {"default": source}


def _fingerprint(tokenizer: bytes, config: Mapping[str, Any], controls: Mapping[str, int]) -> str:
    """Equal ids for equal segments: tokenizer, tokens added to it, control strings, and who encodes.

    Others with the same fingerprint may run another version of `tokenizers`.
    """
    digest = blake2b(tokenizer, digest_size=16)
    others = [config.get("added_tokens_decoder"), sorted(controls.items()), tokenizers_version]
    digest.update(json.dumps(others).encode())
    return digest.hexdigest()


def _eos_ids(
    files: Mapping[str, bytes], tokenizer: Tokenizer, special_tokens: Mapping[str, str]
) -> frozenset[int]:
    """Where the model ends its answer: of generation_config.json, else config.json, else the tokenizer's."""
    for name in (GENERATION_CONFIG, CONFIG):
        ids = _load(files, name).get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    token_id = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    return frozenset() if token_id is None else frozenset([token_id])
