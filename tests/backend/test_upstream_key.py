"""The key that upstream servers are shown, and the words in which they may show it to others."""

from __future__ import annotations

import pytest

from backend.upstream_errors import MAX_WORDS
from backend.upstream_faults import server_error
from backend.upstream_key import KeylessSink, hidden, key_headers
from pipeline.errors import EngineFailed, HeadraceError
from tests.backend.linked import RecordingSink

KEY = "sk-UPSTREAM-0123456789"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nothing", "nothing"),
        (f"Bearer {KEY}, twice: '{KEY}'", "Bearer ***, twice: '***'"),
        (KEY, "***"),
        (KEY[:-1], "***"),
        (f"cut off: {KEY[:4]}", "cut off: ***"),
        (f"cut off: {KEY[:3]}", "cut off: sk-"),
        (f"{KEY}{KEY[:9]}", "******"),
        (f"{KEY[:9]} amid", f"{KEY[:9]} amid"),
    ],
)
def test_key_is_hidden(text: str, shown: str) -> None:
    assert hidden(text, KEY) == shown


def test_key_that_is_no_secret_hides_nothing() -> None:
    assert hidden("an answer", "an") == "an answer"
    assert hidden("", KEY) == ""


async def test_no_part_of_the_key_is_left_wherever_the_servers_words_are_cut() -> None:
    for num_before in range(MAX_WORDS - len(KEY) - 3, MAX_WORDS + 3):
        error = server_error(400, "." * num_before + KEY + "rest")
        sink = RecordingSink()
        KeylessSink(sink, KEY).failed(error)
        told = sink.ended.result()
        assert told is error
        assert type(told) is type(error)
        assert KEY[:4] not in str(told)


async def test_other_calls_are_the_sinks_own() -> None:
    sink = RecordingSink()
    keyless = KeylessSink(sink, KEY)
    assert keyless.tokens == sink.tokens
    keyless.failed(EngineFailed("no key in it"))
    error = sink.ended.result()
    assert isinstance(error, HeadraceError)
    assert error.message == "no key in it"


def test_key_is_shown_as_a_bearer_and_none_is_not_shown() -> None:
    assert key_headers("k-1") == ((b"authorization", b"Bearer k-1"),)
    assert key_headers(None) == ()
