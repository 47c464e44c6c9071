"""Rules: what they are, and how a rules file becomes a checked set of them.

A rules file is a YAML list of rules, or a plain list with one keyword a line (empty lines and lines that
start with `#` are skipped) that becomes a single rule. Everything wrong with it is a `RuleError` with the
line number, before anything is served. Fields that this version does not know are errors too: nothing is
ignored.

Not here: compiling rules (`patterns.py`), and reading YAML as such (`yaml_fields.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final, NoReturn

import yaml

from filters.folding import is_word_char
from filters.hit import CHANGING
from filters.pii import DETECTORS, PII_CLASSES
from filters.rule_folding import DEFAULT, FOLDINGS, Folding
from filters.yaml_fields import Fields, composed

ACTIONS: Final = ("allow", "flag", "mask", "redact", "block")
DIRECTIONS: Final = ("input", "output", "both")
CHANNELS: Final = ("content", "reasoning", "tool_name", "tool_arguments", "refusal")
REWRITES: Final = ("mask", "redact")
FAILS: Final = ("closed", "open")
DEFAULT_REPLACEMENT: Final = {"mask": "*", "redact": "[REDACTED]"}
PII_REPLACEMENT: Final = dict(zip(PII_CLASSES, ("[PHONE]", "[EMAIL]", "[CARD]", "[ID]", "[IP]"), strict=True))
MAX_HOLD_ID: Final = "max_hold"  # the rule id under which a stream reports that it held text for too long


class RuleError(ValueError):
    """A rules file is wrong. The message begins with `source:line:`; lines count from 1."""

    def __init__(self, source: str, line: int, problem: str) -> None:
        super().__init__(f"{source}:{line}: {problem}")
        self.source = source
        self.line = line


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, checked. Keywords and phrases are as written, not folded.

    `match`: keywords; empty if `pii` names a class of personal data instead.
    `replacement`: for redact the text that stands for a match, for mask one character per character; empty
    otherwise.
    `allow`: phrases in which a match is fine. `shadow`: report hits, change nothing.
    `channels`: the kinds of text it applies to. All that a client sends is `content`.
    `skip_symbols`, `repeats`, `digits`, `leet`: the foldings of `rule_folding.py`.
    `fail`: what happens to text that waits for this rule when the answer breaks off: `closed` keeps it back,
    `open` lets it go.
    """

    id: str
    match: tuple[str, ...]
    action: str
    direction: str = "both"
    whole_word: bool = False
    allow: tuple[str, ...] = ()
    replacement: str = ""
    shadow: bool = False
    pii: str = ""
    channels: tuple[str, ...] = CHANNELS
    skip_symbols: bool = False
    repeats: bool = False
    digits: bool = False
    leet: bool = False
    fail: str = "closed"

    @property
    def is_active(self) -> bool:
        """Whether a match changes what leaves."""
        return not self.shadow and self.action in CHANGING

    @property
    def folding(self) -> Folding:
        return Folding(self.skip_symbols, self.repeats, self.digits, self.leet)

    @property
    def blocks(self) -> bool:
        """Whether a match ends the text."""
        return self.action == "block" and not self.shadow

    @property
    def rewrites(self) -> bool:
        """Whether a match leaves as something else."""
        return self.action in REWRITES and not self.shadow

    def holds(self, closed_only: bool = False) -> bool:
        """Whether text waits for this rule; with `closed_only` also when the text breaks off."""
        return self.is_active and not (closed_only and self.fail == "open")


@dataclass(frozen=True, slots=True)
class RuleSet:
    """All rules of a file, in its order. Ids are unique."""

    rules: tuple[Rule, ...] = ()

    def __len__(self) -> int:
        return len(self.rules)

    @property
    def num_keywords(self) -> int:
        return sum(len(rule.match) for rule in self.rules)

    @property
    def fingerprint(self) -> str:
        """Equal for sets of equal rules in the same order: 64 hex digits."""
        return hashlib.sha256(repr(self.rules).encode("utf-8", "surrogatepass")).hexdigest()

    def for_direction(self, direction: str, channel: str = "content") -> RuleSet:
        """The rules for one channel of `input` or `output`."""
        if direction not in ("input", "output"):
            raise ValueError(f"direction {direction!r} is neither 'input' nor 'output'")
        if channel not in CHANNELS:
            raise ValueError(f"channel {channel!r} is not one of {', '.join(CHANNELS)}")
        return RuleSet(
            tuple(
                rule
                for rule in self.rules
                if rule.direction in (direction, "both") and channel in rule.channels
            )
        )


