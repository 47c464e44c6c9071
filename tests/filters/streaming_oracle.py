"""What a stream must do, by brute force: what stands, what may yet change, and what must therefore be held.

Every place of a text is compared with every keyword, folded by hand. Whether a character may leave is a
question about the future: `held_by_trying` puts every rest of every pattern after the text and compares the
fates. `num_held` says the same in closed form, fast enough for thousands of texts; a test compares the two.

The fate of a character is the set of active keyword matches that cover it, each with whether a phrase excuses
it. Shared with the code under test: `Rule`, `RuleSet` and `Hit`. Taken from `whole_text_oracle.py`: the table
of characters and the shapes of personal data. Not here: random rules and texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from filters.hit import Hit
from filters.rules import Rule
from tests.filters import oracle, whole_text_oracle
from tests.filters.whole_text_oracle import DIGITS, LEET, spans_of

_SALLA = "صلى الله عليه وسلم"
FOLDS = {
    **whole_text_oracle.FOLDS,
    **{char: char for char in "词詈覚ñéíœ我的界黄片看真好😀👨👩👧❤🏽🎉,!?<>|()/;\"'=[]{}\\\n" + _SALLA},
    **{chr(0xFEE0 + code): chr(code).lower() for code in range(0x21, 0x7F)},
    "É": "é", "ſ": "s", "詞": "词",
    **{char: char.lower() for char in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"},
    "ß": "ss", "ẞ": "ss", "ﬃ": "ffi", "ﬁ": "fi", "ﷺ": _SALLA, "㎏": "kg", "K": "k", "𝐚": "a", "🅰": "a",
    "ⓑ": "b", "\u200d": "", "\u200c": "", "\ufe0e": "", "\ufeff": "", "\U000e0061": "", "\u00ad": "",
}  # fmt: skip

_DIGITS, _LATIN = "0123456789", "abcdefghijklmnopqrstuvwxyz"
# What a piece of personal data, or the text right before and after that decides on it, is made of.
PII_CHARS = {
    **dict.fromkeys(("phone_cn", "card", "id_cn"), _DIGITS + " -.x+"),
    "email": _DIGITS + _LATIN + "._%+-@",
    "ip": _DIGITS + "abcdef:.",
}


def is_word(char: str) -> bool:
    return char.isalnum() and char < "\u2e80"


def fold(text: str, rule: Rule) -> Iterator[tuple[str, int]]:
    """Each folded character of a text and the raw offset that it comes from."""
    for at, raw_char in enumerate(text):
        for char in FOLDS[raw_char]:
            if rule.digits:
                char = DIGITS.get(char, char)
            if rule.leet:
                char = LEET.get(char, char)
            if not rule.skip_symbols or char.isalnum():
                yield char, at


class View:
    """A text as one folding reads it: units, each a folded character, or with `repeats` a run of one."""

    __slots__ = ("chars", "counts", "ends", "size", "starts")

    def __init__(self, raw: str, rule: Rule) -> None:
        chars: list[str] = []
        self.starts: list[int] = []  # raw
        self.ends: list[int] = []
        self.counts: list[int] = []  # how many characters a unit is
        for char, at in fold(raw, rule):
            if rule.repeats and chars and chars[-1] == char:
                self.ends[-1] = at + 1
                self.counts[-1] += 1
            else:
                chars.append(char)
                self.starts.append(at)
                self.ends.append(at + 1)
                self.counts.append(1)
        self.chars = "".join(chars)
        self.size = len(chars)


class Pattern(NamedTuple):
    """A keyword of the rule with this number, or a phrase."""

    number: int
    rule: Rule
    is_phrase: bool
    whole: bool
    text: View


class Match(NamedTuple):
    """Units [start, end) of a text's view. The next character may undo it (`is_unsure`: a letter after a
    whole word) or lengthen it (`grows`: one more of the same, where repeats count as one).
    """

    pattern: Pattern | None  # None for personal data
    number: int
    rule: Rule
    is_phrase: bool
    start: int
    end: int
    raw_start: int
    raw_end: int
    is_unsure: bool
    grows: bool

    @property
    def is_open(self) -> bool:
        return self.is_unsure or self.grows

    @property
    def hit(self) -> Hit:
        return Hit(self.rule.id, self.rule.action, self.raw_start, self.raw_end, self.rule.shadow)


@dataclass(frozen=True)
class Conclusion:
    """What a text comes to.

    The block that ends first ends the text. Matches that end after it don't count; what leaves is the text
    before it (before the earliest, where several end there).
    """

    counted: tuple[Match, ...]
    cut: int
    is_blocked: bool

    @property
    def hits(self) -> set[Hit]:
        return {match.hit for match in self.counted}

    def output(self, raw: str, num_released: int) -> str:
        """What has left when the fates of the first characters are settled."""
        spans = [(m.raw_start, m.raw_end, m.rule) for m in self.counted if is_rewrite(m.rule)]
        return oracle.rewrite(raw, spans, min(self.cut, num_released))

    @property
    def has_tie(self) -> bool:
        """Whether two rules redact the very same characters."""
        redacts = {
            (m.raw_start, m.raw_end, m.number)
            for m in self.counted
            if m.rule.is_active and m.rule.action == "redact"
        }
        return len({span[:2] for span in redacts}) < len(redacts)


class Oracle:
    """Judges texts by one set of rules."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self.has_pii = any(rule.pii for rule in rules)
        self._has_blocks = any(map(is_block, rules))
        readers = {_folding(rule): rule for rule in (Rule("", (), "flag"), *rules)}
        self._readers = readers  # of each folding one rule; the default folding first
        self._foldings = list(readers)
        self._patterns = list(self._all_patterns())
        self.has_runs_of_phrases = any(each.is_phrase and each.rule.repeats for each in self._patterns)
        self._phrases = [pattern for pattern in self._patterns if pattern.is_phrase]

    def _all_patterns(self) -> Iterator[Pattern]:
        for number, rule in enumerate(self.rules):
            is_phrase = rule.action == "allow"
            for keyword in rule.match:
                yield Pattern(number, rule, is_phrase, rule.whole_word, View(keyword, rule))
            for phrase in rule.allow:
                yield Pattern(number, rule, True, False, View(phrase, rule))

    def views(self, raw: str) -> dict[tuple[bool, ...], View]:
        return {folding: View(raw, rule) for folding, rule in self._readers.items()}

    def matches(self, raw: str, with_pii: bool = True) -> list[Match]:
        """All occurrences of all patterns if the text ends here, excused or not."""
        views = self.views(raw)
        found = [
            match
            for pattern in self._patterns
            for match in _occurrences(pattern, views[_folding(pattern.rule)])
        ]
        for number, rule in enumerate(self.rules):
            if rule.pii and with_pii:
                view = views[_folding(rule)]
                for start, end in spans_of(view.chars, rule.pii):
                    found.append(_personal(number, rule, view, start, end))
        return found

    def standing(self, raw: str) -> list[Match]:
        """What no phrase excuses if the text ends here, in the order of rules."""
        matches = self.matches(raw)
        phrases = [match for match in matches if match.is_phrase]
        stands = [m for m in matches if not m.is_phrase and not any(excuses(p, m) for p in phrases)]
        # Of matches of the same raw characters the first of these says how they are rewritten.
        stands.sort(key=lambda m: (bool(m.rule.pii), self._foldings.index(_folding(m.rule)), m.end, m.number))
        return stands

    def conclude(self, raw: str) -> Conclusion:
        """The text ends here."""
        stands = self.standing(raw)
        block_ends = [m.raw_end for m in stands if is_block(m.rule)]
        if not block_ends:
            return Conclusion(tuple(stands), len(raw), False)
        end = min(block_ends)
        cut = min(m.raw_start for m in stands if is_block(m.rule) and m.raw_end == end)
        return Conclusion(tuple(m for m in stands if m.raw_end <= end), cut, True)

    def break_off(self, raw: str) -> Conclusion:
        """The text breaks off: only what nothing can change any more counts."""
        undecided = self._undecided(self.views(raw), self.matches(raw), runs_end=True, is_active=False)
        return Conclusion(tuple(m for m in self.standing(raw) if m not in undecided), len(raw), False)

    def num_held(self, raw: str, runs_end: bool = False) -> int:
        """The fewest raw characters that a stream can hold after this text, by its keyword rules.

        What has begun is held, and what is complete but undecided. A block that is certain holds what it
        keeps until it has its turn. A rewrite is held while a block that ends before it is undecided: it
        would end the text, and the rewrite would not count. `runs_end`: a phrase for which repeats count as
        one excuses nothing before its last run is over.
        """
        views = self.views(raw)
        starts = self._begun_keywords(views)
        if not self._phrases and not self._has_blocks:
            starts += [m.raw_start for m in self._open_at_end(views) if m.rule.is_active and not m.is_phrase]
            return len(raw) - min(starts, default=len(raw))
        matches = self.matches(raw, with_pii=False)
        undecided = self._undecided(views, matches, runs_end)
        starts += [m.raw_start for m in undecided]
        blocks = [m.raw_end for m in undecided if is_block(m.rule)]
        phrases = [m for m in matches if m.is_phrase and not (runs_end and m.grows)]
        for match in matches:
            if match.is_phrase or any(excuses(phrase, match) for phrase in phrases):
                continue
            if is_block(match.rule) or (
                is_rewrite(match.rule) and min(blocks, default=len(raw)) < match.raw_end
            ):
                starts.append(match.raw_start)
        return len(raw) - min(starts, default=len(raw))

    def num_held_at_most(self, raw: str) -> int:
        """With personal data: from the first place on that may be part of some, or that a match covers which
        waits for it.
        """
        views = self.views(raw)
        view = views[self._foldings[0]]
        starts = self._begun_keywords(views)
        for rule in self.rules:
            if rule.pii and rule.is_active:
                num_rest = len(view.chars.rstrip(PII_CHARS[rule.pii]))
                starts += view.starts[num_rest : num_rest + 1]
        matches = self.matches(raw)
        starts += [m.raw_start for m in self._undecided(views, matches, runs_end=True)]
        starts += [m.raw_start for m in matches if is_block(m.rule)]
        if self._has_blocks:
            # A rewrite waits for blocks that end before it, and so on.
            for match in sorted(matches, key=lambda m: -m.raw_end):
                if match.raw_end > min(starts, default=len(raw)):
                    starts.append(match.raw_start)
        return len(raw) - min(starts, default=len(raw))

    def _begun_keywords(self, views: dict[tuple[bool, ...], View]) -> list[int]:
        """Where the active keywords begin that the text may end within."""
        return [
            views[_folding(pattern.rule)].starts[start]
            for pattern in self._patterns
            if pattern.rule.is_active and not pattern.is_phrase
            for start in _begun(pattern, views[_folding(pattern.rule)])
        ]

    def _undecided(
        self,
        views: dict[tuple[bool, ...], View],
        matches: Sequence[Match],
        runs_end: bool,
        is_active: bool = True,
    ) -> list[Match]:
        """The complete matches that the next characters may undo, lengthen or excuse."""
        begun = self._begun_phrases(views, matches)
        settled = [m for m in matches if m.is_phrase and not m.is_unsure and not (runs_end and m.grows)]
        return [
            match
            for match in matches
            if not match.is_phrase
            and match.rule.is_active >= is_active
            and (
                match.is_open
                or (
                    any(_may_excuse(each, match) for each in begun)
                    and not any(excuses(phrase, match) for phrase in settled)
                )
            )
        ]

    def _open_at_end(self, views: dict[tuple[bool, ...], View]) -> Iterator[Match]:
        """Matches that the next character may undo or lengthen; they end with the text."""
        for pattern in self._patterns:
            view = views[_folding(pattern.rule)]
            match = _occurrence(pattern, view, view.size - pattern.text.size)
            if match is not None and match.is_open:
                yield match

    def _begun_phrases(
        self, views: dict[tuple[bool, ...], View], matches: Sequence[Match]
    ) -> list[tuple[Pattern, int, int]]:
        """(phrase, first unit, its raw offset) of each that the text may end within."""
        begun = []
        for phrase in self._phrases:
            view = views[_folding(phrase.rule)]
            begun += [(phrase, start, view.starts[start]) for start in _begun(phrase, view)]
        begun += [
            (m.pattern, m.start, m.raw_start) for m in matches if m.pattern and m.is_phrase and m.is_open
        ]
        return begun

    # The same by trying.

    def held_by_trying(self, raw: str) -> int:
        """As `num_held`, from the definition: a character is held if two continuations differ on its fate."""
        futures = [self.fates(raw, more) for more in self.continuations()]
        settled = 0
        while settled < len(raw) and len({fates[settled] for fates in futures}) == 1:
            settled += 1
        return len(raw) - settled

    def outputs_by_trying(self, raw: str) -> set[str]:
        """What may have left after this text, one for each continuation: a single one, if enough is held."""
        num_free = len(raw) - self.num_held(raw)
        return {self.conclude(raw + more).output(raw + more, num_free) for more in self.continuations()}

    def continuations(self) -> list[str]:
        """Nothing, a character that belongs to nothing, a letter; and every rest of every pattern."""
        rests = {""}
        for pattern in self._patterns:
            chars = "".join(
                char * count for char, count in zip(pattern.text.chars, pattern.text.counts, strict=True)
            )
            rests |= {chars[size:] for size in range(len(chars))}
        return [rest + tail for rest in sorted(rests) for tail in ("", ",", "œ")]

    def fates(self, raw: str, more: str) -> list[frozenset[tuple[object, ...]]]:
        """Of each character of `raw`, if `more` follows and then the end."""
        matches = self.matches(raw + more)
        phrases = [match for match in matches if match.is_phrase]
        fates: list[set[tuple[object, ...]]] = [set() for _ in raw]
        for match in matches:
            if match.is_phrase or not match.rule.is_active:
                continue
            fate = (match.number, match.raw_start, match.raw_end, any(excuses(p, match) for p in phrases))
            for at in range(match.raw_start, min(match.raw_end, len(raw))):
                fates[at].add(fate)
        return [frozenset(fate) for fate in fates]


