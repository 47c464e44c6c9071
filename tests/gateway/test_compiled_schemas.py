"""Schemas are compiled once, and never when they are too large."""

from __future__ import annotations

from typing import Any

import pytest

import gateway.compiled_schemas
from filters.json_schema import check_schema
from gateway.compiled_schemas import MAX_SCHEMA_BYTES, check_compiles, compiled
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


def test_a_refused_schema_is_refused_in_the_same_words_and_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = {"type": "objekt", "title": "seen once"}
    words = refusal(wrong)
    assert "wrong" in words
    monkeypatch.setattr(gateway.compiled_schemas, "compile_schema", lambda schema: pytest.fail("again"))
    assert refusal(wrong) == words
    with pytest.raises(ValueError, match="wrong"):
        compiled(wrong)


def test_size_and_patterns_are_bounded() -> None:
    room = MAX_SCHEMA_BYTES - len('{"title":""}')
    check_compiles({"title": "x" * room}, "x")
    assert str(MAX_SCHEMA_BYTES) in refusal({"title": "x" * (room + 1)})
    check_compiles({"properties": {"pattern": {"pattern": "a"}}}, "x")
    assert "patterns of" in refusal({"pattern": "(?i)[\\p{L}&&[^\\p{L}]]" * 2700})


@pytest.mark.parametrize("number", [10**30, 2**64, -(2**63) - 1])
def test_integer_that_the_link_cannot_carry_is_refused_by_name(number: int) -> None:
    assert "64 bits" in refusal({"properties": {"a": {"anyOf": [{"maximum": number}]}}})
    check_compiles({"maximum": 2**64 - 1, "minimum": -(2**63), "multipleOf": 1e30}, "x")
