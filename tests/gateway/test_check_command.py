from __future__ import annotations

from pathlib import Path

import pytest

from gateway.check_command import main_rules


def test_rules_check_prints_what_a_file_comes_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(
        "- {id: a, match: [ab, ac], action: mask}\n"
        "- {id: b, match: 傻帽, action: flag, direction: input, skip_symbols: true}\n"
    )
    assert main_rules({"file": str(path)}) == 0
    size = capsys.readouterr().out
    assert size.startswith(f"{path}: 2 rules, 3 keywords, automaton of 11 states in ")
    assert " KiB, fingerprint " in size


def test_rules_check_tells_the_line_of_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("- id: a\n  pii: emails\n  action: block\n")
    assert main_rules({"file": str(path)}) == 1
    assert "rules.yaml:2: pii is 'emails'; it must be one of" in capsys.readouterr().err