def is_block(rule: Rule) -> bool:
    return rule.action == "block" and rule.is_active


def is_rewrite(rule: Rule) -> bool:
    return rule.action in ("mask", "redact") and rule.is_active


def _folding(rule: Rule) -> tuple[bool, ...]:
    return rule.skip_symbols, rule.repeats, rule.digits, rule.leet


def _fits(pattern: Pattern, view: View, start: int, size: int) -> bool:
    """Whether the units from `start` on begin as the pattern does, for `size` units, and rightly."""
    text = pattern.text
    if not view.chars.startswith(text.chars[:size], start):
        return False
    if pattern.rule.repeats and any(
        have < need
        for have, need in zip(view.counts[start : start + size - 1], text.counts[: size - 1], strict=True)
    ):
        return False
    return not (pattern.whole and start and is_word(view.chars[start - 1]) and is_word(text.chars[0]))


def _occurrence(pattern: Pattern, view: View, start: int) -> Match | None:
    size = pattern.text.size
    end = start + size
    if start < 0 or end > view.size or not _fits(pattern, view, start, size):
        return None
    if view.counts[end - 1] < pattern.text.counts[-1]:
        return None
    is_bound = pattern.whole and is_word(pattern.text.chars[-1])
    if is_bound and end < view.size and is_word(view.chars[end]):
        return None
    is_last = end == view.size
    raw = view.starts[start], view.ends[end - 1]
    may_change = is_last and is_bound, is_last and pattern.rule.repeats
    return Match(pattern, pattern.number, pattern.rule, pattern.is_phrase, start, end, *raw, *may_change)


