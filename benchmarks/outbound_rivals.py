"""Two other streaming filters for the same rules, written as well as they can be, to be measured beside ours.

`FixedWindow` is what the field does: it holds the last characters, as many as the longest pattern has, and
searches them anew with each token. `PrefixFilter` holds what ours holds: pyahocorasick knows every beginning
of every keyword as a word of its own, so that the matches at the end of the text tell what is under way; it
reads that again from the root with each token, because an iterator must not be fed (its `set()` corrupts the
heap). Both take rules that mask, under the default folding, and texts of which each character folds to one.

They are `filters.text_filter.TextFilter`s as far as a benchmark needs that. Folding is remembered by token:
0.05 us instead of 0.3. Not here: what they cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import ahocorasick

from filters.folding import fold, is_word_char
from filters.hit import Hit
from filters.rules import Rule, RuleSet
from filters.text_filter import TextFilter

# What stands below the depth in a prefix's number.
UNBOUND: Final = 1  # a keyword begins so
BOUND: Final = 2  # a keyword begins so that is a whole word
PHRASE: Final = 4  # an allow phrase begins so
_SHIFT: Final = 3

fold_token = lru_cache(1 << 17)(fold)


@dataclass(slots=True)
class Entry:
    """A whole keyword or phrase. `prefix`: its number as the beginning of others, 0 if it is none."""

    size: int
    prefix: int
    keyword_of: Rule | None = None
    phrase_of: tuple[Rule, ...] = ()


class Match(NamedTuple):
    """A keyword or phrase that was found, in characters from the start of the text."""

    start: int
    end: int
    rule: Rule


class Words:
    """Rules as one pyahocorasick automaton. `with_prefixes`: with the beginnings of all words in it."""

    def __init__(self, rules: RuleSet, with_prefixes: bool) -> None:
        entries: dict[str, Entry] = {}
        prefixes: dict[str, int] = {}
        for rule in rules.rules:
            if rule.action != "mask" or rule.pii or len(rule.replacement) != 1:
                raise ValueError(f"the rule {rule.id!r} is not one that masks a keyword")
            for keyword in map(fold, rule.match):
                entries.setdefault(keyword, Entry(len(keyword), 0)).keyword_of = rule
                is_bound = rule.whole_word and is_word_char(keyword[0])
                _add_prefixes(keyword, BOUND if is_bound else UNBOUND, prefixes)
            for phrase in map(fold, rule.allow):
                entries.setdefault(phrase, Entry(len(phrase), 0)).phrase_of += (rule,)
                _add_prefixes(phrase, PHRASE, prefixes)
        self.longest = max(map(len, entries), default=0)
        self.phrase_starts = _phrase_starts(rules) if with_prefixes else {}
        self.automaton = ahocorasick.Automaton()
        for text, number in prefixes.items() if with_prefixes else ():
            self.automaton.add_word(text, number)
        for text, entry in entries.items():
            entry.prefix = prefixes.get(text, 0)
            self.automaton.add_word(text, entry)
        self.automaton.make_automaton()


def _add_prefixes(text: str, flag: int, prefixes: dict[str, int]) -> None:
    for depth in range(1, len(text)):
        prefixes[text[:depth]] = prefixes.get(text[:depth], depth << _SHIFT) | flag


def _phrase_starts(rules: RuleSet) -> dict[str, list[Rule]]:
    starts: dict[str, list[Rule]] = {}
    for rule in rules.rules:
        for phrase in map(fold, rule.allow):
            for depth in range(1, len(phrase)):
                starts.setdefault(phrase[:depth], []).append(rule)
    return starts


class MaskingFilter:
    """What the two have in common: the text, what was found in it, what leaves. Offsets are characters."""

    def __init__(self, words: Words) -> None:
        self._iter: Callable[[str], Iterable[tuple[int, Any]]] = words.automaton.iter
        self._text = ""  # held, raw
        self._window = ""  # what is read again with the next token, folded
        self._before = " "  # the folded character before the window
        self._matches: list[Match] = []  # undecided
        self._phrases: list[Match] = []
        self._spans: list[Match] = []  # to be masked
        self.held = 0
        self.peak_held = 0
        self.released = 0
        self.num_leaked = 0
        self.hits: list[Hit] = []
        self.is_active = True
        self.blocked = False
        self.blocked_by: str | None = None

    @property
    def reported(self) -> int:
        return self.released

    def feed(self, text: str) -> str:
        """More text, not empty; returns what may leave now."""
        raise NotImplementedError

    def flush(self) -> str:
        """The text has ended."""
        self._decide(self._num_read, (), True)
        return self._release(self._num_read)

    def expire(self) -> str:
        raise NotImplementedError

    def pause(self) -> str:
        raise NotImplementedError

    def abandon(self) -> str:
        raise NotImplementedError

    @property
    def _num_read(self) -> int:
        return self.released + len(self._text)

    def _found(self, entry: Entry, end: int, window: str, at: int) -> None:
        """`end`: in the text; `at`: where that is in the window."""
        start = end - entry.size
        self._phrases += [Match(start, end, rule) for rule in entry.phrase_of]
        rule = entry.keyword_of
        if rule is None:
            return
        first = at - entry.size
        before = window[first - 1] if first else self._before
        if not (rule.whole_word and is_word_char(before) and is_word_char(window[first])):
            self._matches.append(Match(start, end, rule))

    def _decide(self, before: int, under_way: Sequence[Match], is_end: bool = False) -> None:
        """All matches that begin before this, but those that wait for the next character or for a phrase."""
        num_read = self._num_read
        waiting = []
        for match in self._matches:
            if _is_in(match, self._phrases):
                continue
            is_at_end = not is_end and match.end == num_read and self._may_go_on(match)
            if match.start >= before or is_at_end or _is_in(match, under_way):
                waiting.append(match)
            elif self._is_whole(match):
                self._spans.append(match)
                self.hits.append(Hit(match.rule.id, "mask", match.start, match.end, False))
        self._matches = waiting
        if not waiting:
            self._phrases.clear()

    def _may_go_on(self, match: Match) -> bool:
        """Whether the next character may make it part of a word."""
        return match.rule.whole_word and is_word_char(fold(self._text[-1]))

    def _is_whole(self, match: Match) -> bool:
        """Whether no word goes on where this one ends."""
        after = match.end - self.released
        if not match.rule.whole_word or after >= len(self._text):
            return True
        return not all(map(is_word_char, fold(self._text[after - 1 : after + 1])))

    def _release(self, border: int) -> str:
        """All before `border` leaves."""
        cut = border - self.released
        out = self._text[:cut]
        if self._spans:
            out = self._masked(out)
            self._spans = [span for span in self._spans if span.end > border]
        self._text = self._text[cut:]
        self.held = held = len(self._text)
        self.released = border
        if held > self.peak_held:
            self.peak_held = held
        return out

    def _masked(self, text: str) -> str:
        chars = list(text)
        for span in self._spans:
            for offset in range(max(span.start - self.released, 0), min(span.end - self.released, len(text))):
                chars[offset] = span.rule.replacement
        return "".join(chars)


def _is_in(match: Match, phrases: Iterable[Match]) -> bool:
    return any(
        phrase.rule is match.rule and phrase.start <= match.start and phrase.end >= match.end
        for phrase in phrases
    )


class FixedWindow(MaskingFilter):
    """Holds as many characters as the longest pattern has: one of them is what a whole word waits for."""

    def __init__(self, words: Words) -> None:
        super().__init__(words)
        self._keep = words.longest

    def feed(self, text: str) -> str:
        window = self._window + fold_token(text)
        num_seen = len(self._window)
        for last, entry in self._iter(window):
            if last >= num_seen:
                self._found(entry, self.released + last + 1, window, last + 1)
        self._text += text
        cut = max(len(window) - self._keep, 0)
        if cut:
            self._before = window[cut - 1]
        border = self.released + cut
        if self._matches or self._phrases:
            self._decide(border, ())
        self._window = window[cut:]
        return self._release(border)


class PrefixFilter(MaskingFilter):
    """Holds what is under way."""

    def __init__(self, words: Words) -> None:
        super().__init__(words)
        self._phrase_starts = words.phrase_starts

    def feed(self, text: str) -> str:
        num_seen = len(self._window)
        window = self._window + fold_token(text)
        size = len(window)
        keep = live = 0
        for last, value in self._iter(window):
            if last < num_seen:
                continue
            if value.__class__ is not int:
                self._found(value, self._num_read + last + 1 - num_seen, window, last + 1)
                value = value.prefix
            if last + 1 == size and value:
                depth = value >> _SHIFT
                keep = keep or depth  # the first is the longest
                if not live and (value & UNBOUND or (value & BOUND and self._may_begin(window, depth))):
                    live = depth
        self._text += text
        border = self._num_read - live
        if self._matches or self._phrases:
            self._decide(self._num_read, list(self._under_way(window, keep)))
            border = min([border, *(match.start for match in self._matches)])
        if keep < size:
            self._before = window[size - keep - 1]
        self._window = window[size - keep :]
        return self._release(border)

    def _may_begin(self, window: str, depth: int) -> bool:
        """Whether no word goes on where the last characters of the window begin."""
        start = len(window) - depth
        return not is_word_char(window[start - 1] if start else self._before)

    def _under_way(self, window: str, longest: int) -> Iterator[Match]:
        """The allow phrases that the text may end in the middle of; they end beyond all that was read."""
        num_read = self._num_read
        for depth in range(1, longest + 1):
            for rule in self._phrase_starts.get(window[len(window) - depth :], ()):
                yield Match(num_read - depth, num_read + 1, rule)


@dataclass(frozen=True, slots=True)
class RivalRules:
    """A rival's rules as an `OutboundPlan` takes them."""

    words: Words
    kind: type[FixedWindow] | type[PrefixFilter]

    @property
    def is_active(self) -> bool:
        return True

    @property
    def look_back(self) -> int:
        raise NotImplementedError

    @classmethod
    def of(cls, rules: RuleSet, kind: type[FixedWindow] | type[PrefixFilter]) -> RivalRules:
        return cls(Words(rules, kind is PrefixFilter), kind)

    def stream(self) -> TextFilter:
        return self.kind(self.words)

    def completes(self, context: str, text: str) -> bool:
        raise NotImplementedError
