"""What the filters must do, written a second time: by brute force, for texts of a few characters.

Shares nothing with the code under test but `Rule` and `Hit`. The folding is a table of the characters used
here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from filters.hit import Hit
from filters.rules import Rule, RuleSet

FOLDS = {
    **{char: char for char in "abcs .*#我的界é😀"},
    "A": "a", "ｂ": "b", "Ｂ": "b", "𝐚": "a", "ⓒ": "c", "É": "é",
    "战": "战", "戰": "战", "ß": "ss", "㏄": "cc", "\u200b": "", "\ufe0f": "", "\U000e0061": "",
}  # fmt: skip
EXPANDING = {char for char, folded in FOLDS.items() if len(folded) > 1}
WORD_CHARS = set("abcsé")
ALPHABETS = (
    "ab",
    "abc",
    "a我",
    "aA .b",
    "ab\u200b",
    "aßs",
    "s ß\u200bs",
    "c㏄ .",
    "a😀\ufe0f",
    "我的界 \U000e0061",
    "é.ÉaＢ𝐚b",
    "战戰a\u200b",
)


@dataclass(frozen=True)
class Match:
    start: int  # folded
    end: int
    rule: Rule
    is_phrase: bool
    waits: bool  # for the character after it, to know whether the word is over


class Text:
    """A raw text read so far, and its folded form with the raw offset of each character."""

    def __init__(self, raw: str) -> None:
        self.raw = raw
        self.folded = "".join(FOLDS[char] for char in raw)
        self.origin = [i for i, char in enumerate(raw) for _ in FOLDS[char]]

    def span(self, match: Match) -> tuple[int, int]:
        return self.origin[match.start], self.origin[match.end - 1] + 1


def fold(text: str) -> str:
    return "".join(FOLDS[char] for char in text)


def looked_for(rules: Sequence[Rule]) -> Iterator[tuple[str, Rule, bool, bool]]:
    """(folded pattern, rule, is it a phrase, whole word)."""
    for rule in rules:
        for keyword in {fold(keyword) for keyword in rule.match}:
            yield keyword, rule, rule.action == "allow", rule.whole_word
        for phrase in {fold(phrase) for phrase in rule.allow}:
            yield phrase, rule, True, False


def begins_rightly(folded: str, start: int, pattern: str, whole: bool) -> bool:
    return not (whole and start > 0 and pattern[0] in WORD_CHARS and folded[start - 1] in WORD_CHARS)


def matches(text: Text, rules: Sequence[Rule]) -> list[Match]:
    found = []
    for pattern, rule, is_phrase, whole in looked_for(rules):
        for start in range(len(text.folded) - len(pattern) + 1):
            end = start + len(pattern)
            if text.folded[start:end] != pattern or not begins_rightly(text.folded, start, pattern, whole):
                continue
            bound = whole and pattern[-1] in WORD_CHARS
            if bound and end < len(text.folded) and text.folded[end] in WORD_CHARS:
                continue
            found.append(Match(start, end, rule, is_phrase, bound and end == len(text.folded)))
    return found


def excuses(phrase: Match, keyword: Match) -> bool:
    same = phrase.rule is keyword.rule or phrase.rule.action == "allow"
    return phrase.is_phrase and same and phrase.start <= keyword.start and keyword.end <= phrase.end


def final_matches(text: Text, rules: Sequence[Rule]) -> list[Match]:
    """Keyword matches that stand if the text ends here."""
    found = matches(text, rules)
    return [m for m in found if not m.is_phrase and not any(excuses(p, m) for p in found)]


def unfinished(text: Text, rules: Sequence[Rule], is_phrase: bool) -> Iterator[tuple[int, Rule]]:
    """(folded start, rule) of every pattern that the end of the text may be the beginning of."""
    folded = text.folded
    for pattern, rule, phrase, whole in looked_for(rules):
        if phrase != is_phrase:
            continue
        longest = len(pattern) if whole and pattern[-1] in WORD_CHARS else len(pattern) - 1
        for size in range(1, min(longest, len(folded)) + 1):
            start = len(folded) - size
            if folded[start:] == pattern[:size] and begins_rightly(folded, start, pattern, whole):
                yield start, rule


def undecided(text: Text, rules: Sequence[Rule]) -> list[Match]:
    """Complete keyword matches whose fate the next characters decide."""
    found = matches(text, rules)
    phrases = [m for m in found if m.is_phrase]
    result = []
    for match in (m for m in found if not m.is_phrase):
        if any(excuses(p, match) and not p.waits for p in phrases):
            continue
        open_phrases = (
            start <= match.start and (rule is match.rule or rule.action == "allow")
            for start, rule in unfinished(text, rules, is_phrase=True)
        )
        if match.waits or any(open_phrases):
            result.append(match)
    return result


def rewrite(raw: str, spans: list[tuple[int, int, Rule]], cut: int) -> str:
    """raw[:cut], rewritten over the unions of overlapping spans; each as its first span says."""
    spans = sorted(spans, key=lambda span: (span[0], -span[1], span[2].action == "mask"))
    unions: list[tuple[int, int, Rule]] = []
    for start, end, rule in spans:
        if unions and start < unions[-1][1]:
            first, last, first_rule = unions[-1]
            unions[-1] = (first, max(last, end), first_rule)
        else:
            unions.append((start, end, rule))
    out = list(raw[:cut])
    for start, end, rule in unions:
        for i in range(start, min(end, cut)):
            is_first = i == start
            out[i] = rule.replacement if rule.action == "mask" or is_first else ""
    return "".join(out)


@dataclass(frozen=True)
class Expected:
    output: str
    hits: set[Hit]
    blocked: bool


def is_block(match: Match) -> bool:
    return match.rule.is_active and match.rule.action == "block"


def expect(raw: str, rules: Sequence[Rule]) -> Expected:
    """What a stream of this text must give, whatever the chunks: the block that ends first ends the text, and
    what ends up to there counts.
    """
    text = Text(raw)
    stands = final_matches(text, rules)
    ends = [text.span(m)[1] for m in stands if is_block(m)]
    stands = [m for m in stands if text.span(m)[1] <= min(ends, default=len(raw))]
    hits = {Hit(m.rule.id, m.rule.action, *text.span(m), m.rule.shadow) for m in stands}
    cut = min([text.span(m)[0] for m in stands if is_block(m)], default=len(raw))
    spans = [(*text.span(m), m.rule) for m in stands if m.rule.is_active and not is_block(m)]
    return Expected(rewrite(raw, spans, cut), hits, bool(ends))


def num_held(raw: str, rules: Sequence[Rule]) -> int:
    """The smallest number of raw characters that a stream must hold after this text, if it is not blocked."""
    text = Text(raw)
    waiting = undecided(text, rules)
    certain = [m for m in final_matches(text, rules) if m not in waiting and m.rule.is_active]
    starts = [text.origin[start] for start, rule in unfinished(text, rules, False) if rule.is_active]
    starts += [text.span(match)[0] for match in waiting if match.rule.is_active]
    # A block whose turn has not come, and what a block would undo that ends before it.
    starts += [text.span(match)[0] for match in certain if is_block(match)]
    for match in certain:
        before = [text.span(m)[1] < text.span(match)[1] for m in waiting if is_block(m)]
        before += [text.span(m)[1] < text.span(match)[1] for m in certain if is_block(m)]
        if any(before):
            starts.append(text.span(match)[0])
    return len(raw) - min(starts, default=len(raw))


def random_rules(rng: random.Random, alphabet: str, actions: Sequence[str]) -> RuleSet:
    """A few rules over an alphabet, made to overlap."""
    rules = []
    for number in range(rng.randint(1, 4)):
        action = rng.choice(actions)
        keywords = tuple(dict.fromkeys(_random_keyword(rng, alphabet) for _ in range(rng.randint(1, 3))))
        allow: tuple[str, ...] = ()
        if action != "allow" and rng.random() < 0.3:
            around = [_random_text(rng, alphabet, rng.randint(0, 2)) for _ in range(2)]
            allow = (around[0] + rng.choice(keywords) + around[1],)
        replacement = {"mask": "*", "redact": "##"}.get(action, "")
        shadow = action != "allow" and rng.random() < 0.1
        whole_word = rng.random() < 0.3
        rules.append(Rule(f"r{number}", keywords, action, "both", whole_word, allow, replacement, shadow))
    return RuleSet(tuple(rules))


def _random_text(rng: random.Random, alphabet: str, size: int) -> str:
    return "".join(rng.choices(alphabet, k=size))


def _random_keyword(rng: random.Random, alphabet: str) -> str:
    while True:
        keyword = _random_text(rng, alphabet, rng.randint(1, 4))
        if len(fold(keyword)) >= 2:
            return keyword


def random_case(rng: random.Random, actions: Sequence[str]) -> tuple[RuleSet, str]:
    alphabet = rng.choice(ALPHABETS)
    return random_rules(rng, alphabet, actions), _random_text(rng, alphabet, rng.randint(0, 12))
