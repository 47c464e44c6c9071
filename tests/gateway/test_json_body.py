"""Bytes of a body as JSON. What the routes refuse is in `test_openai_schema.py`."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from gateway import json_body
from gateway.json_body import MAX_FIELDS, decode
from pipeline.errors import InvalidRequest

ANYTHING: Any = msgspec.json.Decoder()


def dropped(body: str) -> Any:
    return decode(ANYTHING, body.encode(), drop_lone_surrogates=True)


@pytest.mark.parametrize("number", [0, 1, 999, 1000, 1001, 5000])
def test_a_byte_is_counted_wherever_it_stands(number: int) -> None:
    """With leaps at first, and at an even pace once there are many."""
    body = b"x[yy" * number + b"z" * 100
    assert json_body._num(body, b"[") == number


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (r'"a\ud83db"', "ab"),
        (r'"\udc00\ud800"', ""),
        (r'"\ud83d\ud83d\ude00\ude00"', "😀"),
        (r'"\\ud800 \ud800"', "\\ud800 "),
        (r'"\\\ud800"', "\\"),
        (r'"\ud800\\ude00"', "\\ude00"),
        (r'"\uD83D\uDE00\uDBFF"', "😀"),
        (r'{"a\ud800": ["\"\ud800\"", 1]}', {"a": ['""', 1]}),
        (r'"fine \u654f"', "fine 敏"),
    ],
)
def test_lone_surrogates_are_dropped_and_nothing_else(body: str, value: Any) -> None:
    assert dropped(body) == value


def test_dropping_is_what_python_s_decoder_and_a_filter_give() -> None:
    rng = random.Random(2)
    pieces = ["\\ud83d", "\\ude00", "\\\\", '\\"', "\\n", "a", "u", "d", "8", "\\u0041", "😀", "\\uDBFF"]
    for _ in range(3000):
        body = '"' + "".join(rng.choices(pieces, k=rng.randrange(12))) + '"'
        value = "".join(char for char in json.loads(body) if not 0xD800 <= ord(char) < 0xE000)
        assert dropped(body) == value


@pytest.mark.parametrize("body", [r'"\ud800', r'["\ud800" 1]', r'{"\ud800": 1, "": 2}', r'"\ud800\x"', "\\"])
def test_what_else_is_wrong_is_still_refused(body: str) -> None:
    with pytest.raises(InvalidRequest):
        dropped(body)


def test_lone_surrogates_are_refused_unless_told_otherwise() -> None:
    with pytest.raises(InvalidRequest, match="half a surrogate pair"):
        decode(ANYTHING, rb'"\ud800"')


def test_body_with_too_many_fields_is_refused_before_it_is_decoded() -> None:
    fields = [b"{"] + [b'"":1,'] * MAX_FIELDS  # equal keys: if it was decoded, that would be the error
    with pytest.raises(InvalidRequest, match=f"The body has {MAX_FIELDS + 1} fields of objects, or colons"):
        decode(ANYTHING, b"".join([*fields, b'"":1}']))
    with pytest.raises(InvalidRequest, match="appears twice"):
        decode(ANYTHING, b"".join([*fields[:-1], b'"":1}']))
