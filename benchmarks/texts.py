"""Seeded workloads: word lists for the filter and prompts."""

from __future__ import annotations

import random
import string
from pathlib import Path


def write_rules(path: Path, num_rules: int, seed: int = 1) -> Path:
    """A plain word list, half English-like words of 5 to 10 letters, half Chinese ones of 2 to 5
    characters.
    """
    rng = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < num_rules:
        if len(words) % 2:
            word = "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(5, 10)))
        else:
            word = "".join(chr(rng.randint(0x4E00, 0x9000)) for _ in range(rng.randint(2, 5)))
        words[word] = None
    path.write_text("\n".join(words) + "\n", encoding="utf-8")
    return path


def prompt(num_words: int, seed: int) -> str:
    """English-like text that no other seed has."""
    rng = random.Random(seed)
    words = (
        "the",
        "river",
        "carries",
        "water",
        "to",
        "a",
        "wheel",
        "and",
        "every",
        "stone",
        "knows",
        "its",
        "speed",
    )
    return f"{seed}: " + " ".join(rng.choice(words) for _ in range(num_words))
