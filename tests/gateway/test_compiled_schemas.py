"""Schemas are compiled once, and never when they are too large."""

from __future__ import annotations

from typing import Any

import pytest

from filters.json_schema import check_schema
from gateway.compiled_schemas import MAX_PATTERNS, MAX_SCHEMA_BYTES, check_compiles, compiled
from pipeline.errors import InvalidRequest


def refusal(schema: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_compiles(schema, "response_format.json_schema.schema")
    assert caught.value.param == "response_format.json_schema.schema"
    assert caught.value.param in caught.value.message
    assert len(caught.value.message) < 300
    return caught.value.message


def test_an_equal_schema_is_compiled_once() -> None:
    schema = {"type": "object", "title": "once"}
    check_compiles(schema, "x")
    assert compiled(schema) is compiled(dict(schema))
    assert compiled(schema) is not compiled({**schema, "title": "other"})
    assert check_schema("{}", compiled(schema)) is None
    assert check_schema("[]", compiled(schema)) is not None
    assert check_schema("[]", compiled(True)) is None


def test_a_schema_that_is_wrong_is_refused_each_time() -> None:
    for _ in range(2):
        assert "wrong" in refusal({"type": "objekt"})


def test_size_and_patterns_are_bounded() -> None:
    room = MAX_SCHEMA_BYTES - len('{"title":""}')
    check_compiles({"title": "x" * room}, "x")
    assert str(MAX_SCHEMA_BYTES) in refusal({"title": "x" * (room + 1)})
    check_compiles({"properties": {"pattern": {"pattern": "a"}}}, "x")
    patterns = {f"a{index}": True for index in range(MAX_PATTERNS - 1)}
    check_compiles({"patternProperties": patterns, "pattern": "b"}, "x")
    assert str(MAX_PATTERNS) in refusal({"patternProperties": patterns, "anyOf": [{"pattern": "b"}] * 2})
