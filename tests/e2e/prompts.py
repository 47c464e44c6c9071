"""What the end-to-end tests ask the real model: short and long, in English, Chinese, code and emoji."""

from __future__ import annotations

import random
from typing import Final

from tokenizers import Tokenizer

LONG_TOKENS: Final = 600  # more than the engine takes in one step

ENGLISH: Final = (
    "Say hello.",
    "What is the capital of France?",
    "List three colours, one per line.",
    "Explain in one sentence why the sky is blue.",
    "Write a rhyme about a “quoted” café — with dashes…",
    "  Leading and trailing spaces  ",
    "Count from one to ten.",
)
CHINESE: Final = (
    "用中文介绍一下北京。",
    "请写一首关于春天的诗。",
    "翻译成中文: good morning",
    "请重复: 龘靐齉爩",
    "一二三四五，",
    "日本語で自己紹介してください。",
)
CODE: Final = (
    "Write a Python function that reverses a list.",
    "Complete:\n```c\nint main(void) {\n\tprintf(",
    'Write this as JSON: name "Ann\\n", age 3.',
    "<div class='a'>&amp;</div> What is this?",
    "Write a regular expression for a phone number.",
    "SELECT * FROM users WHERE",
)
EMOJI: Final = (
    "Repeat after me: 🎉🎉🎉🚀🚀😀",
    "Reply only with emoji: 👩‍👩‍👧‍👦 🇫🇷 ❤️",
    "Continue: 😀😃😄😁😆😅",
    "🎉🚀🎉🚀🎉🚀🎉",
    "Which animal is this? 🦊",
    "Write the letters 𝒜𝒷𝒸 and the note 𝄞 again.",
    "Say 👍🏽 twice.",
)
_WORDS: Final = {
    "english": "water wheel channel speed river stone mill a gate and the slope of it",
    "chinese": "水 轮 渠道 速度 河流 石头 磨坊 闸门 和 坡度 春天 北京",
    "code": "def return self.x = [] {} (i += 1) \n\t for in range lambda: ** // #",
    "emoji": "🎉 🚀 😀 👩‍👩‍👧‍👦 🇫🇷 ❤️ 👍🏽 🦊 𝄞 word",
}
KINDS: Final = tuple(_WORDS)


def long_text(kind: str, tokenizer: Tokenizer, seed: int = 0, num_tokens: int = LONG_TOKENS) -> str:
    """Random words of a kind, about so many tokens long. Another seed shares no prefix with it."""
    rng = random.Random(f"{kind} {seed}")
    words = _WORDS[kind].split(" ")
    text = f"{rng.randrange(10**6)}:"
    while (missing := num_tokens - len(tokenizer.encode(text, add_special_tokens=False).ids)) > 0:
        text += "".join(f" {rng.choice(words)}" for _ in range(1 + missing // 8))
    return text
