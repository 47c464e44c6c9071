"""Tokenizers with the tokens that vLLM's parsers ask for, and an answer's units as a gateway feeds them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import pytest
from tokenizers import AddedToken, Tokenizer

from backend import parser_vllm
from backend.output_parsers import VllmOutputParsers, load_output_parsers
from backend.parser_tokenizer import parser_tokenizer
from pipeline.detokenizer import open_detokenizer
from pipeline.model_text import TOKENIZER
from pipeline.vocabulary import Vocabulary
from tests.pipeline.small_tokenizers import all_tokenizers
from tests.tokenizers import files_of, tokenizer_folder

# Model: (its tokenizer, one of `tests.components.TOKENIZERS` or small; tokens that are added)
_MODELS: Final[Mapping[str, tuple[str, Sequence[str]]]] = {
    "qwen3": ("qwen3", ()),
    "llama3": ("llama3_1", ()),
    "gemma3": ("gemma3", ()),
    "fallback": ("byte fallback", ()),
    "deepseek": ("deepseek_v3", ()),
    "thinking_deepseek": ("byte level", ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")),  # and <think>
    "hermes": ("byte level", ("<tool_call>", "</tool_call>")),
    "llama4": ("byte level", ("<|python_tag|>", "<|python_start|>", "<|python_end|>")),
    "mistral": ("byte level", ("[TOOL_CALLS]", "[ARGS]")),
    "thinking_mistral": ("byte level", ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")),
    "old_mistral": ("byte level", ("[TOOL_CALLS]",)),
    "composed": ("byte level", ("<tool_calls>", "</tool_calls>")),
}


@cache
def tokenizer(model: str) -> Tokenizer:
    name, added = _MODELS[model]
    small = all_tokenizers()
    if name in small:
        made = Tokenizer.from_str(small[name].to_str())
    else:
        made = Tokenizer.from_buffer(files_of(tokenizer_folder(name))[TOKENIZER])
    made.add_special_tokens([AddedToken(token, normalized=False) for token in added])
    return made


@cache
def vocabulary(model: str) -> Vocabulary:
    return Vocabulary(tokenizer(model))


@cache
def files(model: str) -> Mapping[str, bytes]:
    name, added = _MODELS[model]
    if added or name in all_tokenizers():
        return {TOKENIZER: tokenizer(model).to_str().encode()}
    return files_of(tokenizer_folder(name))


@cache
def _parser_tokenizer(model: str) -> Any:
    return parser_tokenizer(files(model))


@cache
def parsers(model: str, tool_parser: str | None, reasoning_parser: str | None = None) -> VllmOutputParsers:
    """Loaded once; all with one tokenizer share it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(parser_vllm, "parser_tokenizer", lambda _: _parser_tokenizer(model))
        return load_output_parsers(tool_parser, reasoning_parser, files(model), model)


def encode(model: str, text: str) -> list[int]:
    return list(tokenizer(model).encode(text, add_special_tokens=False).ids)


def units(model: str, chunks: Sequence[Sequence[int]]) -> Iterator[tuple[str, list[int]]]:
    """Ids in chunks -> whole characters with the ids that made them, as `OutputParser.feed` is called."""
    detokenizer = open_detokenizer(vocabulary(model), skip_special_tokens=False)
    waiting: list[int] = []
    for token_id in (token_id for chunk in chunks for token_id in chunk):
        waiting.append(token_id)
        if text := detokenizer.feed([token_id]):
            yield text, waiting
            waiting = []
    if text := detokenizer.flush():
        yield text, waiting
