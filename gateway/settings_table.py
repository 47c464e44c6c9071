"""The settings as one table of rows, and that table in Markdown: `python -m gateway.settings_table`."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from gateway.settings import ENV_PREFIX, Settings
from gateway.settings_field import About


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. `group` is the field of `Settings` that holds it; `type` is the field's plain annotation."""

    name: str
    group: str
    topic: str
    type: Any
    default: Any
    about: About
    commands: frozenset[str]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env_name(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def kind(self) -> Any:
        """The type without `| None`, and without the tuple of a list."""
        arguments = [
            argument for argument in typing.get_args(self.type) if argument not in (type(None), Ellipsis)
        ]
        return self.type if self.choices or not arguments else arguments[0]


@functools.cache
def table() -> tuple[Setting, ...]:
    """Every setting, in the order of the groups and their fields."""
    return tuple(row for group, cls in typing.get_type_hints(Settings).items() for row in _rows(group, cls))


def _rows(group: str, cls: Any) -> Iterator[Setting]:
    hints = typing.get_type_hints(cls, include_extras=True)
    for each in dataclasses.fields(cls):
        if typing.get_origin(hints[each.name]) is Annotated:
            kind, about = typing.get_args(hints[each.name])
            yield Setting(
                each.name, group, cls.TOPIC, kind, each.default, about, about.commands or cls.COMMANDS
            )


def values(settings: Settings) -> dict[str, Any]:
    """Every setting's value by name, secrets included."""
    return {row.name: getattr(getattr(settings, row.group), row.name) for row in table()}


def with_values(settings: Settings, **changed: Any) -> Settings:
    """A copy with some settings changed, by name. The values are not checked."""
    groups: dict[str, dict[str, Any]] = {}
    rows = {row.name: row for row in table()}
    for name, value in changed.items():
        groups.setdefault(rows[name].group, {})[name] = value
    new = {group: dataclasses.replace(getattr(settings, group), **fields) for group, fields in groups.items()}
    return dataclasses.replace(settings, **new)


def main() -> None:
    from gateway.settings_text import markdown  # it imports this module

    print(markdown(), end="")


if __name__ == "__main__":
    main()
