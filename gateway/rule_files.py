"""The rule files of the settings, as one rule set. Watching them is `live_rules.py`."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from filters.rules import RuleError, RuleSet, load_rules

MAX_BYTES: Final = 64 << 20  # millions of keywords


def read_text(path: str) -> str:
    """The text of a rule file. Raises `RuleError` if it is not UTF-8, `OSError`."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RuleError(path, 1, f"not UTF-8 at byte {error.start}") from error


def read_regular(path: str) -> str:
    """`read_text` of what is a file and not too large: a pipe would keep its reader for ever.

    Raises `OSError` for anything else, too.
    """
    try:
        info = Path(path).expanduser().stat()
    except OSError:
        return read_text(path)  # which says what is wrong
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
        raise OSError(errno.EINVAL, "Not a regular file", path)
    if info.st_size > MAX_BYTES:
        raise OSError(errno.EFBIG, f"File of {info.st_size} bytes; the limit is {MAX_BYTES}", path)
    return read_text(path)


def read_rules(path: Path, action: str) -> RuleSet:
    """The rules of one file; `action` is what a plain word list does.

    Raises `RuleError`, `OSError`.
    """
    return load_rules(read_text(str(path)), str(path), action)


def read_all_rules(paths: Sequence[str], action: str) -> RuleSet:
    """The rules of all files in their order. Raises like `read_rules`, also for an id that two files use."""
    return parse_all_rules([(path, read_text(path)) for path in paths], action)


def parse_all_rules(texts: Iterable[tuple[str, str]], action: str) -> RuleSet:
    """The rules of all files, of which path and text are given. Raises `RuleError`."""
    rules = []
    file_of: dict[str, str] = {}
    for path, text in texts:
        for rule in load_rules(text, path, action).rules:
            if rule.id in file_of:
                raise RuleError(path, 1, f"the rule id {rule.id!r} is already used in {file_of[rule.id]}")
            file_of[rule.id] = path
            rules.append(rule)
    return RuleSet(tuple(rules))
