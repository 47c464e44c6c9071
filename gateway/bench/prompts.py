"""Prompts of a wanted length in tokens, made of seeded common words.

No two share a beginning, other than the prefix that they are meant to share, so that a server's prefix cache
does what the load says and no more. Nor do those of two runs with the same seed, unless they are meant to.
Not here: prompts from a file (`gateway/bench/dataset.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, Final

from gateway.bench.word_list import WORDS

_POOL_WORDS: Final = 1 << 15
_OWN_WORDS: Final = 12  # drawn for each text: 300 words ** 12 beginnings
_MIN_EXACT_WORDS: Final = 40
# Of English words and the tokenizers of today's models. Used only where the server tells no usage.
TYPICAL_TOKENS_PER_WORD: Final = 1.05


@dataclass(frozen=True, slots=True)
class Measure:
    """How words become the tokens that a server counts. `overhead`: what its chat template adds.

    `source` tells the reader where that is from: "tokenizer", "measured" or "assumed".
    """

    tokens_per_word: float = TYPICAL_TOKENS_PER_WORD
    overhead: float = 0.0
    source: str = "assumed"

    def num_words(self, tokens: float) -> int:
        return max(1, round(tokens / self.tokens_per_word))


def measured(few: tuple[int, int], many: tuple[int, int]) -> Measure:
    """From two prompts as (number of words, tokens that the server counted), the second the longer one."""
    per_word = (many[1] - few[1]) / (many[0] - few[0])
    if per_word <= 0:
        return Measure()
    return Measure(per_word, max(0.0, few[1] - per_word * few[0]), "measured")


class Texts:
    """Draws texts. Copied from a pool they take microseconds, and do not hold up the load's own loop.

    `salt` sets this run's beginnings apart from those of another one with the same seed: a server that is
    asked twice would else answer from its prefix cache. How much is drawn of a source does not depend on it.
    """

    def __init__(self, seed: int, words: Sequence[str] = WORDS, salt: str | None = None) -> None:
        self._own_words = words if salt is None else Random(salt).sample(words, len(words))
        pool = Random(f"pool {seed}").choices(words, k=_POOL_WORDS)
        self._pool = " ".join(pool)
        self._starts = [0, *accumulate(len(word) + 1 for word in pool)]

    def draw(self, random: Random, num_words: int) -> str:
        """`num_words` words, of which the first ones are drawn one by one."""
        own = random.choices(self._own_words, k=_OWN_WORDS)[:num_words]
        at = random.randrange(_POOL_WORDS)
        pieces, missing = own, num_words - len(own)
        while missing > 0:
            until = min(at + missing, _POOL_WORDS)
            pieces.append(self._pool[self._starts[at] : self._starts[until] - 1])
            missing -= until - at
            at = 0
        return " ".join(pieces)


def words_of_one_token(path: Path) -> tuple[str, ...]:
    """Those of our words that a model's tokenizer has one token for, at the start of a text as within it.

    `path` is a folder with a `tokenizer.json`, or that file. Raises `ValueError` if it cannot be read, or if
    too few words are left.
    """
    encode = _encoder(path / "tokenizer.json" if path.is_dir() else path)
    single: dict[int, str] = {}  # by the token within a text: words that a model does not know share one
    for word in dict.fromkeys(WORDS):
        within = encode(f"the {word}")
        if len(encode(word)) == 1 and len(within) == 2:
            single.setdefault(within[1], word)
    chosen = tuple(single.values())
    if len(chosen) < _MIN_EXACT_WORDS:
        raise ValueError(
            f"{path} has a token of its own for {len(chosen)} of our words; "
            f"at least {_MIN_EXACT_WORDS} are needed"
        )
    return chosen


def _encoder(file: Path) -> Any:
    from tokenizers import Tokenizer  # takes longer to import than the rest of the command

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no class of its own
        raise ValueError(f"{file} is no tokenizer that can be read: {error}") from error
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
