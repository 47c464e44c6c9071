"""Where values end that come in pieces, and what strings say."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pipeline.json_span import JsonSpan, JsonString
from tests.pipeline.splits import splits


@pytest.mark.parametrize("value", ["", "a", {}, [], {"a": [1, "}"]}, ["\\", '"'], [[[]]]])
def test_a_span_ends_where_its_value_does(value: Any) -> None:
    text = json.dumps(value)
    for pieces in splits(text, random.Random(1)):
        span, ends = JsonSpan(), [len(piece) for piece in pieces]
        found = [span.end(piece, 0) for piece in pieces if piece]
        assert found[:-1] == [None] * (len(found) - 1)
        assert found[-1] == [end for end in ends if end][-1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('""', ""),
        (r'"a\"\\\u00e9\n\ud83c\udf89"', 'a"\\é\n🎉'),
        ('"敏感 🎉"', "敏感 🎉"),
        (r'"\ud83c"', ""),
        (r'"\x"', ""),
        ('"a\nb"', ""),
    ],
)
def test_a_string_is_read_with_its_escapes(text: str, value: str) -> None:
    for pieces in splits(text, random.Random(2)):
        string = JsonString()
        for _ in range(2):  # it is as new after its end
            ends = [string.end(piece, 0) for piece in pieces if piece]
            assert [end is None for end in ends] == [True] * (len(ends) - 1) + [False]
            assert string.value == value
