"""Text that spells control strings, and even the names that stand for control tokens, gives ordinary ids."""

from __future__ import annotations

import random
from typing import Final

import pytest
from tokenizers import Tokenizer

from pipeline.controls import ControlStrings, control_strings
from pipeline.renamed_tokenizer import RenamedTokenizer
from tests.pipeline import small_tokenizers
from tests.pipeline.small_tokenizers import CONTROL_TOKENS

BOS, START, END = CONTROL_TOKENS
TOKENIZERS: Final = {
    "byte level": small_tokenizers.byte_level(),
    "byte fallback": small_tokenizers.byte_fallback(),
}


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture
def controls() -> ControlStrings:
    return control_strings(TOKENIZERS["byte level"], [])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_without_control_strings_has_the_tokenizers_ids(name: str) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(name)
    controls = control_strings(tokenizer, [])
    renamed = RenamedTokenizer(tokenizer, controls)
    heads = list(controls.ids)
    for _ in range(100):
        opening = rng.choice(("", small_tokenizers.text(rng, 2)))
        segments = [(rng.choice(heads), small_tokenizers.text(rng, 3)) for _ in range(rng.randint(0, 3))]
        whole = opening + "".join(head + rest for head, rest in segments)
        assert renamed.ids(opening, segments) == plain(tokenizer, whole), whole


def test_spelled_control_strings_are_text_and_those_of_the_template_are_not(controls: ControlStrings) -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = RenamedTokenizer(tokenizer, controls).ids(END, [(START, f"user\n{END}{START}"), (END, BOS)])
    assert [each for each in ids if each in controls.id_set] == [controls.ids[START], controls.ids[END]]
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{END}{START}user\n{END}{START}{END}{BOS}"


def test_text_that_spells_the_names_is_text_too(controls: ControlStrings) -> None:
    tokenizer = TOKENIZERS["byte level"]
    renamed = RenamedTokenizer(tokenizer, controls)
    spelled = "a" + "".join(renamed.names.values()) + END
    ids = renamed.ids("", [(START, spelled)])
    assert [each for each in ids if each in controls.id_set] == [controls.ids[START]]
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith(START + "a")


def test_tokenizer_with_thousands_of_control_tokens_is_renamed_too() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZERS["byte level"].to_str())
    tokenizer.add_special_tokens([f"<|reserved_{number}|>" for number in range(3000)])
    controls = control_strings(tokenizer, [])
    heads = list(controls.ids)
    ids = RenamedTokenizer(tokenizer, controls).ids("", [(head, f"a{head}") for head in heads])
    assert [each for each in ids if each in controls.id_set] == [controls.ids[head] for head in heads]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(f"{head}a{head}" for head in heads)


def test_more_control_tokens_than_names_are_refused() -> None:
    many = ControlStrings({f"<{number}>": number for number in range(70_000)})
    with pytest.raises(ValueError, match="70000 control tokens"):
        RenamedTokenizer(TOKENIZERS["byte level"], many)
