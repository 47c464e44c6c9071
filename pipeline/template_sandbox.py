"""The Jinja environment of chat templates, as Hugging Face's `apply_chat_template` sets it up.

A sandbox without side effects, blocks trimmed, `tojson` without HTML escaping, `raise_exception`, loop
controls and the `generation` tag. Not here: what is rendered with it (`rendering.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it renders its body."""

    tags: Final = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Jinja's hook: the statements within the tag, in their own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    """What a template calls for a chat that it does not take."""
    raise TemplateError(message)


def strftime(now_s: float) -> Callable[[str], str]:
    """The template's clock: local time, as in Hugging Face's."""
    return lambda format_: datetime.fromtimestamp(now_s).strftime(format_)


# What JSON's objects have beside their keys, and methods of strings that can do no harm.
_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
_SAFE_STRING_METHODS: Final = frozenset(
    ("startswith", "endswith", "split", "strip", "lstrip", "rstrip", "replace", "upper", "lower", "title")
)


_SAFE_ATTRIBUTES: Final[Mapping[type, frozenset[str]]] = {
    str: _SAFE_STRING_METHODS,
    LoopContext: frozenset(("index", "index0", "first", "last", "length", "previtem", "nextitem")),
}
_SCOPES: Final = frozenset(("_loop_vars", "_block_vars"))  # which Jinja hands to whatever it calls


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with short cuts for what templates do most: a third of the time per message."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if attribute in _SAFE_ATTRIBUTES.get(kind, ()):
            return getattr(obj, attribute)
        if kind is Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            type(obj) is BuiltinMethodType
            and type(obj.__self__) is str
            and obj.__name__ in _SAFE_STRING_METHODS
            and kwargs.keys() <= _SCOPES
        ):
            return obj(*args)
        return super().call(context, obj, *args, **kwargs)


def new_environment() -> ImmutableSandboxedEnvironment:
    """One environment per compiled template: its globals are the template's own."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    return environment


def parse(environment: ImmutableSandboxedEnvironment, source: str) -> nodes.Template:
    """A template's syntax tree. Raises `ValueError` with the line number."""
    try:
        return environment.parse(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template is broken in line {error.lineno}: {error.message}") from error
