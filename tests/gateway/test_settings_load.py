"""What may go wrong between a configuration file and a process. Values and sources: `test_settings.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.settings import Settings
from gateway.settings_load import SettingsError, load, plain, restore
from gateway.settings_table import with_values

SECRET = "sk-never-shown"


@pytest.mark.parametrize(
    "text",
    [
        f"port: 1\napi_key: [{SECRET}\n",
        f"api_key: *{SECRET}\n",
        f"api_key: !{SECRET} x\n",
        f"api_key: '{SECRET}\n",
        f"api_key: a: {SECRET}\n",
    ],
)
def test_broken_file_is_told_by_its_position_and_never_quoted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "headrace.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load({"config": str(path)})
    told = str(caught.value)
    assert SECRET not in told
    assert f"{path} cannot be read: no valid YAML at line " in told


def test_file_with_an_impossible_date_is_a_problem_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "headrace.yaml"
    path.write_text("port: 2026-13-40\n")
    with pytest.raises(SettingsError, match=r"headrace\.yaml"):
        load({"config": str(path)})


def test_restored_settings_do_not_read_the_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that is started again hours later must not fail by what somebody has edited meanwhile."""
    path = tmp_path / "headrace.yaml"
    path.write_text("port: 8123\n")
    monkeypatch.setenv("HEADRACE_CONFIG", str(path))
    parent = load().settings
    assert parent.http.port == 8123
    path.write_text("prot: [\n")
    assert restore(plain(parent)).http.port == 8123
    path.unlink()
    assert restore(plain(with_values(Settings(), port=8124))).http.port == 8124
