"""Warnings of templates whose static text no prefix cache can reuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.vllm_config import VllmConfigError
from gateway import template_check
from gateway.check_command import main_check_config
from gateway.settings import Settings
from gateway.settings_table import with_values
from gateway.template_check import template_warnings
from pipeline.prompt_templates import PromptTemplate, TemplateMessage
from tests.pipeline import small_tokenizers

TEXT = "word " * 40


def settings(*contents: str, **values: object) -> Settings:
    messages = tuple(TemplateMessage("user", content) for content in contents)
    return with_values(Settings(), templates=(PromptTemplate("t", messages),), **values)


def warnings(*contents: str, **values: object) -> list[str]:
    return list(template_warnings(settings(*contents, engine_args=("--block-size", "16"), **values)))


def test_without_templates_there_is_nothing_to_say() -> None:
    assert not list(template_warnings(Settings()))


def test_static_text_before_the_first_slot_is_no_problem() -> None:
    assert not warnings(TEXT, TEXT + "{a}")
    assert not warnings(TEXT + "{a}\n{b}")


@pytest.mark.parametrize(
    "contents",
    [("{a}" + TEXT,), ("{a}", TEXT), ("x{a}" + TEXT[:100], TEXT[:100] + "{b}"), ("{a}{b}" + TEXT,)],
)
def test_static_text_after_it_is_told_with_both_numbers(contents: tuple[str, ...]) -> None:
    (warning,) = warnings(*contents)
    assert warning == (
        "templates[0] (t): about 50 tokens of static text follow its first slot {a} (estimated at 4 "
        "characters a token); no prefix cache can reuse them (its blocks have 16 tokens). Put them before it."
    )


def test_one_block_may_follow() -> None:
    assert not warnings("{a}" + "x" * 67)
    assert warnings("{a}" + "x" * 68)


@pytest.mark.parametrize("scripted", [False, True])
def test_tokens_are_counted_with_the_models_own_tokenizer(tmp_path: Path, scripted: bool) -> None:
    tokenizer = small_tokenizers.byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    given = {"scripted": True, "tokenizer": (str(tmp_path),)} if scripted else {"model": str(tmp_path)}
    (warning,) = warnings("{a}" + TEXT, **given)
    num_tokens = len(tokenizer.encode(TEXT, add_special_tokens=False).ids)
    assert num_tokens != 50
    assert f": {num_tokens} tokens of static text" in warning
    assert "estimated" not in warning


@pytest.mark.parametrize(
    ("engine_args", "is_cpu", "num_tokens"),
    [
        ((), False, 16),
        ((), True, 32),
        ((), None, 16),
        (("--block-size", "64"), False, 64),
        (("--block_size=64",), True, 64),
        (("--block-size", "64", "--block-size", "8"), True, 8),
        (("--block-size",), False, 16),
        (("--block-size", "x"), False, 16),
    ],
)
def test_the_block_is_the_engines(
    monkeypatch: pytest.MonkeyPatch, engine_args: tuple[str, ...], is_cpu: bool | None, num_tokens: int
) -> None:
    def is_cpu_build(environ: object) -> bool:
        if is_cpu is None:
            raise VllmConfigError
        return is_cpu

    monkeypatch.setattr(template_check, "is_cpu_build", is_cpu_build)
    (warning,) = template_warnings(settings("{a}" + 10 * TEXT, engine_args=engine_args))
    assert f"blocks have {num_tokens} tokens" in warning


def test_the_scripted_workers_block_is_its_own() -> None:
    given = settings("{a}" + TEXT, scripted=True, tokenizer="/none", block_size=49)
    assert "blocks have 49 tokens" in "".join(template_warnings(given))


def test_check_config_prints_warnings_and_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "headrace.yaml"
    path.write_text("templates: [{name: t, messages: [{role: user, content: '{a}" + 10 * TEXT + "'}]}]\n")
    assert main_check_config({"config": str(path)}) == 0
    out, err = capsys.readouterr()
    assert err.startswith("headrace: warning: templates[0] (t): ")
    (line,) = [line for line in out.splitlines() if line.startswith("templates ")]
    assert line.split()[:2] == ["templates", "t"]
