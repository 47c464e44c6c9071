"""The short cuts of the template sandbox give what Jinja's own sandbox gives, and no more."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.template_sandbox import new_environment, parse, strftime

VALUES: dict[str, Any] = {
    "message": {"role": "user", "content": " a,b ", "items": "shadowed", "_hidden": "x", "__class__": "y"},
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "text": " A<b>,c ",
    "numbers": [1, 2, 3],
}
EXPRESSIONS = [
    "message.role",
    "message.missing is defined",
    "message.missing.deeper is defined",
    "message.items is string",
    "message.get('role')",
    "message._hidden",
    "message.__class__",
    "message['__class__']",
    "text.__class__",
    "text.__class__.__mro__",
    "text.format",
    "text.format()",
    "'{0.__class__}'.format(text)",
    "'{}'.format(text)",
    "text.strip().split(',')",
    "text.split(sep=',')",
    "text.split(',', maxsplit=1)",
    "text.replace('A', 'B').lower().upper().title()",
    "text.startswith(' A') and text.endswith('c ')",
    "text.lstrip() + text.rstrip()",
    "text.startswith()",
    "text.missing is defined",
    "text.missing()",
    "text.join(['a', 'b'])",
    "text.encode().decode()",
    "numbers.append(4)",
    "numbers.pop()",
    "message.update({'a': 1})",
    "message.pop('role')",
    "namespace(a=1).a",
    "namespace(a=1).b is defined",
    "namespace(a=1)._Namespace__attrs",
    "namespace(a=1).__class__",
    "namespace(a=1).__init__",
    "range(3) | list",
    "range(10 ** 9) | list",
    "''.strip.__self__",
    "''.strip.__func__",
    "self.__init__",
    "cycler.__init__.__globals__",
]
STATEMENTS = [
    "{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{% endfor %}",
    "{% for m in messages %}{{ loop.index0 }}{{ loop.previtem is defined }}{{ loop.nextitem }}{% endfor %}",
    "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{% endfor %}",
    "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
    "{% for m in messages %}{{ loop._iterator }}{% endfor %}",
    "{% set ns = namespace(x=0) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}",
    "{% macro m(x) %}{{ x.strip() }}{{ caller() }}{% endmacro %}{% call m(' a ') %}b{% endcall %}",
]


def outcome(environment: ImmutableSandboxedEnvironment, source: str) -> str | type[Exception]:
    try:
        return environment.from_string(source).render(VALUES)
    except (TemplateError, TypeError, ValueError, OverflowError) as error:
        return type(error)


@pytest.mark.parametrize("source", [*(f"{{{{ {each} }}}}" for each in EXPRESSIONS), *STATEMENTS])
def test_sandbox_gives_what_jinjas_own_gives(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    assert outcome(new_environment(), source) == outcome(plain, source)


@pytest.mark.parametrize(
    "expression",
    [
        "text.__class__.__mro__",
        "'{0.__class__.__mro__}'.format(text)",
        "numbers.append(4)",
        "message.update({'a': 1})",
        "''.strip.__self__.__class__.__mro__",
        "cycler.__init__.__globals__",
    ],
)
def test_nothing_unsafe_is_reached_and_nothing_is_changed(expression: str) -> None:
    with pytest.raises((SecurityError, UndefinedError)):
        new_environment().from_string(f"{{{{ {expression} }}}}").render(VALUES)
    assert VALUES["numbers"] == [1, 2, 3]
    assert "a" not in VALUES["message"]


def test_generation_tag_renders_its_body_in_a_scope_of_its_own() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}a{{ x }}{% endgeneration %}{{ x }}"
    assert new_environment().from_string(source).render() == "a21"


def test_json_is_not_escaped_for_html() -> None:
    assert new_environment().from_string("{{ '<é>' | tojson }}").render() == '"<é>"'


def test_broken_template_is_a_value_error_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 2"):
        parse(new_environment(), "a\n{% if %}")


def test_clock_is_the_given_time() -> None:
    assert strftime(86_400.0 * 366)("%Y") == "1971"
