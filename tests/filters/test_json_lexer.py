"""The words of JSON: escapes read and written, numbers and names in pieces."""

from __future__ import annotations

import json

import pytest

from filters.json_lexer import WHOLE_SCALARS, encoded, read_escape, read_loose_escape, read_scalar


@pytest.mark.parametrize(
    ("text", "escape"),
    [
        (r"\n", ("\n", 2)),
        (r"\/x", ("/", 2)),
        (r"\u654f", ("敏", 6)),
        (r"\uD83d\uDE00x", ("😀", 12)),
        (r"\ud83dx", ("\ud83d", 6)),
        (r"\ud83d\n", ("\ud83d", 6)),
        (r"\ud83d\u0041", ("\ud83d", 6)),
        (r"\ude00", ("\ude00", 6)),
        (r"\q", ("\\", 1)),
        (r"\u65g", ("\\", 1)),
    ],
)
def test_escape_is_read_once_it_cannot_be_another(text: str, escape: tuple[str, int]) -> None:
    assert read_escape(text, 0) == escape
    assert read_escape("ab" + text, 2) == (escape[0], escape[1] + 2)
    is_pair_or_lone = text[:2] == r"\u" and escape[1] > 1
    for size in range(1, len(text)):
        if size < escape[1] or (is_pair_or_lone and text[2] in "dD" and text[3] == "8" and size < 7):
            assert read_escape(text[:size], 0) is None


@pytest.mark.parametrize("text", ["\\", "\\u", r"\u654", r"\ud83d", r"\ud83d\u", r"\ud83d\ude0"])
def test_escape_that_may_go_on_is_not_read(text: str) -> None:
    assert read_escape(text, 0) is None
    assert read_loose_escape(text, 0) is None


@pytest.mark.parametrize(
    ("text", "escape"),
    [
        (r"\u0061", ("a", 6)),
        (r"\u200b", ("\u200b", 6)),
        (r"\u0022", (r"\u0022", 6)),
        (r"\u005c", (r"\u005c", 6)),
        (r"\u000a", (r"\u000a", 6)),
        (r"\ude00", (r"\ude00", 6)),
        (r"\n", (r"\n", 2)),
        (r"\\u654f", ("\\\\", 2)),
        (r"\u65g", ("\\", 1)),
    ],
)
def test_loose_escape_is_read_only_if_that_changes_nothing_around_it(
    text: str, escape: tuple[str, int]
) -> None:
    assert read_loose_escape(text, 0) == escape


def test_scalar_goes_on_where_it_stopped() -> None:
    for text in ("-12.5e+3", "0", "1E9", "true", "false", "null"):
        state = ""
        for char in text:
            at, state = read_scalar(char, 0, state)
            assert at == 1
        assert state in WHOLE_SCALARS
        assert read_scalar(text + ",", 0, "") == (len(text), state)


def test_encoded_is_read_back() -> None:
    text = "".join(map(chr, range(0x3000))) + "\udfff\ud800😀"
    assert json.loads(f'"{encoded(text)}"') == text
    assert encoded("敏感 abc/é\x7f") == "敏感 abc/é\x7f"