def load_rules(text: str, source: str, default_action: str = "block") -> RuleSet:
    """Rules from the text of a file. `source` names it in errors; `default_action` is a plain word list's.

    It is YAML if the name ends in `.yaml` or `.yml`, or its first line of content starts with `- ` or `[`.
    Raises `RuleError`.
    """
    if default_action not in ACTIONS:
        raise ValueError(f"default_action {default_action!r} is not one of {', '.join(ACTIONS)}")
    content = list(_content_lines(text))
    first = content[0][1] if content else ""
    if source.endswith((".yaml", ".yml")) or first.startswith(("- ", "[")) or first == "-":
        return _load_yaml(text, source)
    return _load_word_list(content, source, default_action)


def _content_lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        word = line.strip()
        if word and not word.startswith("#"):
            yield number, word


def _load_word_list(content: list[tuple[int, str]], source: str, action: str) -> RuleSet:
    if not content:
        return RuleSet()
    for line, keyword in content:
        if problem := _keyword_problem(keyword, DEFAULT):
            raise RuleError(source, line, problem)
    keywords = tuple(dict.fromkeys(keyword for _, keyword in content))
    rule_id = source.replace("\\", "/").rsplit("/", 1)[-1]
    return RuleSet((Rule(rule_id, keywords, action, replacement=DEFAULT_REPLACEMENT.get(action, "")),))


def _load_yaml(text: str, source: str) -> RuleSet:
    def refuse(line: int, problem: str) -> NoReturn:
        raise RuleError(source, line, problem)

    root = composed(text, refuse)
    if root is None:
        return RuleSet()
    if not isinstance(root, yaml.SequenceNode):
        refuse(root.start_mark.line + 1, "a rules file is one list of rules")
    known = [entry.name for entry in fields(Rule)]
    seen: dict[str, int] = {}
    rules = []
    for node in root.value:
        draft = Fields(node, known, refuse)
        rule = _rule(draft)
        if rule.id in seen:
            draft.refuse("id", f"the id {rule.id!r} is already used in line {seen[rule.id]}")
        seen[rule.id] = draft.line_of("id")
        rules.append(rule)
    return RuleSet(tuple(rules))


def _rule(draft: Fields) -> Rule:
    """One rule, checked as a whole too."""
    action = draft.word("action", ACTIONS, None)
    folding = Folding(**{name: draft.flag(name) for name in FOLDINGS})
    rule = Rule(
        id=_id(draft),
        match=draft.texts("match", lambda keyword: _keyword_problem(keyword, folding))
        if "match" in draft
        else (),
        action=action,
        direction=draft.word("direction", DIRECTIONS, "both"),
        whole_word=draft.flag("whole_word"),
        allow=draft.texts("allow", lambda phrase: _phrase_problem(phrase, folding))
        if "allow" in draft
        else (),
        replacement=_replacement(draft, action),
        shadow=draft.flag("shadow"),
        pii=draft.word("pii", PII_CLASSES, ""),
        channels=draft.texts("channels", _channel_problem) if "channels" in draft else CHANNELS,
        **{name: getattr(folding, name) for name in FOLDINGS},
        fail=_fail(draft, action),
    )
    _check_combination(draft, rule)
    _check_phrases(draft, rule)
    return rule


def _id(draft: Fields) -> str:
    if "id" not in draft:
        draft.refuse("id", "a rule needs an id")
    rule_id = draft.text("id")
    if not rule_id.strip():
        draft.refuse("id", "the id is empty")
    if rule_id == MAX_HOLD_ID:
        draft.refuse("id", f"the id {rule_id!r} is reserved")
    return rule_id


