"""Needs served where they stand, as at start-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.needs import Encode, Pause, Steps, Wait, served


class Calls:
    """An encoder that answers with what it was asked."""

    def encode_segments(self, segments: Sequence[str]) -> list[bytes]:
        return [b"segment " + each.encode() for each in segments]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
        return [f"text {each} {add_special_tokens}".encode() for each in texts]


@pytest.mark.parametrize(
    ("add_special_tokens", "expected"),
    [(None, [b"segment a"]), (True, [b"text a True"]), (False, [b"text a False"])],
)
def test_texts_are_encoded_as_segments_or_raw(add_special_tokens: bool | None, expected: list[bytes]) -> None:
    assert Encode(Calls(), ("a",), add_special_tokens).run() == expected


def test_steps_get_their_answers_in_order() -> None:
    def steps() -> Steps[list[Any]]:
        return [(yield Pause()), (yield Encode(Calls(), ("a", "b"), None))]

    assert served(steps()) == [None, [b"segment a", b"segment b"]]


def test_wait_without_anybody_who_gives_back_is_an_error() -> None:
    def steps() -> Steps[None]:
        yield Wait(7)

    with pytest.raises(RuntimeError, match="7 tokens"):
        served(steps())
