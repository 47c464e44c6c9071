"""Real models' text sides and their references, loaded once for all tests that ask for them."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from backend.embedded import default_cache_dir, find_embedded_model
from pipeline.model_text import ModelText
from tests.components import missing
from tests.pipeline.conversations import FAMILIES, Family
from tests.pipeline.reference import Reference
from tests.tokenizers import files_of, tokenizer_folder

NAMES = tuple(FAMILIES)
every_model = pytest.mark.parametrize("name", NAMES)


class Model(NamedTuple):
    """The code under test, what it must give, and what its template takes."""

    family: Family
    text: ModelText
    reference: Reference


@cache
def model(name: str) -> Model:
    """One of `NAMES`. Takes 1 to 4 s. Skips or fails the test where its files are missing."""
    folder = _folder(name)
    family = FAMILIES[name]
    return Model(
        family, ModelText.from_files(files_of(folder)), Reference.from_folder(folder, dict(family.parsed))
    )


def _folder(name: str) -> Path:
    if name != "embedded":
        return tokenizer_folder(name)
    found = find_embedded_model(default_cache_dir(os.environ))
    if found is None:
        missing("embedded model: not in the cache; any test that serves it brings it")
    return found
