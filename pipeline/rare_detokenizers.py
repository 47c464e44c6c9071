"""Detokenizers for decoders that hardly any language model has: exact too, but some microseconds a token.

What is served with them is speech models (CTC), models before 2020 (BPE with a suffix), and what nobody has
seen yet. The common ones are in `detokenizer.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from pipeline.pieces import Piece
from pipeline.vocabulary import Vocabulary

ENDED: Final = "the detokenizer was flushed; a stream ends once"

_NUM_CONTEXT_IDS: Final = 64  # of a prompt
# Where all of the last 1,024 ids of a longer prompt have no text, there is taken to be some before them.
_NUM_PROMPT_IDS: Final = (4, 64, 1024)


def visible_tail(vocabulary: Vocabulary, skip: bool, ids: Sequence[int], num_ids: int) -> list[int]:
    """Those of the last ids that the decoder sees."""
    return [token_id for token_id in ids[-num_ids:] if vocabulary.is_visible(token_id, skip)]


def lead_of(vocabulary: Vocabulary, skip: bool, prompt_ids: Sequence[int]) -> list[int] | None:
    """A prompt's tokens if they have no text, else None.

    The prompt's end, looked at in growing steps, mostly has some.
    """
    for num_ids in _NUM_PROMPT_IDS:
        lead = visible_tail(vocabulary, skip, prompt_ids, num_ids)
        if vocabulary.decode(lead):
            return None
        if num_ids >= len(prompt_ids):
            return lead
    return None


class _RareDetokenizer(ABC):
    """What the three have in common. `_follow` begins after the end of a prompt."""

    __slots__ = ("_is_ended", "_skip", "_vocabulary")

    def __init__(
        self, vocabulary: Vocabulary, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._is_ended = False
        self._follow(visible_tail(vocabulary, skip_special_tokens, prompt_ids, _NUM_CONTEXT_IDS))

    @property
    def is_mid_character(self) -> bool:
        """See `Detokenizer`."""
        return False

    @property
    def texts_now(self) -> None:
        """See `Detokenizer`."""
        return None

    def feed(self, ids: list[int]) -> str:
        """See `Detokenizer`."""
        return "".join([piece.text for piece in self.pieces(ids)])

    def pieces(self, ids: list[int]) -> list[Piece]:
        """See `Detokenizer`."""
        if self._is_ended:
            raise RuntimeError(ENDED)
        return self._take(ids)

    def flush(self) -> str:
        """See `Detokenizer`."""
        return "".join([piece.text for piece in self.flush_pieces()])

    def flush_pieces(self) -> list[Piece]:
        """See `Detokenizer`."""
        if self._is_ended:
            raise RuntimeError(ENDED)
        self._is_ended = True
        return self._rest()

    @abstractmethod
    def _follow(self, prompt_ids: list[int]) -> None: ...

    @abstractmethod
    def _take(self, ids: list[int]) -> list[Piece]: ...

    @abstractmethod
    def _rest(self) -> list[Piece]: ...


class _TokenByToken(_RareDetokenizer):
    """The text of each token is certain with it, or but for its end."""

    __slots__ = ()

    def _take(self, ids: list[int]) -> list[Piece]:
        controls = self._vocabulary.controls
        return [Piece(self._step(token_id), (token_id,), controls.get(token_id, "")) for token_id in ids]

    def _step(self, token_id: int) -> str:
        return self._text(token_id) if self._vocabulary.is_visible(token_id, self._skip) else ""

    def _rest(self) -> list[Piece]:
        return []

    @abstractmethod
    def _text(self, token_id: int) -> str:
        """The text that becomes certain with a token that the decoder sees."""


class RepeatDetokenizer(_TokenByToken):
    """CTC: a token that repeats the one before it is nothing."""

    __slots__ = ("_token",)

    def _follow(self, prompt_ids: list[int]) -> None:
        self._token = self._vocabulary.tokens[prompt_ids[-1]] if prompt_ids else None

    def _text(self, token_id: int) -> str:
        token = self._vocabulary.tokens[token_id]
        if token == self._token:
            return ""
        self._token = token
        return self._vocabulary.texts[token_id] or ""


class SuffixDetokenizer(_TokenByToken):
    """A suffix that ends a word is a space if another token follows, and nothing at the end of the text."""

    __slots__ = ("_if_followed", "_if_last")

    @property
    def is_mid_character(self) -> bool:
        """See `Detokenizer`."""
        return bool(self._if_last)

    def _follow(self, prompt_ids: list[int]) -> None:
        self._if_followed = self._if_last = ""  # what the last token adds to what has left
        if prompt_ids:
            last, followed = self._both_texts(prompt_ids[-1])
            self._if_followed = followed[len(last) :] if followed.startswith(last) else ""

    def _text(self, token_id: int) -> str:
        last, followed = self._both_texts(token_id)
        certain = _common_beginning(last, followed)
        text = self._if_followed + certain
        self._if_last, self._if_followed = last[len(certain) :], followed[len(certain) :]
        return text

    def _rest(self) -> list[Piece]:
        return [Piece(self._if_last, ())] if self._if_last else []

    def _both_texts(self, token_id: int) -> tuple[str, str]:
        """A token's text as the last one, and before another."""
        last = self._vocabulary.decode([token_id])
        return last, self._vocabulary.decode([token_id, token_id]).removesuffix(last)


def _common_beginning(one: str, other: str) -> str:
    return "".join(
        char for char, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    )


class WholeDetokenizer(_RareDetokenizer):
    """All of the text comes at the end: nothing is known of what a later token may do to it."""

    __slots__ = ("_ids", "_prompt_ids")

    @property
    def is_mid_character(self) -> bool:
        """See `Detokenizer`."""
        return bool(self._ids) and not self._is_ended

    def _follow(self, prompt_ids: list[int]) -> None:
        self._prompt_ids = prompt_ids
        self._ids: list[int] = []

    def _take(self, ids: list[int]) -> list[Piece]:
        self._ids += ids
        return []

    def _rest(self) -> list[Piece]:
        decode = self._vocabulary.decode
        visible = visible_tail(self._vocabulary, self._skip, self._ids, len(self._ids))
        before = decode(self._prompt_ids)
        text = decode([*self._prompt_ids, *visible])
        text = text[len(before) :] if text.startswith(before) else decode(visible)
        return [Piece(text, tuple(self._ids))] if self._ids else []
