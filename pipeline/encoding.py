"""Text -> token ids, as int32 little-endian bytes: the form in which ids travel to the worker.

Not here: when to encode where. `pipeline/inbound.py` encodes short texts at once and returns long ones as a
need.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from tokenizers import Tokenizer

BYTES_PER_ID: Final = 4
_IS_BIG_ENDIAN: Final = array("i", [1]).tobytes()[0] == 0
# Texts up to this length are encoded on the event loop. As long a one in English takes 0.24 ms with Qwen3's
# tokenizer, in Chinese 0.29 ms; with Llama 3's 0.21 and 0.29, Gemma 3's 0.10 and 0.18, DeepSeek-V3's 0.24 and
# 0.49. A longer one is worth a thread's round trip.
MAX_INLINE_CHARACTERS: Final = 600


def pack_ids(ids: Iterable[int]) -> bytes:
    """Ids as int32 little-endian bytes. Raises `OverflowError` beyond 32 bits, `TypeError` for no integer."""
    packed = array("i", ids)
    assert packed.itemsize == BYTES_PER_ID
    if _IS_BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


class Encoder:
    """One model's tokenizer. Safe to call from several threads at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        """The packed ids of a short text, in the calling thread and holding the GIL."""
        return pack_ids(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
        """The packed ids of each text, by the threads of `tokenizers`, without the GIL.

        Also for one text: with `encode` one of 700,000 characters held the event loop for 440 ms, with this
        for 7 ms. It computes no offsets, which makes it 10 to 50 % quicker.
        """
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [pack_ids(encoding.ids) for encoding in encodings]
