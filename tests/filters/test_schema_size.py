"""Schemas that would take long to compile are refused; those that people write are not."""

from __future__ import annotations

import json

import pytest

from filters.json_schema import check_schema, compile_schema


def test_patterns_are_bounded_together() -> None:
    half = {"pattern": "a" * 750}
    assert check_schema('"a"', compile_schema({**half, "patternProperties": {"a" * 750: True}})) is not None
    with pytest.raises(ValueError, match="patterns of 1501 characters together; at most 1500"):
        compile_schema({**half, "patternProperties": {"a" * 751: True}})


@pytest.mark.parametrize(
    "pattern", [r"(?i)\pL", "(?i)[!-\U0010ffff]", r"(?i)[!-\x{10ffff}]", "(?x)( ?i)[! - 字]", r"(?s-i)[\W]"]
)
def test_flags_and_wide_ranges_are_refused_together(pattern: str) -> None:
    with pytest.raises(ValueError, match="with flags"):
        compile_schema({"properties": {"a": {"pattern": pattern}}})


@pytest.mark.parametrize(
    "pattern", ["(?i)^[a-z]+$", "(?i)^(YES|是)$", r"^\(?i?[\W\p{L}]+", r"^(?:\pL|[一-龥])"]
)
def test_pattern_with_flags_or_wide_ranges_is_fine(pattern: str) -> None:
    assert check_schema(json.dumps("yes"), compile_schema({"pattern": pattern})) is None
