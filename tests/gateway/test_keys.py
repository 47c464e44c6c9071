"""API keys: who passes, and what is known of them afterwards."""

from __future__ import annotations

import pytest

from gateway.keys import ApiKeys
from pipeline.errors import BadKey

KEYS = ApiKeys(["alpha", "beta", "schlüssel"])


def test_without_keys_everyone_passes_and_has_no_id() -> None:
    assert ApiKeys([]).check({}) is None
    assert ApiKeys([]).check({b"authorization": b"Bearer anything"}) is None


@pytest.mark.parametrize("header", ["Bearer alpha", "bearer beta", "BEARER  alpha ", "Bearer schlüssel"])
def test_known_key_passes(header: str) -> None:
    assert KEYS.check({b"authorization": header.encode()}) is not None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"authorization": b""},
        {b"authorization": b"alpha"},
        {b"authorization": b"Basic alpha"},
        {b"authorization": b"Bearer"},
        {b"authorization": b"Bearer "},
        {b"authorization": b"Bearer gamma"},
        {b"authorization": b"Bearer alphabeta"},
        {b"authorization": b"Bearer ALPHA"},
        {b"authorization": b"Bearer \xff\xfe"},
        {b"x-api-key": b"alpha"},
    ],
    ids=str,
)
def test_anything_else_is_refused(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(BadKey):
        KEYS.check(headers)


def test_id_of_a_key_is_stable_and_not_the_key() -> None:
    first = KEYS.check({b"authorization": b"Bearer alpha"})
    second = KEYS.check({b"authorization": b"Bearer beta"})
    assert first == ApiKeys(["other", "alpha"]).check({b"authorization": b"Bearer alpha"})
    assert first != second
    assert first is not None
    assert "alpha" not in first
    assert len(first) == 8
