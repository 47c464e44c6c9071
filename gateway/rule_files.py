"""The rule files of the settings, as one rule set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from filters.rules import RuleError, RuleSet, load_rules


def read_rules(path: Path, action: str) -> RuleSet:
    """The rules of one file; `action` is what a plain word list does.

    Raises `RuleError`, `OSError`.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RuleError(str(path), 1, f"not UTF-8 at byte {error.start}") from error
    return load_rules(text, str(path), action)


def read_all_rules(paths: Sequence[str], action: str) -> RuleSet:
    """The rules of all files in their order. Raises like `read_rules`, also for an id that two files use."""
    rules = []
    file_of: dict[str, str] = {}
    for path in paths:
        for rule in read_rules(Path(path), action).rules:
            if rule.id in file_of:
                raise RuleError(path, 1, f"the rule id {rule.id!r} is already used in {file_of[rule.id]}")
            file_of[rule.id] = path
            rules.append(rule)
    return RuleSet(tuple(rules))
