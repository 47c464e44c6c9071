"""Tokenizers of every kind that the pipeline meets, made in milliseconds from a small seeded corpus."""

from __future__ import annotations

import random
from functools import cache
from itertools import chain

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

_TEXT = """the product ships today and the price is 42 € for café naïve users def run(self): return x != None
你好 世界 今天天气 很好 敏感词 感觉 Привет мир こんにちは 안녕 👋 👩\u200d👩\u200d👧\u200d👦 🇨🇳
é e\u0301 \u200b <table> ﷽ 𝔘𝔫𝔦"""
WORDS = [*_TEXT.split(), "\n\n", "\t", ""]
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED_TOKENS = [
    "<think>",
    "</think>",
    "<é ü>",
    "<naïf>",
    "Ġx",
]  # not special; the last three test the byte alphabet


def text(rng: random.Random, num_words: int = 12) -> str:
    """Random words of many scripts, some of them cut short."""
    return " ".join(rng.choice(WORDS)[: rng.randint(1, 9)] for _ in range(num_words))


def _corpus() -> list[str]:
    rng = random.Random(7)
    return [text(rng) for _ in range(300)]


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE as Qwen, Llama 3 and SmolLM have it, with a BOS that only `add_special_tokens` adds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """SentencePiece BPE with byte fallback, as Llama 2 and Mistral have it."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=300, limit_alphabet=60, show_progress=False)
    learner.train_from_iterator(_corpus(), trainer)
    pieces = sorted(learner.get_vocab(), key=learner.get_vocab().__getitem__)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {name: token_id for token_id, name in enumerate(dict.fromkeys([*names, "▁"]))}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def _with_decoder(decoder: decoders.Decoder | None, prefix: str = "") -> Tokenizer:
    pieces = [
        "a",
        "b c",
        "d.",
        "!",
        "n't",
        "敏",
        "é",
        " ",
        "▁",
        "▁▁",
        "▁foo",
        "bar",
        "x▁y",
        "##ing",
        "end</w>",
    ]
    pieces += [f"{prefix}{word}" for word in WORDS if word]
    vocab = {piece: token_id for token_id, piece in enumerate(dict.fromkeys(["<unk>", *pieces]))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@cache
def others() -> dict[str, Tokenizer]:
    """One tokenizer for each decoder that is neither byte-level nor byte fallback."""
    byte_level_in_sequence = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return {
        "no decoder": _with_decoder(None),
        "metaspace": _with_decoder(decoders.Metaspace(), "▁"),
        "word piece": _with_decoder(decoders.WordPiece(), "##"),
        "word piece, no cleanup": _with_decoder(decoders.WordPiece(cleanup=False), "##"),
        "bpe suffix": _with_decoder(decoders.BPEDecoder()),
        "strip": _with_decoder(decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)])),
        "byte fallback alone": _like(byte_fallback(), decoders.ByteFallback()),
        "byte level in a sequence": _like(byte_level(), byte_level_in_sequence),
    }


def _like(tokenizer: Tokenizer, decoder: decoders.Decoder) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.decoder = decoder
    return copy


def all_tokenizers() -> dict[str, Tokenizer]:
    """Name -> tokenizer."""
    return dict(
        chain({"byte level": byte_level(), "byte fallback": byte_fallback()}.items(), others().items())
    )
