"""Where settings come from: flags, then HEADRACE_* variables, then the YAML file, then the defaults.

pydantic-settings reads and converts; the table in `gateway/settings.py` says what is allowed. Every problem
is found before any is reported, and each names the setting, its source, the value (unless it is a secret) and
what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from gateway.prompt_settings import plain_templates, plain_warm, read_templates, read_warm
from gateway.settings import ENV_PREFIX, MASK, OTHER_VARIABLES, Settings
from gateway.settings_check import check_together
from gateway.settings_table import Setting, table, values
from gateway.settings_text import allowed, shown

_SIZE: Final = re.compile(r"(\d{1,18})\s*([kmg]?)(?:i?b)?", re.IGNORECASE)
_SHIFTS: Final = {"": 0, "k": 10, "m": 20, "g": 30}
_RICH: Final[Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]] = {  # to and from plain values
    "templates": (read_templates, plain_templates),
    "warm": (read_warm, plain_warm),
}


class SettingsError(Exception):
    """The settings cannot be used. `problems` has one line for each reason."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and each one's source: `flag --port`, `variable HEADRACE_PORT`, `FILE: port`, `default`."""

    settings: Settings
    sources: Mapping[str, str]


def load(flags: Mapping[str, Any] | None = None) -> Loaded:
    """The effective settings. `flags` holds only what was given, by setting name. Raises `SettingsError`."""
    flags = flags or {}
    problems = list(_unknown_variables(os.environ))
    path = flags["config"] if "config" in flags else os.environ.get(ENV_PREFIX + "CONFIG")
    in_file = _read_file(Path(str(path)).expanduser(), problems) if path else {}
    model = _model(in_file)
    from_env = EnvSettingsSource(model)()
    sources = {name: f"{path}: {name}" for name in in_file}
    sources |= {name: f"variable {ENV_PREFIX}{name.upper()}" for name in from_env}
    sources |= {row.name: f"flag {row.flag}" for row in table() if row.name in flags}
    try:
        settings = _grouped(model(**flags))
    except ValidationError as error:
        problems += [line for each in error.errors() for line in _problems(each, sources)]
        raise SettingsError(problems) from None
    settings = _read_secret(settings, problems)
    problems += check_together(settings)
    if problems:
        raise SettingsError(problems)
    return Loaded(settings, {row.name: sources.get(row.name, "default") for row in table()})


def restore(given: Mapping[str, Any]) -> Settings:
    """Settings from `plain()` of another process, which has read the file: it may have changed since.

    Raises `SettingsError`.
    """
    return load(given).settings


def plain(settings: Settings) -> dict[str, Any]:
    """All values as JSON types, secrets included: for a child process, by a private pipe only."""
    given = values(settings)
    given["config"] = given["link_secret_file"] = None  # both are resolved
    given |= {name: to_plain(given[name]) for name, (_, to_plain) in _RICH.items()}
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def _model(in_file: Mapping[str, Any]) -> type[BaseSettings]:
    """The table as a pydantic model that reads flags over variables over the file."""

    class Sourced(BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=ENV_PREFIX,
            env_ignore_empty=True,
            extra="forbid",
            protected_namespaces=(),
            validate_default=True,
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, dict(in_file))

    fields: dict[str, Any] = {row.name: (_annotation(row), row.default) for row in table()}
    return create_model("Model", __base__=Sourced, **fields)


def _annotation(row: Setting) -> Any:
    """The field's pydantic type, with the table's bounds."""
    if row.about.file_only:
        return Annotated[Any, BeforeValidator(_RICH[row.name][0])]
    if row.choices or row.kind is bool:
        return row.type
    if row.is_list:
        split = shlex.split if row.name == "engine_args" else _split_commas
        return Annotated[row.type, NoDecode, BeforeValidator(_list_of(split))]
    if row.kind is Path:
        kind: Any = Annotated[
            Path, BeforeValidator(_not_empty), AfterValidator(_path_check(row.about.is_file))
        ]
    elif row.kind is str:
        kind = Annotated[str, BeforeValidator(_not_empty)]
    else:
        kind = _number(row)
    return kind if row.type is row.kind else kind | None


