"""Rules: what they are, and how a rules file becomes a checked set of them.

A rules file is a YAML list of rules, or a plain list with one keyword a line (empty lines and lines that
start with `#` are skipped) that becomes a single rule. Everything wrong with it is a `RuleError` with the
line number, before anything is served. Fields that this version does not know are errors too, never ignored.

Not here: compiling rules into an automaton (`patterns.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Final, NoReturn

import yaml

from filters.folding import fold

ACTIONS: Final = ("allow", "flag", "mask", "redact", "block")
DIRECTIONS: Final = ("input", "output", "both")
REWRITES: Final = ("mask", "redact")
DEFAULT_REPLACEMENT: Final = {"mask": "*", "redact": "[REDACTED]"}
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

    `replacement`: for redact the text that stands for a match, for mask one character per character; empty
    otherwise.
    `allow`: phrases in which a match is fine. `shadow`: report hits, change nothing.
    """

    id: str
    match: tuple[str, ...]
    action: str
    direction: str = "both"
    whole_word: bool = False
    allow: tuple[str, ...] = ()
    replacement: str = ""
    shadow: bool = False

    @property
    def is_active(self) -> bool:
        """Whether a match changes what leaves."""
        return not self.shadow and self.action in (*REWRITES, "block")


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

    def for_direction(self, direction: str) -> RuleSet:
        """The rules for `input` or `output` alone."""
        if direction not in ("input", "output"):
            raise ValueError(f"direction {direction!r} is neither 'input' nor 'output'")
        return RuleSet(tuple(rule for rule in self.rules if rule.direction in (direction, "both")))


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
        if problem := _keyword_problem(keyword):
            raise RuleError(source, line, problem)
    keywords = tuple(dict.fromkeys(keyword for _, keyword in content))
    rule_id = source.replace("\\", "/").rsplit("/", 1)[-1]
    return RuleSet((Rule(rule_id, keywords, action, replacement=DEFAULT_REPLACEMENT.get(action, "")),))


def _keyword_problem(keyword: str) -> str | None:
    folded = fold(keyword)
    if not folded:
        return f"the keyword {keyword!r} folds to nothing"
    if len(folded) == 1:
        return f"the keyword {keyword!r} folds to a single character, {folded!r}; at least 2 are needed"
    return None


def _load_yaml(text: str, source: str) -> RuleSet:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise RuleError(source, _line_of(error, text), f"not valid YAML: {_problem_of(error)}") from error
    if root is None:
        return RuleSet()
    if not isinstance(root, yaml.SequenceNode):
        raise RuleError(source, root.start_mark.line + 1, "a rules file is one list of rules")
    seen: dict[str, int] = {}
    rules = []
    for node in root.value:
        draft = _Draft(node, source)
        rule = draft.rule()
        if rule.id in seen:
            draft.refuse("id", f"the id {rule.id!r} is already used in line {seen[rule.id]}")
        seen[rule.id] = draft.line_of("id")
        rules.append(rule)
    return RuleSet(tuple(rules))


def _line_of(error: yaml.YAMLError, text: str) -> int:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return int(error.problem_mark.line) + 1
    return text.count("\n", 0, getattr(error, "position", 0)) + 1


