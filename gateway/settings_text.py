"""Settings as people read them: what a setting allows, how a value is written, what stays masked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from gateway.settings import MASK
from gateway.settings_table import Setting, table

_SIZES: Final = ((30, "GiB"), (20, "MiB"), (10, "KiB"))
_PASSWORD: Final = re.compile(r"(?<=://)([^/@\s]*:)[^/@\s]+(?=@)")
# Engine arguments that hold a secret, as `--hf-token` does; `--max-num-batched-tokens` does not.
_SECRET_ARGUMENT: Final = re.compile(r"--(?:.*[-_.])?(?:token|key|secret|password)")
_MAX_SHOWN_CHARS: Final = 200  # of a bad value: enough to recognise it


def allowed(row: Setting) -> str:
    """What the setting takes, in words: `a whole number from 0 to 65535`."""
    if row.choices:
        return "one of " + ", ".join(row.choices)
    if row.kind is bool:
        return "true or false"
    if row.kind is Path:
        return "the path of a file that exists" if row.about.is_file else "a path"
    if row.is_list:
        return "one or more texts"
    if row.kind is str:
        return "a text"
    return ("a whole number" if row.kind is int else "a number") + _bounds(row) + _unit(row)


def _bounds(row: Setting) -> str:
    about = row.about
    if about.at_least is not None and about.at_most is not None:
        return f" from {about.at_least:g} to {_number(about.at_most)}"
    parts = [f"over {about.above:g}"] if about.above is not None else []
    parts += [f"of at least {_number(about.at_least)}"] if about.at_least is not None else []
    parts += [f"at most {_number(about.at_most)}"] if about.at_most is not None else []
    return " " + " and ".join(parts) if parts else ""


def _unit(row: Setting) -> str:
    unit = row.about.unit
    return "" if unit in ("", "number", "port") else f", in {unit}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def shown(value: Any) -> str:
    """A value as an error or a listing shows it: on one line, bounded, passwords in addresses masked."""
    text = _PASSWORD.sub(rf"\1{MASK}", value if isinstance(value, str) else str(value))
    text = repr(text) if isinstance(value, str) else text
    return _bounded(text)


def _bounded(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


def written(row: Setting, value: Any) -> str:
    """A setting's value as one would write it; empty for unset, masked for a secret."""
    if value is None or value == ():
        return ""
    if row.about.secret:
        return ", ".join([MASK] * (len(value) if row.is_list else 1))
    if row.about.file_only:
        return _bounded(", ".join(map(str, value)))
    if row.is_list:
        is_command = row.name == "engine_args"
        return shown_plain(shlex.join(_masked(value)) if is_command else ", ".join(value))
    if row.kind is bool:
        return "true" if value else "false"
    if row.about.unit == "bytes":
        return _size(value)
    return f"{value:g}" if isinstance(value, float) else shown_plain(str(value))


def _masked(arguments: Sequence[str]) -> list[str]:
    """Engine arguments without their secrets, be they `--name value` or `--name=value`."""
    shown = []
    is_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        names_secret = _SECRET_ARGUMENT.fullmatch(name) is not None
        if names_secret and equals:
            argument = f"{name}={MASK}"
        elif is_secret and not argument.startswith("--"):
            argument = MASK
        shown.append(argument)
        is_secret = names_secret and not equals
    return shown


def shown_plain(text: str) -> str:
    """The text with passwords in addresses masked."""
    return _PASSWORD.sub(rf"\1{MASK}", text)


def _size(num_bytes: int) -> str:
    for shift, unit in _SIZES:
        if num_bytes and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift} {unit}"
    return str(num_bytes)


def markdown() -> str:
    """The table as README.md holds it: one part per topic."""
    parts = []
    for topic, rows in by_topic(table()).items():
        lines = [
            f"**{topic}**",
            "",
            "| setting | default | unit | what it is | commands |",
            "|---|---|---|---|---|",
        ]
        lines += [_line(row) for row in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def by_topic(rows: Iterable[Setting]) -> dict[str, list[Setting]]:
    """The rows under their topics, in order."""
    topics: dict[str, list[Setting]] = {}
    for row in rows:
        topics.setdefault(row.topic, []).append(row)
    return topics


def _line(row: Setting) -> str:
    choices = f" ({', '.join(row.choices)})" if row.choices else ""
    default = written(row, row.default)
    cells = (
        f"`{row.name}`",
        f"`{default}`" if default else "",
        row.about.unit,
        row.about.help + choices,
        ", ".join(command for command in ("serve", "gateway", "worker") if command in row.commands),
    )
    return "| " + " | ".join(cells) + " |"
