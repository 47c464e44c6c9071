"""Text -> token ids, as int32 little-endian bytes: the form in which ids travel to the worker.

A rendered chat is encoded in segments that begin with a control string of the template. In the text behind it
control strings are ordinary text: where one is spelled there, a second tokenizer encodes the segment
(`renamed_tokenizer.py`). Not here: when to encode where (`tokenizing.py`), and what is remembered
(`token_cache.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice
from typing import Final

from tokenizers import Tokenizer

from pipeline.controls import ControlStrings
from pipeline.renamed_tokenizer import RenamedTokenizer

BYTES_PER_ID: Final = 4
_IS_BIG_ENDIAN: Final = array("i", [1]).tobytes()[0] == 0
# Texts up to this length are encoded on the event loop: the new text of a typical turn is (130 tokens, 600
# characters of English), which a thread's round trip would keep waiting. As long a text takes, in ms of
# English and Chinese: Qwen3 0.45, 0.78; Llama 3 0.36, 0.90; Gemma 3 0.36, 0.40; DeepSeek-V3 0.79, 1.2
# (medians, each after the parsing of a long body, on two cores that others used too).
MAX_INLINE_CHARACTERS: Final = 800
# Stands before the text that precedes a chat's first control string, where it travels among the segments.
OPENING: Final = "\ufdef"


def pack_ids(ids: Iterable[int]) -> bytes:
    """Ids as int32 little-endian bytes. Raises `OverflowError` beyond 32 bits, `TypeError` for no integer."""
    packed = array("i", ids)
    assert packed.itemsize == BYTES_PER_ID
    if _IS_BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


class Encoder:
    """One model's tokenizer. Safe to call from several threads at once."""

    def __init__(self, tokenizer: Tokenizer, controls: ControlStrings | None = None) -> None:
        self._tokenizer = tokenizer
        self._controls = controls or ControlStrings({})

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        """The packed ids of a short text, in the calling thread.

        A batch of one leaves no thread either, and without offsets it takes a tenth less than `encode`.
        """
        return pack_ids(
            self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        )

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
        """The packed ids of each text, by the threads of `tokenizers`, without the GIL.

        Also for one text: with `encode` one of 700,000 characters held the event loop for 440 ms, with this
        for 7 ms. It computes no offsets, which makes it 10 to 50 % quicker.
        """
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [pack_ids(encoding.ids) for encoding in encodings]

    def encode_segment(self, segment: str) -> bytes:
        """The packed ids of a short segment: it begins with a control string, or is `OPENING` and a text."""
        if segment.startswith(OPENING):
            return self.encode_opening(segment[1:])
        ids = self._tokenizer.encode_batch_fast([segment], add_special_tokens=False)[0].ids
        return self._checked(segment, ids)

    def encode_segments(self, segments: Sequence[str]) -> list[bytes]:
        """Like `encode_segment`, by the threads of `tokenizers`, without the GIL."""
        encodings = self._tokenizer.encode_batch_fast(list(segments), add_special_tokens=False)
        return [
            self.encode_opening(segment[1:])
            if segment.startswith(OPENING)
            else self._checked(segment, encoding.ids)
            for segment, encoding in zip(segments, encodings, strict=True)
        ]

    def encode_opening(self, text: str) -> bytes:
        """The packed ids of what stands before the first segment: no control string in it is meant."""
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return pack_ids(ids if self._controls.id_set.isdisjoint(ids) else self._renamed.ids(text, ()))

    def encode_whole(self, opening: str, segments: Sequence[str]) -> bytes:
        """The packed ids of a rendered chat in one piece, for a tokenizer that is not exact in segments."""
        ids = self._tokenizer.encode_batch_fast([opening + "".join(segments)], add_special_tokens=False)[
            0
        ].ids
        cut, controls = list(map(self._cut, segments)), self._controls
        found = [token_id for token_id in ids if token_id in controls.id_set]
        heads = [controls.ids[head] for head, _ in cut]
        # Fewer: the tokenizer itself does not see some of them here, and nobody else wrote any.
        is_sound = found == heads or (len(found) < len(heads) and not self._is_spelled(opening, cut))
        return pack_ids(ids if is_sound else self._renamed.ids(opening, cut))

    def _is_spelled(self, opening: str, cut: Sequence[tuple[str, str]]) -> bool:
        return any(self._controls.search(text) for text in (opening, *(rest for _, rest in cut)))

    @cached_property
    def surroundings(self) -> tuple[bytes, bytes]:
        """The packed special tokens that the tokenizer puts before and after a raw prompt."""
        bare, full = self.encode("a", add_special_tokens=False), self.encode("a", add_special_tokens=True)
        start = full.find(bare)
        return (full[:start], full[start + len(bare) :]) if start >= 0 else (b"", b"")

    def spells_control(self, segment: str) -> bool:
        """Whether a segment's text holds a control string behind the one that it begins with."""
        return self._controls.search(segment, 1) is not None

    def _cut(self, segment: str) -> tuple[str, str]:
        """The control string that a segment begins with, and the rest."""
        head = self._controls.match(segment)
        assert head is not None, "a segment begins with a control string"
        return head[0], segment[head.end() :]

    def _checked(self, segment: str, ids: list[int]) -> bytes:
        """The ids, unless the text behind the head has turned into a control token."""
        head, rest = self._cut(segment)
        controls = self._controls
        if ids[0] != controls.ids[head] or not controls.id_set.isdisjoint(islice(ids, 1, None)):
            ids = self._renamed.ids("", [(head, rest)])
        return pack_ids(ids)

    @cached_property
    def _renamed(self) -> RenamedTokenizer:
        """Made when the first text needs it."""
        return RenamedTokenizer(self._tokenizer, self._controls)

    @property
    def is_ready_for_spelled(self) -> bool:
        """Whether text that spells control strings can be encoded without first making a tokenizer."""
        return "_renamed" in self.__dict__
