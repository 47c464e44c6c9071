"""The files of real models' tokenizers, which `make setup` has fetched. No weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pipeline.model_text import FILES
from tests.components import need


def tokenizer_folder(name: str) -> Path:
    """The folder of one of `tests.components.TOKENIZERS`. Skips or fails the test where it is missing."""
    return Path(need("tokenizers")) / name


@cache
def files_of(folder: Path) -> dict[str, bytes]:
    """File name -> bytes of a model's folder, as `ModelText.from_files` takes them."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}
