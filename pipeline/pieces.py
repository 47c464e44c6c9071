"""What a detokenizer gives: text, or pieces of it with the ids that made them.

Here: the seam and its value. Not here: the detokenizers (`detokenizer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from pipeline.vocabulary import TextsById


class Piece(NamedTuple):
    """Text, and the ids that have been fed since the piece before: mostly one.

    A control token is a piece of its own, and `control` is its string, also where `text` is empty because
    special tokens are skipped. Only one that is skipped between two parts of one character is in that
    character's piece, because the decoder joins the parts as if it were not there.
    """

    text: str
    ids: tuple[int, ...]
    control: str = ""


class Detokenizer(Protocol):
    """One stream's ids -> text. `feed` and `pieces` may be mixed; a stream ends once, with either flush."""

    @property
    def is_mid_character(self) -> bool:
        """Whether ids were taken whose text is still uncertain."""

    @property
    def texts_now(self) -> TextsById | None:
        """What `feed` would return for one id, None for an id that must be fed; None: every id must be.

        Stays as it is until ids are fed or the stream is flushed.
        """

    def feed(self, ids: list[int]) -> str:
        """The text that became certain with these ids; ids beyond the vocabulary add nothing."""

    def pieces(self, ids: list[int]) -> list[Piece]:
        """What `feed` would give, in pieces: the same for every chunking, with the ids in order."""

    def flush(self) -> str:
        """The rest, U+FFFD for an incomplete character. Ends the stream: more is a `RuntimeError`."""

    def flush_pieces(self) -> list[Piece]:
        """What `flush` would give, with the ids that no piece has had."""


def pieces_of_group(
    text: str, ids: Sequence[int], texts: Mapping[int, str | None], controls: Mapping[int, str]
) -> list[Piece]:
    """The piece of ids that make characters together; those at its end that have no text are on their own."""
    end = len(ids)
    while end and texts[ids[end - 1]] == "":
        end -= 1
    pieces = [Piece(text, tuple(ids[:end]))] if end or text else []
    return pieces + [Piece("", (token_id,), controls.get(token_id, "")) for token_id in ids[end:]]
