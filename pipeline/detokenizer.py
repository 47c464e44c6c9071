"""Token ids -> text, incrementally, equal to decoding everything at once.

The reference is `Tokenizer.decode(all ids)`: for any ids and any split of them, what `feed` and `flush`
return joins to exactly that text, and a character leaves as soon as no later id can change it. Where a
decoder treats the beginning of a text in its own way, the answer's text is what its ids add to the prompt's.
Stop strings, channels and filters come after this.

A token costs a look-up, whatever came before it: nothing is decoded again. vLLM's detokenizer
(`DecodeStream`) differs in two cases: where a stream ends in mid-character it drops the rest, the whole
decode has U+FFFD for it, and so has `flush` here; and of a run of byte tokens that turns out to be broken it
has shown the beginning by then.

Not here: decoders that hardly any model has (`rare_detokenizers.py`).
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Final

from pipeline.decoder_kind import DecoderKind
from pipeline.pieces import Detokenizer, Piece, pieces_of_group
from pipeline.rare_detokenizers import (
    ENDED,
    RepeatDetokenizer,
    SuffixDetokenizer,
    WholeDetokenizer,
    lead_of,
)
from pipeline.vocabulary import TextsById, Vocabulary

__all__ = ["Detokenizer", "Piece", "Vocabulary", "open_detokenizer"]

_ENDED: Final = b"\xff"


def open_detokenizer(
    vocabulary: Vocabulary,
    skip_special_tokens: bool = True,
    prompt_ids: Sequence[int] = (),
) -> Detokenizer:
    """A detokenizer for a new stream that goes on after this prompt, of which it reads the end at most."""
    if vocabulary.kind is DecoderKind.BYTE_LEVEL:
        return ByteLevelDetokenizer(vocabulary, skip_special_tokens)
    return _KINDS[vocabulary.kind](vocabulary, skip_special_tokens, prompt_ids)


class ByteLevelDetokenizer:
    """Joins the bytes of byte-level tokens. The usual feed, one id that is whole characters, is one lookup
    (0.17 us). The prompt does not matter.

    `_held` is the incomplete UTF-8 at the end, at most 3 bytes; after the end it is `_ENDED`, which is no
    start of a character, so that the fast path needs no check of its own. `_waiting` are the ids that all
    their bytes are in `_held`, or that came after it and have none.
    """

    __slots__ = ("_controls", "_fragments", "_held", "_listed", "_texts", "_waiting")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool = True) -> None:
        self._texts = vocabulary.texts_without_special if skip_special_tokens else vocabulary.texts
        listed, all_listed = vocabulary.listed_texts_without_special, vocabulary.listed_texts
        self._listed = listed if skip_special_tokens else all_listed
        self._fragments = vocabulary.fragments
        self._controls = vocabulary.controls
        self._held = b""
        self._waiting: list[int] = []

    @property
    def is_mid_character(self) -> bool:
        """See `Detokenizer`."""
        return bool(self._held) and self._held is not _ENDED

    @property
    def texts_now(self) -> TextsById | None:
        """See `Detokenizer`."""
        return None if self._held else self._listed

    def feed(self, ids: list[int]) -> str:
        """See `Detokenizer`."""
        if not self._held and len(ids) == 1:
            text = self._texts[ids[0]]
            if text is not None:
                return text
        return self._join(ids)

    def pieces(self, ids: list[int]) -> list[Piece]:
        """See `Detokenizer`."""
        self._check_open()
        texts, controls = self._texts, self._controls
        pieces: list[Piece] = []
        for token_id in ids:
            text = texts[token_id]
            if text is not None and not self._held:
                pieces.append(Piece(text, (token_id,), controls.get(token_id, "")))
            elif text:
                self._end_group(pieces)
                pieces.append(Piece(text, (token_id,), controls.get(token_id, "")))
            else:
                self._add_part(token_id, pieces)
        return pieces

    def flush(self) -> str:
        """See `Detokenizer`."""
        return "".join([piece.text for piece in self.flush_pieces()])

    def flush_pieces(self) -> list[Piece]:
        """See `Detokenizer`."""
        self._check_open()
        pieces: list[Piece] = []
        self._end_group(pieces)
        self._held = _ENDED
        return pieces

    def _join(self, ids: list[int]) -> str:
        self._check_open()
        new = b"".join(map(self._bytes, ids))
        data = self._held + new
        # Replaces each maximal part of a broken character by one U+FFFD, as Rust's from_utf8_lossy does.
        text, num_used = utf_8_decode(data, "replace", False)
        self._held = held = data[num_used:]
        if len(new) < len(held):
            self._waiting += ids
        else:
            self._waiting = self._last_of(ids, len(held)) if held else []
        return text

    def _last_of(self, ids: list[int], num_bytes: int) -> list[int]:
        """The ids at the end that have no bytes before the last `num_bytes`."""
        start = len(ids)
        while num_bytes:
            num_bytes -= len(self._bytes(ids[start - 1]))
            if num_bytes < 0:
                break
            start -= 1
        return ids[start:]

    def _add_part(self, token_id: int, pieces: list[Piece]) -> None:
        """A part of a character, or, in mid-character, a token without any bytes."""
        data = self._bytes(token_id)
        if self._held and _breaks(self._held, data):
            self._end_group(pieces)
        text, num_used = utf_8_decode(self._held + data, "replace", False)
        self._held = (self._held + data)[num_used:]
        self._waiting.append(token_id)
        if text:
            pieces.append(Piece(text, tuple(self._waiting)))
            self._waiting = []

    def _end_group(self, pieces: list[Piece]) -> None:
        """What is held stays incomplete."""
        text = self._held.decode(errors="replace")
        pieces += pieces_of_group(text, self._waiting, self._texts, self._controls)
        self._held = b""
        self._waiting = []

    def _bytes(self, token_id: int) -> bytes:
        text = self._texts[token_id]
        return self._fragments[token_id] if text is None else text.encode()

    def _check_open(self) -> None:
        if self._held is _ENDED:
            raise RuntimeError(ENDED)


def _breaks(held: bytes, data: bytes) -> bool:
    """Whether the incomplete character `held` cannot go on with `data`."""
    text, num_used = utf_8_decode(held + data[:1], "replace", False)
    return len(text) > max(num_used - len(held), 0)


class MidTextDetokenizer:
    """Decoders that give each token one text, wherever it stands after the beginning: a lookup as well.

    Two things are left. The beginning of a text may lose spaces, so its tokens (`_lead`) are decoded together
    until there is text: from then on `_lead` is None. And byte fallback makes a run of byte tokens text if
    all of it is valid UTF-8, else one U+FFFD for each byte, so a run waits for a token that is not a byte, or
    for the byte that breaks it. `_tail` is the incomplete character at its end.

    Only a few tokens are ever in `_lead`: the first, and as many as the decoder can strip spaces. A token
    that adds nothing in mid-text changes nothing after it either, unless it ends a run, and is left out.
    """

    __slots__ = (
        "_controls",
        "_is_broken",
        "_is_direct",
        "_is_ended",
        "_lead",
        "_run",
        "_skip",
        "_tail",
        "_texts",
        "_vocabulary",
    )

    def __init__(
        self, vocabulary: Vocabulary, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._texts = vocabulary.texts_without_special if skip_special_tokens else vocabulary.texts
        self._controls = vocabulary.controls
        self._lead = lead_of(vocabulary, skip_special_tokens, prompt_ids)
        self._run: list[int] = []  # byte tokens, and what the decoder doesn't see between and after them
        self._tail = b""
        self._is_broken = False  # in a run that has been broken
        self._is_ended = False
        self._is_direct = self._lead is None  # in mid-text, in no run, not ended

    @property
    def is_mid_character(self) -> bool:
        """See `Detokenizer`."""
        return bool(self._run)

    @property
    def texts_now(self) -> TextsById | None:
        """See `Detokenizer`."""
        return self._texts if self._is_direct else None

    def feed(self, ids: list[int]) -> str:
        """See `Detokenizer`."""
        if self._is_direct and len(ids) == 1:
            text = self._texts[ids[0]]
            if text is not None:
                return text
        elif self._is_direct:
            texts = [text for token_id in ids if (text := self._texts[token_id]) is not None]
            if len(texts) == len(ids):
                return "".join(texts)
        return "".join([piece.text for piece in self.pieces(ids)])

    def pieces(self, ids: list[int]) -> list[Piece]:
        """See `Detokenizer`."""
        if self._is_ended:
            raise RuntimeError(ENDED)
        texts, controls = self._texts, self._controls
        pieces: list[Piece] = []
        for token_id in ids:
            text = texts[token_id]
            if text is not None and self._is_direct:
                pieces.append(Piece(text, (token_id,), controls.get(token_id, "")))
            else:
                self._add(token_id, pieces)
        return pieces

    def flush(self) -> str:
        """See `Detokenizer`."""
        return "".join([piece.text for piece in self.flush_pieces()])

    def flush_pieces(self) -> list[Piece]:
        """See `Detokenizer`."""
        if self._is_ended:
            raise RuntimeError(ENDED)
        pieces: list[Piece] = []
        if self._run:
            self._end_run(pieces)
        self._is_ended = True
        self._is_direct = False
        return pieces

    def _add(self, token_id: int, pieces: list[Piece]) -> None:
        """A token at the beginning of the text, a byte token, or one after byte tokens."""
        text = self._texts[token_id]
        is_visible = self._vocabulary.is_visible(token_id, self._skip)
        if text is None and not self._is_broken:
            self._add_byte(token_id, pieces)
            return
        if self._run and not is_visible:
            self._run.append(token_id)
            return
        if text is None:
            text = self._vocabulary.broken_byte_text
        elif is_visible:
            if self._run:
                self._end_run(pieces)
            self._is_broken = False
            self._is_direct = self._lead is None
            if self._lead is not None:
                text = self._begin([token_id])
        pieces.append(Piece(text, (token_id,), self._controls.get(token_id, "")))

    def _add_byte(self, token_id: int, pieces: list[Piece]) -> None:
        """A run that can no longer be valid need not wait: each of its bytes is U+FFFD."""
        self._run.append(token_id)
        self._is_direct = False
        data = self._tail + self._vocabulary.token_bytes(token_id)
        try:
            self._tail = data[utf_8_decode(data, "strict", False)[1] :]
        except UnicodeDecodeError:
            self._end_run(pieces)
            self._is_broken = True
            self._is_direct = False

    def _end_run(self, pieces: list[Piece]) -> None:
        run, self._run, self._tail = self._run, [], b""
        parts = [token_id for token_id in run if self._texts[token_id] is None]
        text = self._begin(parts) if self._lead is not None else self._vocabulary.text_after_others(parts)
        pieces += pieces_of_group(text, run, self._texts, self._controls)

    def _begin(self, ids: list[int]) -> str:
        """The text of a token, or of a run, before which there was none."""
        lead = self._lead
        assert lead is not None
        if lead and self._texts[ids[0]] == "" and lead[-1] not in self._vocabulary.partial_ids:
            return ""
        lead += ids
        text = self._vocabulary.decode(lead)
        if text:
            self._lead = None
            self._is_direct = True
        return text


_KINDS: Final[dict[DecoderKind, Callable[[Vocabulary, bool, Sequence[int]], Detokenizer]]] = {
    DecoderKind.MID_TEXT: MidTextDetokenizer,
    DecoderKind.REPEATS: RepeatDetokenizer,
    DecoderKind.SUFFIX: SuffixDetokenizer,
    DecoderKind.WHOLE: WholeDetokenizer,
}
