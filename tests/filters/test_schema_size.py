"""Schemas that would take long to compile are refused; those that people write are not."""

from __future__ import annotations

import json

import pytest

from filters.json_schema import check_schema, compile_schema
from filters.schema_size import RefSizes, num_checks, weight_of


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


def test_reference_has_the_size_of_its_place() -> None:
    schema = {"$defs": {"a/b": {"enum": [1, 2, 3]}, "c": {"allOf": [True, {"items": {"not": {}}}]}}}
    whole = num_checks(schema)
    sizes = RefSizes(schema)
    places = {"#/$defs/a~1b": 4, "#/$defs/c": 5, "#/$defs/c/allOf/1": 3, "#/$defs/c/allOf/0": 1, "#": whole}
    assert {ref: sizes.size_of(ref) for ref in places} == places
    for ref in ("#c", "x#/$defs/c", "#/%24defs/c", "#/$defs/c/allOf/2", "#/no", ""):
        assert sizes.size_of(ref) == whole
    for name in ("$id", "id", "$schema"):
        moved = {**schema, "not": {name: "x", "$defs": {"c": {"enum": [0] * 99}}}}
        assert RefSizes(moved).size_of("#/$defs/c") == num_checks(moved)


def test_weight_has_values_and_long_texts_and_ends_early() -> None:
    assert weight_of(1, 9) == 1
    assert weight_of([1, {"a": [2], "b" * 128: "c" * 64}], 99) == 9
    assert weight_of([[0] * 9] * 1000, 5) <= 20
