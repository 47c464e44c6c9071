"""What each token id contributes to the text: the tables that one model's streams share.

Here: which decoder the tokenizer has, the bytes of every token, which tokens are special. Not here: any state
of a stream (`pipeline/detokenizer.py`).

A byte-level BPE tokenizer (Qwen, Llama 3, DeepSeek, GPT, SmolLM) spells bytes with 256 printable characters,
and its decoder is a plain concatenation of bytes: a table per id is exact. The text of all others comes from
`tokenizers` itself, where it can be once per id (`decoder_kind.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Final, Protocol

from tokenizers import Tokenizer

from pipeline.decoder_kind import BYTE_TOKEN, DecoderKind, decoder_kind, has_byte_fallback


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


class TextsById(Protocol):
    """Text of an id; None where it depends on the tokens around it. May raise `IndexError` past the last."""

    def __getitem__(self, token_id: int, /) -> str | None: ...


class _Texts(dict[int, str | None]):
    """Id -> text, None where it depends on the tokens around it; nothing for an id that is not there."""

    def listed(self) -> TextsById:
        """The same as a list, if that is not mostly gaps.

        A look-up in a list reads two cold places of memory, the slot and the text; in a dict of 150,000 ids
        four, the index, the entry and the key besides. With many streams that is 0.5 us.
        """
        num_ids = max(self, default=-1) + 1
        return [self[token_id] for token_id in range(num_ids)] if num_ids <= 2 * len(self) else self

    def __missing__(self, token_id: int) -> str | None:
        return ""


class _AskedTexts(_Texts):
    """Id -> text as `_Texts`, asked for the first time that an id is met (4 us), and kept from then on."""

    def __init__(self, ids: Mapping[int, str], ask: Callable[[int], str | None]) -> None:
        super().__init__()
        self._ids = ids
        self._ask = ask

    def __missing__(self, token_id: int) -> str | None:
        if token_id not in self._ids:
            return ""  # not kept, or ids that a client makes up would fill the memory
        text = self[token_id] = self._ask(token_id)
        return text


def _by_wholeness(tokens: Mapping[int, str]) -> tuple[_Texts, dict[int, bytes]]:
    """Byte-level tokens: id -> text, None where the bytes are not whole characters; and id -> those bytes."""
    texts = _Texts()
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
    matches = ((token_id, BYTE_TOKEN.fullmatch(token)) for token_id, token in tokens.items())
    return {token_id: bytes([int(match[1], 16)]) for token_id, match in matches if match}


class Vocabulary:
    """The token tables of one model, built once (0.6 s for 150,000 tokens) and shared by all its streams.

    `texts` has every token's text in mid-text, None for parts of characters: the `fragments` of a byte-level
    tokenizer, the `partial_ids` (byte tokens) of others. `texts_without_special` has special tokens as
    nothing. `controls`: id -> string of special tokens, and of those in `control_ids`.
    """

    def __init__(self, tokenizer: Tokenizer, control_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.kind = decoder_kind(tokenizer)
        self.tokens: Mapping[int, str] = _tokens_by_id(tokenizer)
        self._num_ids = max(self.tokens, default=-1) + 1  # asked for once per request
        added = tokenizer.get_added_tokens_decoder().values()
        specials = {token.content for token in added if token.special}
        # By content, not by id, because that is how `Tokenizer.decode` decides what to skip.
        self.special_ids = frozenset(id_ for id_, token in self.tokens.items() if token in specials)
        known = {*control_ids} & self.tokens.keys() | self.special_ids
        self.controls: Mapping[int, str] = {id_: self.tokens[id_] for id_ in known}
        self._fallback_bytes = _fallback_bytes(self.tokens) if has_byte_fallback(tokenizer) else {}
        self.partial_ids = frozenset(self._fallback_bytes)
        self.texts: Mapping[int, str | None]
        self.texts_without_special: Mapping[int, str | None]
        self.listed_texts: TextsById | None = None  # of a byte-level tokenizer, for the token path
        self.listed_texts_without_special: TextsById | None = None
        if self.is_byte_level:
            self.texts, self.fragments = texts, _ = _by_wholeness(self.tokens)
            self.texts_without_special = visible = _Texts(texts | dict.fromkeys(self.special_ids, ""))
            self.listed_texts, self.listed_texts_without_special = texts.listed(), visible.listed()
        else:
            self.fragments = {}
            self.texts = _AskedTexts(self.tokens, self._mid_text)
            self.texts_without_special = _AskedTexts(self.tokens, self._mid_text_unless_special)

    def __len__(self) -> int:
        """One more than the highest id."""
        return self._num_ids

    @property
    def is_byte_level(self) -> bool:
        """Whether a table of bytes is all that decoding takes."""
        return self.kind is DecoderKind.BYTE_LEVEL

    def is_visible(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the decoder sees this token at all; those it doesn't see are no context either."""
        return token_id in self.tokens and not (skip_special_tokens and token_id in self.special_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds in mid-text, special ones too; none for an id beyond the vocabulary."""
        text = self.texts[token_id]
        if text is None:
            data = self.fragments if self.is_byte_level else self._fallback_bytes
            return data[token_id]
        return text.encode()

    def token_text(self, token_id: int) -> str:
        """The text that a token adds in mid-text, U+FFFD for what is not a whole character: for logprobs."""
        return self.token_bytes(token_id).decode(errors="replace")

    def decode(self, ids: Sequence[int]) -> str:
        """What `tokenizers` makes of these ids as a whole text; special tokens are kept."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def text_after_others(self, ids: Sequence[int]) -> str:
        """The text of these ids in mid-text."""
        anchor, text = self._anchor
        return self.decode([*anchor, *ids]).removeprefix(text)

    @cached_property
    def broken_byte_text(self) -> str:
        """The text of a byte token in a run that is not valid UTF-8: what the decoder makes of U+FFFD."""
        broken = (token_id for token_id, data in self._fallback_bytes.items() if data[0] >= 0x80)
        return self.text_after_others([next(broken)])

    def _mid_text(self, token_id: int) -> str | None:
        return None if token_id in self.partial_ids else self.text_after_others([token_id])

    def _mid_text_unless_special(self, token_id: int) -> str | None:
        return "" if token_id in self.special_ids else self.texts[token_id]

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """A token to decode others after, since the first of a text may lose its space; and its text."""
        if self.kind is DecoderKind.REPEATS:
            return [], ""  # no space to lose, and no token may stand after itself
        plain = (id_ for id_ in self.tokens if id_ not in self.special_ids and id_ not in self.partial_ids)
        words = (id_ for id_ in plain if self.tokens[id_].isalpha())
        for token_id in chain(words, self.tokens.keys() - self.partial_ids):
            text = self.decode([token_id])
            if text:
                return [token_id], text
        return [], ""


def _tokens_by_id(tokenizer: Tokenizer) -> dict[int, str]:
    """Every id's token in order of ids, where an added token hides a model's token of the same id."""
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        tokens[token_id] = added.content
    return dict(sorted(tokens.items()))
