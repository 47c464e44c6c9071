"""The JSON grammar, against the standard library's parser, however the text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from filters.json_check import JsonCheck
from filters.json_schema import MAX_DEPTH, MAX_PROBLEM_CHARS
from tests.filters.json_texts import broken, random_value, written
from tests.pipeline.splits import splits

VALID = [
    "{}", "[]", '""', "0", "-0", "-1.5E+10", " true ", "\t[null,\r\nfalse]\n", '{"a":{"b":[1,2,{}]},"":""}',
    r'"\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00\ud800"', '"\x7f\u2028敏😀"', "1e5", '{"a":1,"a":2}', "9" * 5000,
]  # fmt: skip
# The offset of the first character that no JSON text can have there; None: it only ends too early.
INVALID: list[tuple[str, int | None]] = [
    ("", None), (" ", None), ("{", None), ('{"a"', None), ('{"a":', None), ("[1,", None), ('"a', None),
    ('"\\', None), ('"\\u12', None), ("tru", None), ("-", None), ("1.", None), ("1e", None), ("1e+", None),
    ("[1", None), ("{}{}", 2), ("[] x", 3), ("\ufeff{}", 0), ("NaN", 0), ("[NaN]", 1), ("-Infinity", 1),
    ("[1,]", 3), ('{"a":1,}', 7), ("{,}", 1), ("[,1]", 1), ("{1:2}", 1), ("{'a':1}", 1), ('{"a" 1}', 5),
    ('{"a":1 "b":2}', 7), ("[1 2]", 3), ("01", 1), ("1.e5", 2), (".5", 0), ("+1", 0), ("--1", 1), ("1a", 1),
    ("truE", 3), ("True", 0), ("nulll", 4), ('"\n"', 1), ('"\x00"', 1), ('"\\x"', 2), ('"\\u12g4"', 5),
    ("]", 0), ("{]", 1), ("[}", 1), ("[1}", 2), ('{"a":1]', 6), ("//", 0), ("[1]//", 3), ("\u00a0{}", 0),
    ('""""', 2), ('{"a":}', 5), ('{"a"}', 4), ("\x0c1", 0),
]  # fmt: skip


def run(pieces: Sequence[str], is_object: bool = False) -> tuple[int | None, str | None]:
    """The first character that is not fine, and the problem."""
    check = JsonCheck(is_object)
    num_fed = 0
    for piece in pieces:
        num_fine = check.feed(piece)
        if num_fine is not None:
            assert check.problem is not None
            assert check.num_fine == num_fed + num_fine
            assert check.feed("more") == 0
            return num_fed + num_fine, check.flush()
        num_fed += len(piece)
    assert check.num_fine == num_fed
    assert check.problem is None
    return None, check.flush()


def is_json(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return not text.startswith("\ufeff")


@pytest.mark.parametrize("text", VALID)
def test_valid_json_has_no_problem(text: str) -> None:
    for pieces in splits(text, random.Random(1)) if len(text) < 100 else ([text], list(text)):
        assert run(pieces) == (None, None)


@pytest.mark.parametrize(("text", "at"), INVALID)
def test_violation_is_found_at_its_character(text: str, at: int | None) -> None:
    for pieces in splits(text, random.Random(1)):
        found, problem = run(pieces)
        assert found == at, pieces
        assert problem is not None
        assert f"character {len(text) if at is None else at}" in problem
        assert len(problem) < MAX_PROBLEM_CHARS


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1,敏]", "not JSON from character 3 on, where a value of the list was expected"),
        ('{"a":1;', "not JSON from character 6 on, where a comma or } was expected"),
        ('"\\敏', "not JSON from character 2 on, where the rest of an escape was expected"),
        ("12 敏", "not JSON from character 3 on, where nothing more was expected"),
        ("-敏", "not JSON from character 1 on, where the end of a number or name was expected"),
        ('"\n', "not JSON from character 1 on, where a control character to be escaped was expected"),
        ('{"a":"敏', "the JSON ends too early, at character 7, before the end of a string"),
        ("{", "the JSON ends too early, at character 1, before a key or }"),
        ("[", "the JSON ends too early, at character 1, before a value or ]"),
    ],
)
def test_problem_says_what_was_expected_and_never_what_was_there(text: str, problem: str) -> None:
    assert run([text])[1] == problem


@pytest.mark.parametrize(("text", "at"), [("[1]", 0), (" 1", 1), ('"a"', 0), ("x", 0), ("  ", None)])
def test_object_is_demanded(text: str, at: int | None) -> None:
    for pieces in splits(text, random.Random(1)):
        found, problem = run(pieces, is_object=True)
        assert found == at
        assert problem is not None
        assert "an object" in problem
    assert run([' {"a": [1, "x"]} '], is_object=True) == (None, None)


def test_nesting_is_bounded() -> None:
    deep = "[" * MAX_DEPTH
    assert run([deep + "]" * MAX_DEPTH]) == (None, None)
    assert run([deep + "["]) == (
        MAX_DEPTH,
        f"not JSON from character {MAX_DEPTH} on, where nesting of at most {MAX_DEPTH} levels was expected",
    )
    assert run(['{"a":' * 100_000])[0] == MAX_DEPTH * 5


def fuzz(num_cases: int, seed: int) -> None:
    rng = random.Random(seed)
    num_valid = 0
    for _ in range(num_cases):
        text = written(random_value(rng), rng)
        if rng.random() < 0.7:
            text = broken(text, rng)
        expected = is_json(text)
        num_valid += expected
        outcomes = {run(pieces) for pieces in splits(text, rng)}
        assert len(outcomes) == 1, text
        at, problem = outcomes.pop()
        assert (problem is None) == expected, text
        if at is not None:
            check_least(text, at)
    assert num_cases // 10 < num_valid < num_cases * 9 // 10


def check_least(text: str, at: int) -> None:
    """What is before the violation can become JSON: the parser complains at its very end only."""
    with pytest.raises(json.JSONDecodeError):
        json.loads(text[: at + 1])
    assert JsonCheck().feed(text[:at]) is None
    assert JsonCheck().feed(text[: at + 1]) == at


def test_fuzz_against_the_parser_of_the_standard_library() -> None:
    fuzz(800, 1)


@pytest.mark.long
def test_long_fuzz_against_the_parser_of_the_standard_library() -> None:
    fuzz(30_000, 2)
