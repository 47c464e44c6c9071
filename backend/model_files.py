"""Which files of a model folder a gateway needs, and the fingerprint of what determines token ids.

A worker announces these files in its WELCOME and serves them by hash; a gateway that lacks one fetches it.
Weights never travel. Reading happens once, at the worker's start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from backend.link import FileInfo

# What makes a prompt's text into ids: the fingerprint covers these. `tokenizer_config.json` is among them: it
# may hold the chat template and says which special tokens are added.
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
CONFIG_FILES: Final = ("config.json", "generation_config.json")
REQUIRED_FILE: Final = "tokenizer.json"
_READ_BYTES: Final = 1 << 20


class ModelFilesError(Exception):
    """A model folder lacks what a gateway cannot do without."""


class ModelFiles(NamedTuple):
    """The announced files in fixed order, where each lies by its sha256, and the fingerprint."""

    files: list[FileInfo]
    paths: dict[str, str]
    fingerprint: str


def read_model_files(folder: Path, tokenizer_folder: Path | None = None) -> ModelFiles:
    """Hash the files that a gateway needs.

    `tokenizer_folder`, where it is given, is where tokenizer and template come from; configs always come from
    `folder`. Raises `ModelFilesError` where there is no `tokenizer.json`, `OSError` where one cannot be read.
    """
    source = tokenizer_folder or folder
    if not (source / REQUIRED_FILE).is_file():
        raise ModelFilesError(
            f"{source} has no {REQUIRED_FILE}; Headrace needs the fast tokenizer's file "
            f"(transformers writes it: AutoTokenizer.from_pretrained(…).save_pretrained(…))"
        )
    found = list(_present(source, TOKENIZER_FILES))
    fingerprint = hashlib.sha256()
    for info, _ in found:
        fingerprint.update(f"{info.name}\0{info.sha256}\n".encode())
    found += _present(folder, CONFIG_FILES)
    return ModelFiles(
        files=[info for info, _ in found],
        paths={info.sha256: str(path) for info, path in found},
        fingerprint=fingerprint.hexdigest(),
    )


def sha256_of(path: Path) -> str:
    """The hex digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _present(folder: Path, names: tuple[str, ...]) -> Iterator[tuple[FileInfo, Path]]:
    for name in names:
        path = folder / name
        if path.is_file():
            yield FileInfo(name=name, sha256=sha256_of(path), num_bytes=path.stat().st_size), path.resolve()
