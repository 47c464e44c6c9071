"""Small models of many kinds: each chat template with a tokenizer that has its control tokens.

A model is built as the gateway builds it, from files, and comes with its reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from pipeline.model_text import ModelText
from tests.pipeline import chat_templates, family_templates, small_tokenizers
from tests.pipeline.conversations import Family, Message
from tests.pipeline.real_models import Model
from tests.pipeline.reference import Reference

_CHATML: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PARSED_THINK: Final = (
    ("'</think>' in content", "</think>"),
    ("content.split('</think>')", "</think>"),
)


def _joined(message: Mapping[str, Any]) -> Message:
    """What a template that takes strings is given."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    prepared = {**message, "content": content or ""}
    if "tool_calls" in prepared:
        prepared["tool_calls"] = _with_objects(prepared["tool_calls"])
    return prepared


def _in_parts(message: Mapping[str, Any]) -> Message:
    """What a template that takes strings and parts is given."""
    prepared = _joined(message)
    return (
        {**prepared, "content": message["content"]} if isinstance(message.get("content"), list) else prepared
    )


def _with_objects(calls: list[Any]) -> list[Any]:
    calls = json.loads(json.dumps(calls))
    for call in calls:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return calls


def _tokens(*contents: str, **flags: bool) -> list[AddedToken]:
    defaults = {"special": True, "normalized": False}
    return [AddedToken(content, **{**defaults, **flags}) for content in contents]


def _with_added(base: Tokenizer, added: list[AddedToken]) -> Tokenizer:
    """A copy of the tokenizer with these added tokens instead of its own."""
    config = json.loads(base.to_str())
    config["added_tokens"] = []
    config["post_processor"] = None
    tokenizer = Tokenizer.from_str(json.dumps(config))
    tokenizer.add_tokens(added)
    return tokenizer


def _byte_level(added: list[AddedToken]) -> Tokenizer:
    return _with_added(small_tokenizers.byte_level(), added)


def _sentence_piece(added: list[AddedToken]) -> Tokenizer:
    """A dummy space in front of every text between added tokens."""
    return _with_added(small_tokenizers.byte_fallback(), added)


def _first_space(added: list[AddedToken]) -> Tokenizer:
    """A dummy space in front of the whole text only."""
    tokenizer = _with_added(small_tokenizers.byte_fallback(), added)
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def _folded(added: list[AddedToken]) -> Tokenizer:
    """Full-width letters become ASCII, and tokens are looked for after that."""
    tokenizer = _byte_level(added)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return tokenizer


_PHI: Final = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|endoftext|>")
_GLM: Final = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_LLAMA: Final = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
_MISTRAL: Final = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]")
_THINK: Final = ("<think>", "</think>", "<tool_call>", "<tool_response>", "</tool_response>")

Source = tuple[str, Callable[[], Tokenizer], dict[str, str], Family]


def _chatml(source: str, tokenizer: Callable[[], Tokenizer], family: Family) -> Source:
    return source, tokenizer, {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}, family


def _sources() -> dict[str, Source]:
    """Name -> template, tokenizer, special tokens, what the template takes."""
    plain, parts = Family("small", _joined), Family("small", _in_parts)
    tools = Family("small", _joined, has_tools=True, has_reasoning=True, parsed=_PARSED_THINK)
    searching = Family("small", _joined, parsed=(("'<|im_end|>' in x", "<|im_end|>"),))
    tokens, ordinary = _tokens, {"special": False}
    with_think = [*tokens(*_CHATML), *tokens(*_THINK, **ordinary)]
    phi = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
    mistral = {"bos_token": "<s>", "eos_token": "</s>"}
    llama = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    alternating = Family("small", _joined, alternates=True)
    glm = Family("small", _in_parts, has_tools=True, has_reasoning=True, parsed=_PARSED_THINK)
    more, few = family_templates, chat_templates
    return {
        "chatml": _chatml(few.CHATML, lambda: _byte_level(tokens(*_CHATML)), plain),
        "chatml trimmed": _chatml(more.CHATML_TRIMMED, lambda: _byte_level(tokens(*_CHATML)), plain),
        "chatml folded": _chatml(few.CHATML, lambda: _folded(tokens(*_CHATML, normalized=True)), plain),
        "chatml first space": _chatml(few.CHATML, lambda: _first_space(tokens(*_CHATML)), plain),
        "tools": _chatml(few.WITH_TOOLS, lambda: _byte_level(with_think), tools),
        "parts or strings": _chatml(few.PARTS_OR_STRINGS, lambda: _byte_level(tokens(*_CHATML)), parts),
        "phi": (more.COMPOSED_ROLES, lambda: _byte_level(tokens(*_PHI, rstrip=True)), phi, plain),
        "phi pieces": (more.COMPOSED_ROLES, lambda: _sentence_piece(tokens(*_PHI, rstrip=True)), phi, plain),
        "mistral": (more.INSTRUCTIONS, lambda: _byte_level(tokens(*_MISTRAL)), mistral, alternating),
        "mistral pieces": (
            more.INSTRUCTIONS,
            lambda: _sentence_piece(tokens(*_MISTRAL)),
            mistral,
            alternating,
        ),
        "llama": (
            more.HEADERS,
            lambda: _byte_level(tokens(*_LLAMA)),
            llama,
            Family("small", _joined, has_tools=True),
        ),
        "glm": (
            more.BARE_TEXT,
            lambda: _byte_level([*tokens(*_GLM, lstrip=True), *tokens(*_THINK, **ordinary)]),
            {},
            glm,
        ),
        **{
            name: _chatml(
                source, lambda: _byte_level(tokens(*_CHATML)), searching if name == "searched" else plain
            )
            for name, source in more.TRICKY.items()
        },
    }


NAMES: Final = tuple(_sources())
# They change or measure what a client wrote, so that a reference which hides it cannot tell the text.
CHANGING: Final = frozenset({"measured", "upper", "reversed text"})


@cache
def small_model(name: str, folder: Path) -> Model:
    """One of `NAMES`, its tokenizer's file kept in `folder`."""
    source, make_tokenizer, special_tokens, family = _sources()[name]
    file = folder / f"{name}.json"
    file.write_text(make_tokenizer().to_str())
    config = json.dumps({**special_tokens, "chat_template": source}).encode()
    text = ModelText.from_files({"tokenizer.json": file.read_bytes(), "tokenizer_config.json": config})
    return Model(family, text, Reference(file, source, special_tokens, dict(family.parsed)))