def _number(row: Setting) -> Any:
    about = row.about
    read = BeforeValidator(_read_size if about.unit == "bytes" else _not_bool)
    bounds = Field(ge=about.at_least, gt=about.above, le=about.at_most)
    finite = () if row.kind is int else (Field(allow_inf_nan=False),)
    return Annotated[(row.kind, read, bounds, *finite)]


def _list_of(split: Callable[[str], list[str]]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        items = split(value) if isinstance(value, str) else value
        if isinstance(items, list | tuple) and not all(items):
            raise ValueError("an empty entry")
        return items

    return read


def _split_commas(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _not_empty(value: Any) -> Any:
    if value == "":
        raise ValueError("empty")
    return value


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):  # YAML's `yes`; pydantic would read it as 1
        raise ValueError("not a number")
    return value


def _read_size(value: Any) -> Any:
    """`65536`, `64KiB`, `64k`: units are powers of 1,024."""
    if not isinstance(value, str):
        return _not_bool(value)
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError("not a size")
    return int(match[1]) << _SHIFTS[match[2].lower()]


def _path_check(is_file: bool) -> Callable[[Path], Path]:
    def check(path: Path) -> Path:
        path = path.expanduser()
        if is_file and not path.is_file():
            raise ValueError("there is no such file")
        return path

    return check


def _grouped(flat: BaseSettings) -> Settings:
    """The model's values in the groups of `Settings`."""
    groups: dict[str, dict[str, Any]] = {}
    for row in table():
        groups.setdefault(row.group, {})[row.name] = getattr(flat, row.name)
    defaults = Settings()
    return Settings(
        **{name: dataclasses.replace(getattr(defaults, name), **given) for name, given in groups.items()}
    )


def _read_secret(settings: Settings, problems: list[str]) -> Settings:
    """The link's secret out of its file. Both a secret and a file is a problem, and so is an empty file."""
    link = settings.link
    if link.link_secret_file is None:
        return settings
    if link.link_secret is not None:
        problems.append("link_secret and link_secret_file are both given; only one is allowed")
        return settings
    try:
        secret = link.link_secret_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"link_secret_file: {link.link_secret_file} cannot be read: {error}")
        return settings
    if not secret:
        problems.append(f"link_secret_file: {link.link_secret_file} is empty")
    return dataclasses.replace(settings, link=dataclasses.replace(link, link_secret=secret or None))


def _read_file(path: Path, problems: list[str]) -> dict[str, Any]:
    """The mapping in a YAML file, without what the table does not know; that is reported."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"config: {path} cannot be read: {_without_content(error)}")
        return {}
    if not isinstance(content, dict | None):
        problems.append(f"config: {path} must hold `name: value` lines, not a {type(content).__name__}")
        return {}
    content = content or {}
    known = {row.name for row in table() if row.name != "config"}
    problems += [
        f"{path}: unknown setting {key!r}{_did_you_mean(str(key), known)}"
        for key in content
        if key not in known
    ]
    return {key: value for key, value in content.items() if key in known}


def _without_content(error: Exception) -> str:
    """What is wrong with a YAML file. The parser's own words quote its lines, and one may hold a key."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"no valid YAML at line {mark.line + 1}, column {mark.column + 1}"
    return str(error)


def _unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    known = {row.env_name for row in table() if not row.about.file_only}
    for name in environ:
        if name.startswith(ENV_PREFIX) and not name.startswith(OTHER_VARIABLES) and name not in known:
            yield f"unknown variable {name}{_did_you_mean(name, known)}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _problems(error: Any, sources: Mapping[str, str]) -> Iterator[str]:
    """The lines for one of pydantic's errors. Its own text is used where the table has nothing better."""
    name = str(error["loc"][0])
    row = {row.name: row for row in table()}[name]
    source = sources.get(name, "default")
    if row.about.file_only:  # these name their entry themselves
        yield from (source.removesuffix(name) + line for line in error["ctx"]["error"].problems)
        return
    value = MASK if row.about.secret else shown(error["input"])
    missing = " (there is no such file)" if "no such file" in error["msg"] else ""
    yield f"{name} ({source}): {value} is not allowed{missing}; it must be {allowed(row)}"