def _occurrences(pattern: Pattern, view: View) -> Iterator[Match]:
    for start in range(view.size - pattern.text.size + 1):
        match = _occurrence(pattern, view, start)
        if match is not None:
            yield match


def _begun(pattern: Pattern, view: View) -> Iterator[int]:
    """The units from which on the text is the beginning of the pattern, and not all of it."""
    size = pattern.text.size
    for start in range(max(0, view.size - size), view.size):
        num_units = view.size - start
        is_part = num_units < size or view.counts[-1] < pattern.text.counts[-1]
        if is_part and _fits(pattern, view, start, num_units):
            yield start


def _personal(number: int, rule: Rule, view: View, start: int, end: int) -> Match:
    raw = view.starts[start], view.ends[end - 1]
    return Match(None, number, rule, False, start, end, *raw, False, False)


def excuses(phrase: Match, match: Match) -> bool:
    """The phrase covers the match: in folded characters where both are read alike, else in raw ones."""
    if phrase.rule is not match.rule and phrase.rule.action != "allow":
        return False
    if _folding(phrase.rule) == _folding(match.rule):
        return phrase.start <= match.start and match.end <= phrase.end
    return phrase.raw_start <= match.raw_start and match.raw_end <= phrase.raw_end


def _may_excuse(begun: tuple[Pattern, int, int], match: Match) -> bool:
    """Whether a phrase that the text ends within will cover the match, once it is complete."""
    phrase, start, raw_start = begun
    if phrase.rule is not match.rule and phrase.rule.action != "allow":
        return False
    if _folding(phrase.rule) == _folding(match.rule):
        return start <= match.start
    return raw_start <= match.raw_start
