"""Lists of denied words for the benchmark of the way out, and rules made of them.

Such a list has words and short phrases of the language, not random letters: so its beginnings are those of
real words and occur all the time, while the words themselves do not. Here they are words of the tokenizer's
vocabulary, which has the frequent ones of many texts: half Chinese (words of 2 to 4 characters, and two of
them joined), half English (words of 4 letters or more, and two of them in a row). What the prose contains is
left out.

Every rule masks. Of the English ones every second stands for a whole word; every tenth of all has an allow
phrase. Rules for personal data redact. Not here: what is measured with them.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final

from benchmarks.outbound_texts import PROSE
from filters.folding import fold
from filters.pii import PII_CLASSES
from filters.rules import PII_REPLACEMENT, Rule, RuleSet
from filters.stream import CompiledRules
from pipeline.model_text import ModelText

NUM_RULES: Final = (500, 5000, 50_000)
PII_RULES: Final = tuple(
    Rule(f"pii-{name}", (), "redact", replacement=PII_REPLACEMENT[name], pii=name) for name in PII_CLASSES
)
_MAX_CHARACTERS: Final = {"en": 15, "zh": 8}
_MIN_LETTERS: Final = 4
_MIN_WORDS: Final = 400
_EVERY_PHRASE: Final = 10
# What must never be a rule: the sentences of the benchmark, so that nothing is found in them.
_TEXT: Final = fold("\n".join(PROSE.values()))


@dataclass(frozen=True, slots=True)
class Denied:
    """Rules in a fixed order, Chinese and English in turn: a shorter list is the beginning of a longer."""

    rules: Sequence[Rule]

    @classmethod
    def of(cls, model: ModelText, num_rules: int, seed: int = 1) -> Denied:
        """The first rules of a seeded list."""
        rng = random.Random(seed)
        words = _words_of(model, rng)
        sources = {language: _keywords(language, some, rng) for language, some in words.items()}
        short = {language: [word for word in some if len(word) <= 4] for language, some in words.items()}
        rules = []
        for number in range(num_rules):
            language = ("zh", "en")[number % 2]
            keyword = next(sources[language])
            rule = Rule(f"rule-{number}", (keyword,), "mask", replacement="*")
            if number % _EVERY_PHRASE < 2:
                other = rng.choice(short[language])
                phrase = other + keyword if language == "zh" else f"{keyword} {other}"
                rule = replace(rule, allow=(phrase,))
            rules.append(replace(rule, whole_word=number % 4 == 1))
        return cls(rules)

    def first(self, num_rules: int, with_pii: bool = False) -> RuleSet:
        return RuleSet((*self.rules[:num_rules], *(PII_RULES if with_pii else ())))

    def plain(self, num_rules: int) -> RuleSet:
        """The same keywords as a plain word list has them: no whole words, no phrases, one rule."""
        keywords = tuple(rule.match[0] for rule in self.rules[:num_rules])
        return RuleSet((Rule("words", keywords, "mask", replacement="*"),))

    def said(self, language: str) -> list[str]:
        """What to say so that the first rules match, and sometimes an allow phrase does."""
        start = ("zh", "en").index(language)
        return [(*rule.allow, *rule.match)[0] for rule in self.rules[start : NUM_RULES[0] : 2]]


def _words_of(model: ModelText, rng: random.Random) -> dict[str, list[str]]:
    """The words of a vocabulary; of chance where it has too few."""
    texts = model.tokenizer.decode_batch([[token_id] for token_id in range(len(model.vocabulary))])
    english = [text[1:] for text in texts if text[:1] == " " and _is_english(text[1:])]
    chinese = [text for text in texts if 2 <= len(text) <= 4 and _is_chinese(text)]
    if len(english) < _MIN_WORDS:
        english = ["".join(rng.choices(string.ascii_lowercase, k=4)) for _ in range(_MIN_WORDS)]
    if len(chinese) < _MIN_WORDS:
        chinese = ["".join(chr(rng.randint(0x4E00, 0x8000)) for _ in range(2)) for _ in range(_MIN_WORDS)]
    return {"en": english, "zh": chinese}


def _is_english(text: str) -> bool:
    return len(text) >= _MIN_LETTERS and text.isascii() and text.isalpha() and text.islower()


def _is_chinese(text: str) -> bool:
    return all("\u4e00" <= char <= "\u9fff" for char in text) and fold(text) == text


def _keywords(language: str, words: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Words and pairs of words in turn, none twice, none that is in the prose; pairs once words run out."""
    singles = iter(rng.sample(words, len(words)))
    seen: set[str] = set()
    joint = "" if language == "zh" else " "
    while True:
        pair = joint.join(rng.choices(words, k=2))
        for keyword in (next(singles, ""), pair):
            is_new = keyword not in seen and len(keyword) <= _MAX_CHARACTERS[language]
            if len(keyword) > 1 and is_new and keyword not in _TEXT:
                seen.add(keyword)
                yield keyword


class RulesFor:
    """Compiled rules by their number. `counts`: how many; `main`: the middle one, which goals are for."""

    def __init__(self, denied: Denied, counts: Sequence[int] = NUM_RULES) -> None:
        self.denied = denied
        self.counts = counts
        self.main = counts[len(counts) // 2]
        self.load_s: dict[int, float] = {}
        self._compiled: dict[tuple[int, bool], CompiledRules] = {}
        for num_rules in (0, *counts):
            start_s = perf_counter()
            self._compiled[num_rules, False] = CompiledRules(denied.first(num_rules))
            self.load_s[num_rules] = perf_counter() - start_s
            self._compiled[num_rules, True] = CompiledRules(denied.first(num_rules, with_pii=True))

    def __call__(self, num_rules: int, with_pii: bool = False) -> CompiledRules:
        return self._compiled[num_rules, with_pii]
