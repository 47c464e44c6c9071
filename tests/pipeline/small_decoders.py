"""Tokenizers with every kind of decoder chain, over one small vocabulary in which all that is odd occurs."""

from __future__ import annotations

from functools import cache
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

_PIECES: Final = (
    *("", " ", "  ", "▁", "▁▁", "▁ a", "a", "▁a", "a▁", "▁foo", "foo", "x▁y", "敏", "é", "e", "\u0301"),
    *("##ing", "##", ".", " .", "n't", " n't", "do not", "'", "end</w>", "a</w>b", "</w>", "</w></w>"),
    *("<pad>", "|", "a|b", "Ġx", "Ġ", "ĊĊ", "æ", "ķ", "ı", "�", "<0x+F>", "<0xé>", "<0x4>", "<0x20> "),
)
_BYTES: Final = tuple(f"<0x{byte:02X}>" for byte in (0x20, 0x41, 0xE6, 0x95, 0x8F, 0xF0, 0x9F, 0xC3, 0xFF))
SPECIAL_TOKENS: Final = ("<s>", "</s>", "<|end of turn|>")
ADDED_TOKENS: Final = (
    AddedToken("<think>", special=False),
    AddedToken("<tool_call>", special=False, lstrip=True, rstrip=True),
    AddedToken("▁<n>", special=False, normalized=True),
    AddedToken(" <sp> ", special=False, normalized=False),
)

_METASPACE: Final = decoders.Replace("▁", " ")

CHAINS: Final[dict[str, decoders.Decoder | None]] = {
    "none": None,
    "empty sequence": decoders.Sequence([]),
    "metaspace always": decoders.Metaspace(prepend_scheme="always"),
    "metaspace first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "llama 2": decoders.Sequence(
        [_METASPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([_METASPACE, decoders.ByteFallback(), decoders.Fuse()]),
    "strip of three": decoders.Sequence(
        [_METASPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    ),
    "two strips": decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0), decoders.Strip("a", 2, 0)]
    ),
    "strip each token": decoders.Sequence([decoders.ByteFallback(), decoders.Strip("a", 1, 0)]),
    "metaspace with bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "metaspace before bytes": decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()]),
    "replace in the fused text": decoders.Sequence(
        [decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]
    ),
    "replace each token by a pattern": decoders.Sequence(
        [decoders.ByteFallback(), decoders.Replace(Regex("a+|▁"), ""), decoders.Fuse()]
    ),
    "word pieces": decoders.WordPiece(),
    "word pieces with bytes": decoders.Sequence([decoders.ByteFallback(), decoders.WordPiece(cleanup=False)]),
    "ctc": decoders.CTC(),
    "ctc without cleanup": decoders.CTC(pad_token="a", cleanup=False),
    "suffix": decoders.BPEDecoder(),
    "fused suffix": decoders.Sequence([decoders.BPEDecoder(suffix="a"), decoders.Fuse()]),
    "bytes": decoders.ByteLevel(),
    "bytes, fused twice": decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Fuse()]),
    # What is exact at the end only.
    "replace across tokens": decoders.Sequence([decoders.Fuse(), decoders.Replace("aa", "b")]),
    "pattern across tokens": decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+"), "b")]),
    "replace makes bytes": decoders.Sequence([decoders.Replace(" ", ""), decoders.ByteFallback()]),
    "replace after strip": decoders.Sequence(
        [decoders.Fuse(), decoders.Strip(" ", 2, 0), decoders.Replace("a", "")]
    ),
    "fused bytes": decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]),
    "two byte fallbacks": decoders.Sequence(
        [decoders.ByteFallback(), decoders.Replace("A", "<0xE6>"), decoders.ByteFallback()]
    ),
}
WHOLE: Final = (
    *("replace across tokens", "pattern across tokens", "replace makes bytes", "replace after strip"),
    *("fused bytes", "two byte fallbacks"),
)


@cache
def tokenizer(name: str) -> Tokenizer:
    """One of `CHAINS` as the decoder of the vocabulary."""
    vocab = {piece: token_id for token_id, piece in enumerate((*_PIECES, *_BYTES))}
    made = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    made.add_special_tokens(list(SPECIAL_TOKENS))
    made.add_tokens(list(ADDED_TOKENS))
    decoder = CHAINS[name]
    if decoder is not None:
        made.decoder = decoder
    return made
