"""A model's files in a folder of this machine, for servers that cannot send them: no weights are needed.

What a linked worker announces and sends by hash is `backend/model_files.py` and `backend/model_cache.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from backend.catalog import MisfitError
from backend.model_files import ModelFilesError, read_model_files

# What vLLM takes from a model's generation_config, and by the name that it has there.
_FROM_CONFIG: Final = frozenset(
    {
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
    }
)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """`default_sampling`: None where no generation_config.json tells the defaults."""

    folder: Path
    fingerprint: str
    paths: Mapping[str, Path]  # by the file's name
    default_sampling: Mapping[str, Any] | None

    def read(self) -> dict[str, bytes]:
        """The files by name. Raises `OSError`."""
        return {name: path.read_bytes() for name, path in self.paths.items()}


def read_local_model(folder: Path) -> LocalModel:
    """Look at a folder. Raises `MisfitError`, which names it, for one that holds no usable tokenizer."""
    try:
        found = read_model_files(folder)
        paths = {info.name: Path(found.paths[info.sha256]) for info in found.files}
        return LocalModel(
            folder, found.fingerprint, paths, _default_sampling(folder / "generation_config.json")
        )
    except (ModelFilesError, OSError) as error:
        raise MisfitError(f"tokenizer {folder} cannot be used: {error}") from error


def _default_sampling(path: Path) -> dict[str, Any] | None:
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise MisfitError(f"{path} is no JSON object: {error}") from error
    return {name: values[name] for name in _FROM_CONFIG if values.get(name) is not None}