def _replacement(draft: Fields, action: str) -> str:
    if "replacement" not in draft:
        if action == "redact" and "pii" in draft:
            return PII_REPLACEMENT.get(draft.text("pii"), "")
        return DEFAULT_REPLACEMENT.get(action, "")
    replacement = draft.text("replacement")
    if action not in REWRITES:
        draft.refuse("replacement", f"replacement has no meaning with action {action}")
    if not replacement:
        draft.refuse("replacement", "the replacement is empty")
    if action == "mask" and len(replacement) != 1:
        num_chars = len(replacement)
        draft.refuse("replacement", f"a mask is one character that stands for each; this one has {num_chars}")
    return replacement


def _fail(draft: Fields, action: str) -> str:
    fail = draft.word("fail", FAILS, FAILS[0])
    if "fail" in draft:
        for reason, is_so in (
            (f"action {action}", action in ("allow", "flag")),
            ("shadow", draft.flag("shadow")),
            ("direction input: it has all of its text", draft.word("direction", DIRECTIONS, "") == "input"),
        ):
            if is_so:
                draft.refuse("fail", f"fail has no meaning with {reason}")
    return fail


def _keyword_problem(keyword: str, folding: Folding) -> str | None:
    folded = folding.fold(keyword)
    if not folded:
        return f"the keyword {keyword!r} folds to nothing"
    if len(folded) == 1:
        return f"the keyword {keyword!r} folds to a single character, {folded!r}; at least 2 are needed"
    if folding.skip_symbols and all(map(is_word_char, folded)):
        return f"the keyword {keyword!r} is Latin: with skip_symbols `was small` would match `ass`"
    return None


def _phrase_problem(phrase: str, folding: Folding) -> str | None:
    return None if folding.fold(phrase) else f"the allow phrase {phrase!r} folds to nothing"


def _channel_problem(channel: str) -> str | None:
    if channel in CHANNELS:
        return None
    return f"there is no channel {channel!r}; the channels are {', '.join(CHANNELS)}"


def _check_combination(draft: Fields, rule: Rule) -> None:
    """Fields that need or exclude each other."""
    if not rule.match and not rule.pii:
        draft.refuse("match", "a rule needs match (a keyword or a list of keywords) or pii")
    if rule.match and rule.pii:
        draft.refuse("pii", "a rule has either match or pii; make two rules of it")
    senseless: list[tuple[str, bool, tuple[str, ...]]] = [
        ("action allow", rule.action == "allow", ("allow", "shadow", "pii")),
        ("pii", bool(rule.pii), ("whole_word", *FOLDINGS)),
        # Symbols are gone before leet could read them as letters, and so are the borders of words.
        ("skip_symbols", rule.skip_symbols, ("whole_word", "leet")),
    ]
    for reason, is_so, names in senseless:
        for name in names:
            if is_so and getattr(rule, name):
                draft.refuse(name, f"{name} has no meaning with {reason}")


def _check_phrases(draft: Fields, rule: Rule) -> None:
    """Allow phrases that excuse nothing, and a replacement that is to be replaced."""
    if not rule.allow and not rule.replacement:
        return
    keywords = set(map(rule.folding.fold, rule.match))
    for phrase in rule.allow:
        folded = rule.folding.fold(phrase)
        if folded in keywords:
            draft.refuse("allow", f"the allow phrase {phrase!r} is a keyword of the same rule")
        if not _contains_match(folded, rule.pii, keywords):
            what = f"no {rule.pii}" if rule.pii else "no keyword of its rule"
            draft.refuse("allow", f"the allow phrase {phrase!r} contains {what}")
    if _contains_match(rule.folding.fold(rule.replacement), rule.pii, keywords):
        draft.refuse("replacement", f"the replacement contains a {rule.pii or 'keyword'} of its rule")


def _contains_match(folded: str, pii: str, keywords: set[str]) -> bool:
    if pii:
        return any(kind == pii for _, _, kind in DETECTORS[pii](folded, 0, True)[0])
    return any(keyword in folded for keyword in keywords)
