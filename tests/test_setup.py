"""`.ci/setup.py`: what it decides and says. That it installs is proved by every clean run of CI."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import ROOT


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, for a project in a folder of its own; the interpreter is this one."""
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / ".ci" / "setup.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("HEADRACE_PYTHON", "HEADRACE_ENGINE", "HEADRACE_TORCH_INDEX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(module, "LOG", tmp_path / "setup.log")
    (tmp_path / ".venv").mkdir()
    return module


def script(folder: Path, name: str, text: str) -> str:
    """A program that stands in for another."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_an_old_python_can_read_it_and_needs_no_package() -> None:
    tree = ast.parse((ROOT / ".ci" / "setup.py").read_text(), feature_version=(3, 7))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names - {"tomllib"}


def test_stamp_of_the_tests_covers_serving_but_not_the_reverse(setup: ModuleType) -> None:
    setup.write_stamps("serve", "key")
    assert setup.stamped("serve", "key")
    assert not setup.stamped("test", "key")
    setup.write_stamps("test", "key 2")
    assert setup.stamped("serve", "key 2")
    assert not setup.stamped("serve", "key")


def test_stamp_key_changes_with_project_engine_and_place(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [setup.stamp_key()]
    assert setup.stamp_key() == keys[0]
    monkeypatch.setenv("HEADRACE_ENGINE", "gpu")
    keys.append(setup.stamp_key())
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    keys.append(setup.stamp_key())
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(setup, "ROOT", tmp_path / "moved")
    keys.append(setup.stamp_key())
    assert len(set(keys)) == 4


def test_find_python_refuses_an_old_one_and_names_its_version(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_PYTHON", script(tmp_path, "old", "echo 3.9"))
    with pytest.raises(setup.SetupError, match=r"needs Python 3\.11 to 3\.14.*old \(3\.9\)"):
        setup.find_python()


@pytest.mark.parametrize(
    ("version", "is_usable"), [("3.10", False), ("3.11", True), ("3.14", True), ("3.15", False)]
)
def test_usable_is_what_the_engine_has_wheels_for(
    setup: ModuleType, tmp_path: Path, version: str, is_usable: bool
) -> None:
    assert setup.usable(script(tmp_path, "python", f"echo {version}")) is is_usable


def test_python_without_venv_is_told_apart(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = script(tmp_path, "bare", 'case "$2" in *ensurepip*) exit 1;; esac; echo 3.12')
    monkeypatch.setenv("HEADRACE_PYTHON", bare)
    monkeypatch.setattr(setup, "PYTHON", tmp_path / "missing")
    with pytest.raises(setup.SetupError, match="no venv module"):
        setup.make_venv("cpu")


def test_choose_engine_refuses_an_unknown_one(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ENGINE", "tpu")
    with pytest.raises(setup.SetupError, match=r"'tpu'.*auto, cpu or gpu"):
        setup.choose_engine()


@pytest.mark.parametrize(("code", "engine"), [(0, "gpu"), (9, "cpu")])
def test_choose_engine_asks_nvidia_smi(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, engine: str
) -> None:
    script(tmp_path, "nvidia-smi", f"exit {code}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert setup.choose_engine() == engine


def test_check_disk_names_what_is_free_and_what_is_needed(setup: ModuleType) -> None:
    setup.check_disk(0)
    with pytest.raises(setup.SetupError, match=r"GB free; the engine needs about 1000000 GB"):
        setup.check_disk(1_000_000)


def test_missing_lists_only_what_is_not_met(setup: ModuleType) -> None:
    wanted = ("pytest>=1", "pytest<1", "no-such-package-of-ours==2", 'pytest<1; python_version < "3"')
    assert setup.missing(*wanted) == ["pytest<1", "no-such-package-of-ours==2"]


def test_missing_of_the_base_dependencies_is_nothing(setup: ModuleType) -> None:
    assert setup.missing("[]") == []


def test_other_engine_in_the_venv_is_refused(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "PACKAGE", {"cpu": "no-such-package-of-ours", "gpu": "pytest"})
    setup.check_engine("gpu")
    with pytest.raises(setup.SetupError, match=r"\.venv has pytest"):
        setup.check_engine("cpu")


def test_failed_step_shows_the_end_of_its_output_and_what_it_means(setup: ModuleType) -> None:
    setup.attempt("first", [sys.executable, "-c", "print('of the first')"])
    code = "print('[Errno 28] No space left on device'); raise SystemExit(1)"
    with pytest.raises(setup.SetupError, match="this step failed: second") as caught:
        setup.step("second", [sys.executable, "-c", code])
    message = str(caught.value)
    assert "    [Errno 28] No space left on device" in message
    assert "The disk is full." in message
    assert "of the first" not in message


def test_torch_is_sought_in_the_given_index_alone(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def attempt(heading: str, command: list[str]) -> bool:
        ran.append(command)
        return True

    monkeypatch.setattr(setup, "attempt", attempt)
    monkeypatch.setenv("HEADRACE_TORCH_INDEX", "https://index.example/cpu")
    setup.install_torch()
    assert [command[command.index("--index-url") + 1] for command in ran] == ["https://index.example/cpu"]


def test_torch_is_sought_by_pip_then_by_uv_and_then_explained(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def attempt(heading: str, command: list[str]) -> bool:
        tried.append(command[-1] if "--torch-backend" not in command else "by backend")
        return command[-1] == "uv"

    monkeypatch.setattr(setup, "attempt", attempt)
    (setup.LOG).write_text("")
    with pytest.raises(setup.SetupError, match="set HEADRACE_TORCH_INDEX"):
        setup.install_torch()
    assert tried == [setup.TORCH, "uv", "by backend"]
