"""Parsers of several models, and the settings of answers as they are loaded."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gateway.settings_answers import check_parsers, parser_for
from gateway.settings_load import SettingsError, load, plain, restore


@pytest.fixture(autouse=True)
def _no_inherited_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("entries", "model", "expected"),
    [
        ((), "m", None),
        (("hermes",), "m", "hermes"),
        (("m=hermes",), "m", "hermes"),
        (("m=hermes",), "other", None),
        (("hermes", "m=qwen3"), "m", "qwen3"),
        (("m=qwen3", "hermes"), "other", "hermes"),
        (("org/a=b=qwen3",), "org/a=b", "qwen3"),
    ],
)
def test_a_models_own_parser_comes_before_the_one_for_all(
    entries: tuple[str, ...], model: str, expected: str | None
) -> None:
    assert parser_for(entries, model) == expected


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (("a", "b"), "there are two for every model"),
        (("m=a", "m=b"), "there are two for m"),
        (("m=",), "'m=' is not allowed; it must be NAME or MODEL=NAME"),
        (("=a",), "'=a' is not allowed"),
    ],
)
def test_parsers_that_contradict_or_name_nothing_are_problems(entries: tuple[str, ...], problem: str) -> None:
    (found,) = check_parsers("reasoning_parser", entries)
    assert found.startswith("reasoning_parser: ")
    assert problem in found


def test_parsers_of_several_models_are_no_problem() -> None:
    assert list(check_parsers("tool_call_parser", ("hermes", "m=qwen3", "n=hermes"))) == []


def test_settings_of_answers_load_and_travel_to_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REASONING_PARSER", "qwen3, m=olmo3")
    flags: dict[str, Any] = {
        "tool_call_parser": ["hermes"],
        "output_escape": "html",
        "allow_request_escape": True,
        "format_policy": "flag",
        "reasoning_content": True,
        "audit_log": "/var/log/audit.jsonl",
    }
    settings = load(flags).settings
    answers = settings.answers
    assert (answers.tool_call_parser, answers.reasoning_parser) == (("hermes",), ("qwen3", "m=olmo3"))
    assert (answers.output_escape, answers.allow_request_escape) == ("html", True)
    assert (answers.format_policy, answers.reasoning_content) == ("flag", True)
    assert answers.audit_log == "/var/log/audit.jsonl"
    monkeypatch.delenv("HEADRACE_REASONING_PARSER")
    assert restore(plain(settings)).answers == answers


def test_by_default_nothing_is_parsed_escaped_or_let_through() -> None:
    answers = load().settings.answers
    assert (answers.tool_call_parser, answers.reasoning_parser) == ((), ())
    assert (answers.output_escape, answers.allow_request_escape) == ("none", False)
    assert (answers.format_policy, answers.reasoning_content, answers.audit_log) == ("error", False, "log")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"output_escape": "xml"}, "one of none, html, markdown"),
        ({"format_policy": "ignore"}, "one of error, flag"),
        ({"reasoning_parser": ["a", "b"]}, "reasoning_parser: there are two"),
        ({"tool_call_parser": ["m="]}, "tool_call_parser: 'm=' is not allowed"),
        ({"audit_log": ""}, "audit_log"),
    ],
)
def test_bad_settings_of_answers_are_named(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load(flags)
