"""Which added tokens are structure, and where they stand in a text."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, models

from pipeline.controls import ControlStrings, control_strings


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.add_special_tokens(["<s>", AddedToken("<|user|>", rstrip=True)])
    made.add_tokens(
        [AddedToken(text, special=False) for text in ("<think>", "<table>", "\n\n", "user", "<b")]
    )
    return made


def test_special_tokens_and_markup_of_the_template_are_control_strings() -> None:
    literals = ["<think>\n\n", "the user says", "a <b c"]
    controls = control_strings(tokenizer(), literals)
    assert set(controls.ids) == {"<s>", "<|user|>", "<think>"}
    assert controls.ids["<s>"] == tokenizer().token_to_id("<s>")
    assert set(control_strings(tokenizer(), []).ids) == {"<s>", "<|user|>"}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", [""]),
        ("abc", ["abc"]),
        ("<a>", ["", "<a>"]),
        ("x<a>y<a>", ["x", "<a>y", "<a>"]),
        ("<a><ab>", ["", "<a>", "<ab>"]),
        ("<<a>>", ["<", "<a>>"]),
        ("[x]<a>", ["", "[x]", "<a>"]),
    ],
)
def test_text_is_cut_before_each_control_string(text: str, pieces: list[str]) -> None:
    controls = ControlStrings({"<a>": 1, "<ab>": 2, "[x]": 3})
    assert controls.split(text) == pieces
    assert controls.marked(text, "!") == "!".join(pieces)
    assert (controls.search(text) is not None) == (len(pieces) > 1)


def test_longest_control_string_wins() -> None:
    controls = ControlStrings({"<a": 1, "<a>": 2, "<": 3})
    assert controls.split("<a>") == ["", "<a>"]
    found = controls.search("x<a>", 1)
    assert found is not None
    assert found[0] == "<a>"


def test_no_control_strings_find_nothing() -> None:
    controls = ControlStrings({})
    assert (controls.search("<s>"), controls.match("<s>"), controls.split("<s>")) == (None, None, ["<s>"])
    assert len(controls) == 0


def test_halves_are_the_proper_beginnings_and_ends() -> None:
    controls = ControlStrings({"<a>": 1})
    assert set(controls.beginnings) == {"<", "<a"}
    assert set(controls.ends) == {"a>", ">"}