def _problem_of(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"


@dataclass
class _Draft:
    """One rule's YAML node, being checked."""

    node: yaml.Node
    source: str
    values: dict[str, yaml.Node] = field(default_factory=dict)

    def rule(self) -> Rule:
        self._read_fields()
        action = self._word("action", ACTIONS, None)
        rule = Rule(
            id=self._id(),
            match=self._texts("match", _keyword_problem),
            action=action,
            direction=self._word("direction", DIRECTIONS, "both"),
            whole_word=self._flag("whole_word"),
            allow=self._texts("allow", _phrase_problem) if "allow" in self.values else (),
            replacement=self._replacement(action),
            shadow=self._flag("shadow"),
        )
        self._check_whole(rule)
        return rule

    def line_of(self, name: str) -> int:
        return int(self.values.get(name, self.node).start_mark.line) + 1

    def refuse(self, name: str, problem: str) -> NoReturn:
        raise RuleError(self.source, self.line_of(name), problem)

    def _read_fields(self) -> None:
        known = [entry.name for entry in fields(Rule)]
        if not isinstance(self.node, yaml.MappingNode):
            self.refuse("", "a rule is a mapping of fields, as in `- id: …`")
        for key, value in self.node.value:
            line = key.start_mark.line + 1
            if key.value not in known:
                raise RuleError(
                    self.source, line, f"unknown field {key.value!r}; known fields: {', '.join(known)}"
                )
            if key.value in self.values:
                raise RuleError(self.source, line, f"the field {key.value!r} is given twice")
            self.values[key.value] = value

    def _scalar(self, name: str, node: yaml.Node) -> str:
        """A scalar as it is written: `110` and `no` are keywords like any other."""
        if not isinstance(node, yaml.ScalarNode) or node.tag.endswith(":null"):
            raise RuleError(self.source, node.start_mark.line + 1, f"{name} must be text")
        return str(node.value)

    def _id(self) -> str:
        if "id" not in self.values:
            self.refuse("id", "a rule needs an id")
        rule_id = self._scalar("id", self.values["id"])
        if not rule_id.strip():
            self.refuse("id", "the id is empty")
        if rule_id == MAX_HOLD_ID:
            self.refuse("id", f"the id {rule_id!r} is reserved")
        return rule_id

    def _word(self, name: str, allowed: tuple[str, ...], default: str | None) -> str:
        if name not in self.values:
            if default is None:
                self.refuse(name, f"a rule needs {name}: one of {', '.join(allowed)}")
            return default
        word = self._scalar(name, self.values[name])
        if word not in allowed:
            self.refuse(name, f"{name} is {word!r}; it must be one of {', '.join(allowed)}")
        return word

    def _flag(self, name: str) -> bool:
        if name not in self.values:
            return False
        node: Any = self.values[name]
        if not node.tag.endswith(":bool"):
            self.refuse(name, f"{name} must be true or false")
        return str(node.value).lower() in ("true", "yes", "on")

    def _texts(self, name: str, problem_of: Callable[[str], str | None]) -> tuple[str, ...]:
        """One text or a list of them, each checked."""
        if name not in self.values:
            self.refuse(name, f"a rule needs {name}: a keyword or a list of keywords")
        node = self.values[name]
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not nodes:
            self.refuse(name, f"{name} is an empty list")
        texts: dict[str, None] = {}
        for item in nodes:
            text = self._scalar(name, item)
            if problem := problem_of(text):
                raise RuleError(self.source, item.start_mark.line + 1, problem)
            texts[text] = None
        return tuple(texts)

    def _replacement(self, action: str) -> str:
        if "replacement" not in self.values:
            return DEFAULT_REPLACEMENT.get(action, "")
        replacement = self._scalar("replacement", self.values["replacement"])
        if action not in REWRITES:
            self.refuse("replacement", f"replacement has no meaning with action {action}")
        if not replacement:
            self.refuse("replacement", "the replacement is empty")
        if action == "mask" and len(replacement) != 1:
            num_chars = len(replacement)
            self.refuse(
                "replacement", f"a mask is one character that stands for each; this one has {num_chars}"
            )
        return replacement

    def _check_whole(self, rule: Rule) -> None:
        """What no single field shows."""
        keywords = [fold(keyword) for keyword in rule.match]
        if rule.action == "allow" and (rule.allow or rule.shadow):
            name = "allow" if rule.allow else "shadow"
            self.refuse(name, f"{name} has no meaning with action allow")
        for phrase in rule.allow:
            folded = fold(phrase)
            if folded in keywords:
                self.refuse("allow", f"the allow phrase {phrase!r} is a keyword of the same rule")
            if not any(keyword in folded for keyword in keywords):
                self.refuse("allow", f"the allow phrase {phrase!r} contains no keyword of its rule")
        if any(keyword in fold(rule.replacement) for keyword in keywords):
            self.refuse("replacement", "the replacement contains a keyword of its rule")


def _phrase_problem(phrase: str) -> str | None:
    return None if fold(phrase) else f"the allow phrase {phrase!r} folds to nothing"
