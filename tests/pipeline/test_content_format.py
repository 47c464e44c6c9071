"""Strings or parts, read from a template's syntax tree."""

from __future__ import annotations

import pytest

from pipeline.content_format import ContentFormat
from pipeline.rendering import ChatTemplate
from tests.pipeline import chat_templates

STRINGS = ContentFormat(takes_parts=False, takes_strings=True)
BOTH = ContentFormat(takes_parts=True, takes_strings=True)
PARTS = ContentFormat(takes_parts=True, takes_strings=False)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (chat_templates.CHATML, STRINGS),
        (chat_templates.WITH_TOOLS, STRINGS),
        (chat_templates.PARTS_OR_STRINGS, BOTH),
        (chat_templates.PARTS_ONLY, PARTS),
        (chat_templates.PARTS_IN_MACRO, BOTH),
        ("constant", STRINGS),
        # a filter, a slice, an alias of an alias
        ("{% for m in messages[1:] | list %}{% for c in m.content | list %}{% endfor %}{% endfor %}", PARTS),
        (
            "{% set a = messages %}{% set b = a[1:] %}"
            "{% for m in b %}{% for c in m['content'] %}{% endfor %}{% endfor %}",
            PARTS,
        ),
        (
            "{% for m in messages %}{% set content = m.content %}"
            "{% for c in content %}{% endfor %}{% endfor %}",
            PARTS,
        ),
        # loops over other things
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", STRINGS),
        ("{% for d in documents %}{% for c in d.content %}{% endfor %}{% endfor %}", STRINGS),
        (
            "{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ f(m.tools) }}{% endfor %}",
            STRINGS,
        ),
    ],
)
def test_content_format_is_detected(source: str, expected: ContentFormat) -> None:
    assert ChatTemplate(source, {}).content_format == expected
