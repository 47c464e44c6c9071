"""Numbers, reasons and events as servers write them, right and wrong."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import msgspec
import pytest

from backend.lenient import (
    MAX_COUNT,
    MAX_REASON_CHARS,
    MAX_STOP_CHARS,
    checked_reason,
    count,
    holds_nothing,
    is_first,
    milliseconds,
    repaired,
    share,
    stop_of,
)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        *((0, 0), (3, 3), (3.0, 3), (MAX_COUNT, MAX_COUNT), (0.0, 0), (-0.0, 0)),
        *((-1, None), (-3.0, None), (3.5, None), (MAX_COUNT + 1, None), (1 << 70, None), (1e300, None)),
        *(
            ("3", None),
            (True, None),
            (None, None),
            ([3], None),
            ({}, None),
            (math.inf, None),
            (math.nan, None),
        ),
    ],
)
def test_count(value: Any, read: int | None) -> None:
    assert count(value) == read
    assert type(count(value)) in (int, type(None))


@pytest.mark.parametrize(
    ("value", "read"),
    [(0.5, 500.0), (2, 2000.0), (-1, 0.0), (math.inf, None), (math.nan, None), (1 << 70, None), ("1", None)],
)
def test_milliseconds(value: Any, read: float | None) -> None:
    assert milliseconds(value) == read


@pytest.mark.parametrize(
    ("value", "read"), [(0.5, 0.5), (1, 1.0), (1.5, 0.0), (-1, 0.0), (math.nan, 0.0), ("1", 0.0), (True, 0.0)]
)
def test_share(value: Any, read: float) -> None:
    assert share(value) == read


@pytest.mark.parametrize(
    ("value", "read"),
    [
        *(("END", "END"), (5, 5), ("x" * MAX_STOP_CHARS, "x" * MAX_STOP_CHARS)),
        *(("x" * (MAX_STOP_CHARS + 1), None), (1 << 80, None), (1.5, None), ([1], None), (True, None)),
    ],
)
def test_stop(value: Any, read: int | str | None) -> None:
    assert stop_of(value) == read


def test_reason_is_a_word() -> None:
    assert checked_reason("x" * MAX_REASON_CHARS)
    for word in ("x" * (MAX_REASON_CHARS + 1), "a\nb", "\x00"):
        with pytest.raises(ValueError, match="finish reason of") as caught:
            checked_reason(word)
        assert word not in str(caught.value)


def test_first_choice_is_told_by_its_number_or_by_none() -> None:
    assert [index for index in (None, 0, "0", 0.0, 1, -1, "1", "", [0]) if is_first(index)] == [
        None,
        0,
        "0",
        0,
    ]


@pytest.mark.parametrize(
    ("payload", "is_nothing"),
    [
        *((b"", True), (b" ", True), (b"ping", True), (b"[]", True), (b": x", True), (b"\xff", True)),
        *((b"{", False), (b' {"x', False), (b"<html>", False), (b'[{"choices": [', False)),
    ],
)
def test_event_that_holds_nothing(payload: bytes, is_nothing: bool) -> None:
    assert holds_nothing(payload) is is_nothing


@pytest.mark.parametrize(
    ("payload", "value"),
    [
        (b'{"a": "x\\ud800y"}', {"a": "x\ufffdy"}),
        (b'{"a": "\\ud83d"}', {"a": "\ufffd"}),
        (b'{"a": "\\ude00\\ud83d"}', {"a": "\ufffd\ufffd"}),
        (b'{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        (b'{"a": "\xff"}', {"a": "\ufffd"}),
        (b'{"a": "\x01\n"}', {"a": "\x01\n"}),
        (b'{"a": [NaN, Infinity, -Infinity, 1e999, 2.5]}', {"a": [None, None, None, None, 2.5]}),
    ],
)
def test_json_that_strict_readers_refuse_is_repaired(payload: bytes, value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        msgspec.json.decode(payload.replace(b"1e999", b"NaN") if b"ud83d\\ude00" not in payload else b"{")
    assert msgspec.json.decode(repaired(payload)) == value


@pytest.mark.parametrize("payload", [b"{", b"", b'{"a": ' + b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"])
def test_what_is_no_json_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        repaired(payload)


def test_any_text_comes_through_as_it_is_but_for_halves_of_pairs() -> None:
    rng = random.Random(5)
    alphabet = [*'aé\u2028"\\\n', "\U0001f600", "\ud800", "\udfff"]
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randrange(12)))
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        assert msgspec.json.decode(repaired(json.dumps(text).encode())) == whole
