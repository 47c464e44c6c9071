"""What rules must make of a text, by looking at every place of it: for answers whose raw text is known.

Written for the tests' own rules: keywords in lower case, without foldings but that of case. Nothing here is
shared with the filter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Keyword:
    """A rule of one keyword, for answers."""

    id: str
    word: str
    action: str
    whole_word: bool = False
    allow: tuple[str, ...] = ()
    replacement: str = ""
    channels: tuple[str, ...] = ()

    def as_yaml(self) -> dict[str, Any]:
        """As a rules file has it, which may be JSON."""
        fields = {"id": self.id, "match": [self.word], "action": self.action, "direction": "output"}
        more = {
            "whole_word": self.whole_word,
            "allow": list(self.allow),
            "replacement": self.replacement,
            "channels": list(self.channels),
        }
        return fields | {name: value for name, value in more.items() if value}

    @property
    def is_active(self) -> bool:
        return self.action != "flag"


@dataclass(frozen=True, slots=True)
class Hit:
    """A match of `raw[start:end]`."""

    start: int
    end: int
    rule: Keyword


@dataclass(frozen=True, slots=True)
class Filtered:
    """`text` is what may leave; `raw_ends[i]`: how much of the raw text is settled when i characters left."""

    text: str
    raw_ends: list[int]
    hits: list[Hit]
    is_blocked: bool
    num_raw: int  # characters of the raw text that are in it, rewritten or not
    rewritten: list[Hit] = field(default_factory=list)  # those that changed something

    def is_clean(self, start: int, end: int) -> bool:
        """Whether these raw characters are all in the text, as they were."""
        return end <= self.num_raw and not any(
            hit.start < end and start < hit.end for hit in self.rewritten if hit.rule.is_active
        )


def rules_file(rules: Sequence[Keyword]) -> str:
    return json.dumps([rule.as_yaml() for rule in rules])


def hits_in(raw: str, rules: Sequence[Keyword]) -> list[Hit]:
    """Every match, by its end."""
    lowered = raw.lower()
    assert len(lowered) == len(raw)
    found = [
        Hit(start, start + len(rule.word), rule)
        for rule in rules
        for start in places(lowered, rule.word)
        if _counts(lowered, start, start + len(rule.word), rule)
    ]
    return sorted(found, key=lambda hit: (hit.end, hit.start))


def places(text: str, word: str) -> Iterator[int]:
    """Where a word stands in a text, overlapping places included."""
    return (at for at in range(len(text) - len(word) + 1) if text.startswith(word, at))


def _counts(lowered: str, start: int, end: int, rule: Keyword) -> bool:
    if rule.whole_word and (lowered[start - 1 : start] + lowered[end : end + 1]).strip(
        " \n.,;:!?'\"()<>[]{}*-_"
    ):
        return False
    return not any(
        at <= start and end <= at + len(phrase)
        for phrase in rule.allow
        for at in places(lowered, phrase.lower())
    )


def filtered(raw: str, rules: Sequence[Keyword]) -> Filtered:
    """A text that has ended, as it leaves."""
    hits = hits_in(raw, rules)
    block = next((hit for hit in hits if hit.rule.action == "block"), None)
    num_raw = len(raw) if block is None else block.start
    if block is not None:
        hits = [hit for hit in hits if hit.end <= block.end]
    spans = sorted((hit for hit in hits if hit.rule.action in ("mask", "redact")), key=_order)
    pieces: list[tuple[str, int]] = []  # characters, and the raw offset that each settles
    at = 0
    while at < num_raw:
        span = next((each for each in spans if each.start <= at < each.end), None)
        if span is None:
            pieces.append((raw[at], at + 1))
            at += 1
            continue
        assert span.end <= num_raw, "a block within a mask: choose other words"
        assert not any(span.start < other.start < span.end for other in spans), "choose other words"
        if span.rule.action == "mask":
            pieces += [("*", place + 1) for place in range(span.start, span.end)]
        else:
            pieces += [(each, span.end) for each in span.rule.replacement]
        at = span.end
    text, ends = "".join(each for each, _ in pieces), [0, *(end for _, end in pieces)]
    return Filtered(text, ends, hits, block is not None, num_raw, spans)


def _order(hit: Hit) -> tuple[int, int]:
    return hit.start, -hit.end
