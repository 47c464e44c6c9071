"""Settings as they are shown: no secret of the engine's arguments."""

from __future__ import annotations

import pytest

from gateway.settings import MASK
from gateway.settings_table import table
from gateway.settings_text import written

ENGINE_ARGS = next(row for row in table() if row.name == "engine_args")
SECRET = "never-shown"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--hf-token", SECRET),
        (f"--hf-token={SECRET}",),
        ("--hf_token", SECRET, "--seed", "1"),
        ("--api-key", SECRET),
        ("--password", SECRET),
    ],
)
def test_secret_engine_argument_is_masked(arguments: tuple[str, ...]) -> None:
    shown = written(ENGINE_ARGS, arguments)
    assert SECRET not in shown
    assert arguments[0].partition("=")[0] in shown
    assert MASK in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--max-num-batched-tokens", "2048"), "--max-num-batched-tokens 2048"),
        (("--hf-token", "--seed", "1"), "--hf-token --seed 1"),
        (("--tokenizer", "a b"), "--tokenizer 'a b'"),
    ],
)
def test_other_engine_arguments_are_shown(arguments: tuple[str, ...], expected: str) -> None:
    assert written(ENGINE_ARGS, arguments) == expected
