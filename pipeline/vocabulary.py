"""What each token id contributes to the text: the tables that one model's streams share.

Here: which decoder the tokenizer has, the bytes of every token, which tokens are special. Not here: any state
of a stream (`pipeline/detokenizer.py`).

A byte-level BPE tokenizer (Qwen, Llama 3, DeepSeek, GPT, SmolLM) spells bytes with 256 printable characters,
and its decoder is a plain concatenation of bytes: a table per id is exact. Other decoders (SentencePiece's
metaspace, byte fallback, WordPiece) look at neighbours, so their text always comes from `tokenizers` itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's byte fallback


def _byte_alphabet() -> dict[int, int]:
    """Code point -> code point that turns byte-level spelling into latin-1, one character a byte.

    Printable latin-1 characters stand for themselves, the 68 other bytes for U+0100 and on, in order (GPT-2's
    alphabet). The 68 unprintable characters are not in the alphabet: they go where latin-1 cannot follow.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {0x100 + rank: byte for rank, byte in enumerate(others)} | dict.fromkeys(others, 0xFFFF)


_BYTE_ALPHABET: Final = _byte_alphabet()


def _spelled_bytes(token: str) -> bytes:
    """The bytes that a byte-level token spells; with any other character (an added token) plain UTF-8."""
    try:
        return token.translate(_BYTE_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _by_wholeness(tokens: Mapping[int, str]) -> tuple[dict[int, str | None], dict[int, bytes]]:
    """Byte-level tokens: id -> text, None where the bytes are not whole characters; and id -> those bytes."""
    texts: dict[int, str | None] = {}
    fragments = {}
    for token_id, token in tokens.items():
        data = _spelled_bytes(token)
        try:
            texts[token_id] = data.decode()
        except UnicodeDecodeError:
            texts[token_id] = None
            fragments[token_id] = data
    return texts, fragments


def _fallback_bytes(tokens: Mapping[int, str]) -> dict[int, bytes]:
    """The bytes of SentencePiece's byte tokens, for a decoder with byte fallback."""
    matches = ((token_id, _BYTE_TOKEN.fullmatch(token)) for token_id, token in tokens.items())
    return {token_id: bytes.fromhex(match[1]) for token_id, match in matches if match}


class Vocabulary:
    """The token tables of one model, built once (0.6 s for 150,000 tokens) and shared by all its streams.

    For a byte-level tokenizer `texts` has every id, with None for the `fragments` of characters, and
    `texts_without_special` has special tokens as nothing. For others the three are empty, and `partial_ids`
    are the tokens that the decoder joins with their neighbours into characters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokens: Mapping[int, str] = _tokens_by_id(tokenizer)
        self._num_ids = max(self.tokens, default=-1) + 1  # asked for once per request
        added = tokenizer.get_added_tokens_decoder().values()
        specials = {token.content for token in added if token.special}
        # By content, not by id, because that is how `Tokenizer.decode` decides what to skip.
        self.special_ids = frozenset(id_ for id_, token in self.tokens.items() if token in specials)
        decoder = _decoder_config(tokenizer)
        self.is_byte_level = decoder.get("type") == "ByteLevel"
        self.texts, self.fragments = _by_wholeness(self.tokens if self.is_byte_level else {})
        self.texts_without_special = self.texts | (
            dict.fromkeys(self.special_ids, "") if self.is_byte_level else {}
        )
        parts = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
        self._fallback_bytes = _fallback_bytes(self.tokens) if "ByteFallback" in parts else {}
        is_mixed = "ByteLevel" in parts and not self.is_byte_level
        spelled = _by_wholeness(self.tokens)[1] if is_mixed else {}
        self.partial_ids = frozenset({*self._fallback_bytes, *spelled})

    def __len__(self) -> int:
        """One more than the highest id."""
        return self._num_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds in mid-text, special ones too; none for an id beyond the vocabulary."""
        if self.is_byte_level:
            text = self.texts.get(token_id, "")
            return self.fragments[token_id] if text is None else text.encode()
        byte = self._fallback_bytes.get(token_id)
        return self._text_after_anchor(token_id).encode() if byte is None else byte

    def token_text(self, token_id: int) -> str:
        """The text that a token adds in mid-text, U+FFFD for what is not a whole character: for logprobs."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _text_after_anchor(self, token_id: int) -> str:
        if token_id not in self.tokens:
            return ""
        decode, anchor = self.tokenizer.decode, self._anchor
        before = decode(anchor, skip_special_tokens=False)
        return decode([*anchor, token_id], skip_special_tokens=False).removeprefix(before)

    @cached_property
    def _anchor(self) -> list[int]:
        """A plain word to decode a token after, since the first token of a text may lose its space."""
        for token_id, token in self.tokens.items():
            if token.isalpha() and token_id not in self.special_ids:
                return [token_id]
        return []


def _tokens_by_id(tokenizer: Tokenizer) -> dict[int, str]:
    """Every id's token in order of ids, where an added token hides a model's token of the same id."""
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        tokens[token_id] = added.content
    return dict(sorted(tokens.items()))


def _decoder_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The decoder's part of tokenizer.json; a sequence of one is that one; empty without a decoder."""
    if tokenizer.decoder is None:
        return {}
    config: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    if config.get("type") == "Sequence" and len(config["decoders"]) == 1:
        config = config["decoders"][0]
    return config
