import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway import cli
from gateway.cli import build_parser, main, rows_of
from gateway.settings_table import table
from tests.gateway.programs import ROOT

COMMANDS = ("serve", "worker", "gateway", "check-config", "chat", "bench", "rules", "version")
# What must not be loaded for a help text: each takes longer than all of the rest.
HEAVY = (
    "pydantic",
    "pydantic_settings",
    "uvicorn",
    "starlette",
    "asyncio",
    "tokenizers",
    "yaml",
    "vllm",
    "torch",
)


@pytest.fixture(autouse=True)
def _no_inherited_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def given(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """What the command line hands to a command."""
    received: dict[str, Any] = {}

    class Module:
        def __getattr__(self, name: str) -> Any:
            return lambda flags: received.update(flags) or 0

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Module())
    assert main(arguments) == 0
    return received


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from gateway.cli import main\n"
        "try: main(['--help'])\n"
        f"except SystemExit: print([name for name in {HEAVY} if name in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT
    ).stdout.decode()
    assert output.splitlines()[-1] == "[]"
    for command in COMMANDS:
        assert f"\n    {command}" in output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_its_flags_under_their_topics(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    for row in rows_of(command):
        has_flag = row.name != "engine_args" and not row.about.file_only
        assert (
            f"\n  {row.flag} " in out or f"\n  {row.flag}," in out or f"\n  {row.flag}\n" in out
        ) == has_flag
        assert f"\n{row.topic}:" in out or not has_flag


def test_every_setting_is_a_flag_of_check_config() -> None:
    assert {row.name for row in rows_of("check-config")} == {row.name for row in table()}


def test_flags_reach_the_command_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = given(monkeypatch, "gateway", "--port", "1", "--worker", "tcp://a:1", "--worker", "tcp://b:2")
    assert flags == {"port": "1", "worker": ["tcp://a:1", "tcp://b:2"]}
    assert given(monkeypatch, "worker", "--scripted") == {"scripted": True}
    assert given(monkeypatch, "worker", "--no-scripted") == {"scripted": False}
    assert given(monkeypatch, "serve", "--timeout-keep-alive", "5") == {"keep_alive_s": "5"}


@pytest.mark.parametrize("command", ["worker", "serve", "check-config"])
def test_what_follows_two_dashes_goes_to_the_engine_untouched(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    rest = ("--max-num-seqs", "64", "--", "--port", "--no-such-flag", "")
    assert given(monkeypatch, command, "--model", "m", "--", *rest) == {
        "model": "m",
        "engine_args": list(rest),
    }


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("no-such-command",),
        ("gateway", "--prot", "1"),
        ("gateway", "--por", "1"),
        ("gateway", "--port"),
        ("gateway", "extra"),
        ("gateway", "--", "--max-num-seqs", "1"),
        ("rules",),
    ],
)
def test_wrong_usage_exits_2(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "usage: headrace" in err


@pytest.mark.parametrize("command", ["gateway", "serve", "worker", "check-config"])
def test_bad_settings_exit_2_and_are_all_told(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, _, err = run(capsys, command, "--log-level", "loud", "--cache", "")
    assert code == 2
    assert [line.split(" (")[0] for line in err.splitlines()] == ["headrace: cache", "headrace: log_level"]


def test_a_gateway_without_workers_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "gateway")
    assert code == 2
    assert err.startswith("headrace: worker or upstream is missing")


def test_a_taken_port_exits_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    code, _, err = run(capsys, "gateway", "--worker", "tcp://127.0.0.1:1", "--uds", str(file))
    assert (code, err) == (1, f"headrace: cannot listen on {file}: it exists and is not a socket\n")


def test_check_config_prints_each_setting_with_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "headrace.yaml"
    path.write_text("max_body_bytes: 64 MiB\n")
    monkeypatch.setenv("HEADRACE_API_KEY", "s3cret,other-s3cret")
    code, out, _ = run(
        capsys, "check-config", "--config", str(path), "--port", "1", "--link-secret", "s3cret"
    )
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0
    assert set(lines) == {row.name for row in table()}
    assert lines["port"].split() == ["port", "1", "flag", "--port"]
    assert lines["max_body_bytes"].endswith(f"{path}: max_body_bytes")
    assert lines["api_key"].split()[-2:] == ["variable", "HEADRACE_API_KEY"]
    assert lines["queue_limit_s"].split() == ["queue_limit_s", "60", "default"]
    assert "s3cret" not in out


def test_check_config_tells_what_is_wrong_with_rule_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.yaml"
    good.write_text("badword\n")
    bad.write_text("- id: x\n  match: [word]\n  action: explode\n")
    code, _, err = run(capsys, "check-config", "--rules", str(good), "--rules", str(bad))
    assert code == 2
    assert f"rules: {bad}:3:" in err
    assert len(err.splitlines()) == 1
    assert run(capsys, "check-config", "--rules", str(good))[0] == 0


def test_rules_check_says_the_size_or_the_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("badword\nother\n")
    code, out, _ = run(capsys, "rules", "check", str(path))
    assert code == 0
    assert "1 rules, 2 keywords" in out
    path.write_text("badword\nx\n")
    code, _, err = run(capsys, "rules", "check", str(path))
    assert code == 1
    assert f"{path}:2:" in err
    assert run(capsys, "rules", "check", "/no/such/file")[0] == 1


def test_version_tells_ours_and_pythons(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "version")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()]
    assert names[0] == "headrace"
    assert names[-1] == "python"


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> Any:
        class Module:
            @staticmethod
            def main_version(flags: Any) -> int:
                raise KeyboardInterrupt

        return Module

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert main(["version"]) == 130


def test_an_interrupt_while_a_command_is_imported_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert main(["version"]) == 130


def test_the_parser_leaves_values_to_the_settings() -> None:
    assert vars(build_parser().parse_args(["gateway", "--port", "not a number"])) == {
        "command": "gateway",
        "port": "not a number",
    }


def test_the_module_is_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "gateway", "version"], capture_output=True, check=True, cwd=ROOT
    )
    assert json.dumps(ran.stdout.decode()).startswith('"headrace ')
