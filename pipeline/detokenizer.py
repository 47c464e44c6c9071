"""Token ids -> text, incrementally, equal to decoding everything at once.

The reference is `Tokenizer.decode(all ids)`: for any ids and any split of them, what `feed` and `flush`
return joins to exactly that text, and a character leaves as soon as no later id can change it. Stop strings,
channels and filters come after this and see text only.

vLLM's detokenizer (`DecodeStream`) differs in one case: where a stream ends in mid-character it drops the
rest, the whole decode has U+FFFD for it, and so has `flush` here.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import Final, Protocol

from pipeline.vocabulary import Vocabulary

__all__ = ["Detokenizer", "Vocabulary", "open_detokenizer"]

# Never reached by real text. Bounds the cost of tokens that decode to nothing whatever surrounds them.
_MAX_WINDOW_TOKENS: Final = 64
_ENDED: Final = b"\xff"
_ENDED_MESSAGE: Final = "the detokenizer was flushed; a stream ends once"


class Detokenizer(Protocol):
    """One stream's ids -> text."""

    @property
    def is_mid_character(self) -> bool:
        """Whether ids were taken whose text is still uncertain."""

    def feed(self, ids: list[int]) -> str:
        """The text that became certain with these ids; ids beyond the vocabulary add nothing."""

    def flush(self) -> str:
        """The rest, U+FFFD for an incomplete character. Ends the stream: more is a `RuntimeError`."""


def open_detokenizer(vocabulary: Vocabulary, skip_special_tokens: bool = True) -> Detokenizer:
    """A detokenizer for a new stream: by table where that is exact, else through `tokenizers`."""
    kind = ByteLevelDetokenizer if vocabulary.is_byte_level else WindowDetokenizer
    return kind(vocabulary, skip_special_tokens)


class ByteLevelDetokenizer:
    """Joins the bytes of byte-level tokens. The usual feed, one id that is whole characters, is one lookup
    (0.17 us).

    `_held` is the incomplete UTF-8 at the end, at most 3 bytes; after the end it is `_ENDED`, which is no
    start of a character, so that the fast path needs no check of its own.
    """

    __slots__ = ("_fragments", "_held", "_texts")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool = True) -> None:
        self._texts = vocabulary.texts_without_special if skip_special_tokens else vocabulary.texts
        self._fragments = vocabulary.fragments
        self._held = b""

    @property
    def is_mid_character(self) -> bool:
        """See `Detokenizer`."""
        return bool(self._held) and self._held is not _ENDED

    def feed(self, ids: list[int]) -> str:
        """See `Detokenizer`."""
        if not self._held and len(ids) == 1:
            text = self._texts.get(ids[0], "")
            if text is not None:
                return text
        return self._join(ids)

    def flush(self) -> str:
        """See `Detokenizer`."""
        held = self._open()
        self._held = _ENDED
        return held.decode(errors="replace")

    def _join(self, ids: list[int]) -> str:
        data = self._open() + b"".join(map(self._bytes, ids))
        # Replaces each maximal part of a broken character by one U+FFFD, as Rust's from_utf8_lossy does.
        text, num_used = utf_8_decode(data, "replace", False)
        self._held = data[num_used:]
        return text

    def _bytes(self, token_id: int) -> bytes:
        text = self._texts.get(token_id, "")
        return self._fragments[token_id] if text is None else text.encode()

    def _open(self) -> bytes:
        if self._held is _ENDED:
            raise RuntimeError(_ENDED_MESSAGE)
        return self._held


class WindowDetokenizer:
    """Any decoder, by decoding a short window of tokens whose first part has been shown already.

    Exact as long as a token's text depends on no more than the token before it, which holds for the
    metaspace, replace, strip, WordPiece and BPE-suffix decoders, and for tokenizers without a decoder. Byte
    fallback looks further: a run of byte tokens is text if all of it is valid UTF-8, else one U+FFFD for each
    byte, so a run is held until a token that is not a byte ends it.
    """

    __slots__ = ("_shown", "_skip_special_tokens", "_vocabulary", "_window")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] | None = []
        self._shown = ""  # the text of the window that has left

    @property
    def is_mid_character(self) -> bool:
        """See `Detokenizer`."""
        window = self._window or [-1]
        return window[-1] in self._vocabulary.partial_ids

    def feed(self, ids: list[int]) -> str:
        """See `Detokenizer`."""
        if self._window is None:
            raise RuntimeError(_ENDED_MESSAGE)
        return "".join(self._step(token_id) for token_id in ids if self._is_visible(token_id))

    def flush(self) -> str:
        """See `Detokenizer`."""
        if self._window is None:
            raise RuntimeError(_ENDED_MESSAGE)
        text = self._decode(self._window)[len(self._shown) :]
        self._window = None
        return text

    def _is_visible(self, token_id: int) -> bool:
        """Whether the decoder sees this token at all; those it doesn't see are no context either."""
        vocabulary = self._vocabulary
        return token_id in vocabulary.tokens and not (
            self._skip_special_tokens and token_id in vocabulary.special_ids
        )

    def _step(self, token_id: int) -> str:
        window = self._window
        assert window is not None
        window.append(token_id)
        if token_id in self._vocabulary.partial_ids:
            return ""
        text = self._decode(window)
        if not text.startswith(self._shown):
            return ""  # a decoder that takes back what it said: all waits for the next token
        new = text[len(self._shown) :]
        self._cut(window)
        return new

    def _cut(self, window: list[int]) -> None:
        """Keep the shortest context that has a text: only what begins a text can lose its space."""
        for num_kept in range(1, min(len(window), _MAX_WINDOW_TOKENS) + 1):
            self._shown = self._decode(window[-num_kept:])
            if self._shown:
                break
        del window[:-num_kept]

    def _decode(self, ids: list[int]) -> str:
        return self._vocabulary.tokenizer.decode(ids, skip_special_tokens=False)
