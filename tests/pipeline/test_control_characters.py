"""Control characters, one by one. Whole requests are the business of `test_validation.py`."""

from __future__ import annotations

import random

import pytest

from pipeline.control_characters import FLAGS, ControlCharacters, ControlPolicy

UNENCODABLE = {0, *range(0xD800, 0xE000)}
OTHERS = {
    *(0x7F, 0xB, 0xC, *range(1, 9), *range(0xE, 0x20), *range(0x80, 0xA0)),
    *(*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xE0000, 0xE0080)),
}
NEIGHBOURS = ["", "a", "é", "敏", "😀"]  # each makes Python store the text in another way


def code_points(rng: random.Random) -> set[int]:
    """All control characters, what is next to them, and some of the rest."""
    edges = {near for code in UNENCODABLE | OTHERS for near in (code - 1, code, code + 1) if near >= 0}
    return edges | set(rng.sample(range(0x110000), 2000))


@pytest.mark.parametrize("action", ["strip", "keep"])
def test_any_code_point_is_treated_alike_whatever_stands_beside_it(action: str) -> None:
    characters = ControlCharacters(ControlPolicy("strip", action))  # type: ignore[arg-type]
    unwanted = UNENCODABLE | OTHERS if action == "strip" else UNENCODABLE
    rng = random.Random(4)
    for code in code_points(rng):
        beside = rng.choice(NEIGHBOURS)
        for text in (beside + chr(code), chr(code) + beside):
            assert characters.strip(text) == (beside if code in unwanted else text)
            assert characters.suspects(text) or code not in unwanted
            assert characters.rejected(text) is None


def test_rejected_tells_the_first_place() -> None:
    characters = ControlCharacters(ControlPolicy("reject", "reject"))
    rng = random.Random(5)
    for code in code_points(rng):
        text = rng.choice(NEIGHBOURS) + chr(code) + "\x00"
        position = len(text) - 2 if code in UNENCODABLE | OTHERS else len(text) - 1
        assert characters.rejected(text) == (position, ord(text[position]))
        assert characters.suspects(text)


def test_ordinary_text_is_no_suspect() -> None:
    for policy in (ControlPolicy("reject", "keep"), ControlPolicy("reject", "reject")):
        for text in ("", "a\t\r\n b", "é«»°\xa0", "敏感“词”—…", "👩\u200d👧\ufe0f", "\ufeff\u200e"):
            assert not ControlCharacters(policy).suspects(text)


def test_flags_are_the_three_that_are_recommended() -> None:
    assert FLAGS == (
        "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
        "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
        "\U0001f3f4\U000e0067\U000e0062\U000e0077\U000e006c\U000e0073\U000e007f",
    )
