"""Rule files: read in order, with errors that name the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from filters.rules import RuleError
from gateway.rule_files import read_all_rules, read_rules


def test_a_plain_list_does_what_the_setting_says(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("# a list\n敏感词\nbadword\n", encoding="utf-8")
    for action in ("mask", "block", "flag"):
        (rule,) = read_rules(tmp_path / "words.txt", action).rules
        assert (rule.id, rule.match, rule.action) == ("words.txt", ("敏感词", "badword"), action)


def test_rules_of_several_files_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("badword\n")
    (tmp_path / "b.yaml").write_text(
        "- id: one\n  match: worse\n  action: block\n- {id: two, match: worst, action: mask}\n"
    )
    rules = read_all_rules([str(tmp_path / "b.yaml"), str(tmp_path / "a.txt")], "mask")
    assert [rule.id for rule in rules.rules] == ["one", "two", "a.txt"]
    assert read_all_rules([], "mask").rules == ()


def test_an_id_in_two_files_names_both(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "words.txt").write_text("badword\n")
    paths = [str(tmp_path / folder / "words.txt") for folder in ("x", "y")]
    with pytest.raises(RuleError, match=r"y/words.txt:1: .*'words.txt' is already used in .*x/words.txt"):
        read_all_rules(paths, "mask")


def test_a_bad_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("fine\n\nx\n")
    with pytest.raises(RuleError, match=r"words.txt:3: "):
        read_all_rules([str(tmp_path / "words.txt")], "mask")


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_all_rules([str(tmp_path / "none.txt")], "mask")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RuleError, match=r"bytes\.txt:1: not UTF-8 at byte 0"):
        read_all_rules([str(tmp_path / "bytes.txt")], "mask")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "words.txt").write_text("badword\n")
    assert read_all_rules(["~/words.txt"], "mask").num_keywords == 1
