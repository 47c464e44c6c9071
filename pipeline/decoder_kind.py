"""Which kind of decoder a tokenizer has: how far the text of a token depends on the tokens around it.

Here: the reading of tokenizer.json's decoder, which is a chain of parts. Not here: decoding.

Every kind has a detokenizer that is exact for it. What no model is known to have (a pattern that looks at the
whole text) is `WHOLE`, and its text comes at the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from tokenizers import Tokenizer

_Part = dict[str, Any]
_FUSE: Final = {"type": "Fuse"}

# What `ByteFallback` reads as a byte: two hexadecimal digits, or, as Rust reads numbers, a plus and one.
BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_BYTE_CHARACTERS: Final = frozenset("<0x+>123456789abcdefABCDEF")

# Parts that look at one token at a time, and at most ask whether it is the first.
_PER_TOKEN: Final = frozenset(("Replace", "Strip", "Metaspace", "WordPiece", "ByteFallback"))


class DecoderKind(Enum):
    """How a decoder makes text of tokens."""

    BYTE_LEVEL = "byte level"  # the bytes of all tokens, joined: Qwen, Llama 3, DeepSeek, GPT
    MID_TEXT = "mid-text"  # a token has one text wherever it stands after the beginning: SentencePiece, BERT
    REPEATS = "repeats"  # a token that repeats the one before it is nothing: CTC
    SUFFIX = "suffix"  # a token's text depends on whether another follows: BPE with a word-end suffix
    WHOLE = "whole"  # only the whole text is sure


def decoder_kind(tokenizer: Tokenizer) -> DecoderKind:
    """The kind of a tokenizer's decoder; without one, tokens are joined with spaces, which is `MID_TEXT`."""
    names, parts = _chain(tokenizer)
    if names in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return DecoderKind.BYTE_LEVEL
    if names in (["CTC"], ["CTC", "Fuse"]):
        return DecoderKind.REPEATS
    if names in (["BPEDecoder"], ["BPEDecoder", "Fuse"]):
        return DecoderKind.SUFFIX
    num_single = names.index("Fuse") if "Fuse" in names else len(names)
    is_mid_text = _is_per_token(parts[:num_single]) and _is_per_character(parts[num_single + 1 :])
    return DecoderKind.MID_TEXT if is_mid_text else DecoderKind.WHOLE


def has_byte_fallback(tokenizer: Tokenizer) -> bool:
    """Whether the decoder makes characters of byte tokens."""
    return "ByteFallback" in _chain(tokenizer)[0]


def _chain(tokenizer: Tokenizer) -> tuple[list[str], list[_Part]]:
    """The parts in order and their names; a second `Fuse` in a row does nothing and is left out."""
    if tokenizer.decoder is None:
        return [], []
    flat = _flat(json.loads(tokenizer.decoder.__getstate__()))
    parts = [part for before, part in zip([None, *flat], flat, strict=False) if not before == part == _FUSE]
    return [part["type"] for part in parts], parts


def _flat(part: _Part) -> list[_Part]:
    if part["type"] == "Sequence":
        return [leaf for each in part["decoders"] for leaf in _flat(each)]
    return [part]


def _is_per_token(parts: Sequence[_Part]) -> bool:
    """Whether each token's text is its own; runs of byte tokens count as one token."""
    names = [part["type"] for part in parts]
    if not _PER_TOKEN.issuperset(names) or names.count("ByteFallback") > 1:
        return False
    before = parts[: names.index("ByteFallback")] if "ByteFallback" in names else []
    return all(map(_keeps_byte_tokens, before))


def _keeps_byte_tokens(part: _Part) -> bool:
    """Whether what is a byte token before this part is one after it, and nothing else is."""
    if part["type"] == "Metaspace":
        return part["replacement"] not in _BYTE_CHARACTERS
    if part["type"] != "Replace":
        return False
    pattern, content = part["pattern"].get("String", ""), part["content"]
    return bool(pattern and content) and _BYTE_CHARACTERS.isdisjoint(pattern + content)


def _is_per_character(parts: Sequence[_Part]) -> bool:
    """Whether the fused text is only rewritten character by character, and then cut at its beginning."""
    replaces = [part for part in parts if part["type"] == "Replace"]
    strips = [part for part in parts if part["type"] == "Strip"]
    return [*replaces, *strips] == list(parts) and (
        all(len(part["pattern"].get("String", "")) == 1 for part in replaces)
        and not any(part["stop"] for part in strips)
    )
