"""A model's files beside the gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.catalog import MisfitError
from backend.local_model import read_local_model
from backend.model_files import read_model_files
from tests.backend.linked import make_tokenizer


def test_files_and_fingerprint_are_those_of_a_linked_worker(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    local = read_local_model(folder)
    assert local.fingerprint == read_model_files(folder).fingerprint
    assert set(local.read()) == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    assert local.read()["config.json"] == b"{}"
    assert local.default_sampling is None


def test_defaults_are_what_vllm_takes_from_a_generation_config(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model")
    config = folder / "generation_config.json"
    config.write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": null, "eos_token_id": [1], "do_sample": true}'
    )
    assert read_local_model(folder).default_sampling == {"temperature": 0.6, "top_k": 20}
    config.write_text('{"eos_token_id": 2}')
    assert read_local_model(folder).default_sampling == {}


@pytest.mark.parametrize("broken", ["[]", "{", "5"])
def test_folder_that_cannot_be_used_is_named(tmp_path: Path, broken: str) -> None:
    with pytest.raises(MisfitError, match=r"nowhere cannot be used.*has no tokenizer\.json"):
        read_local_model(tmp_path / "nowhere")
    folder = make_tokenizer(tmp_path / "model")
    (folder / "generation_config.json").write_text(broken)
    with pytest.raises(MisfitError, match=r"generation_config\.json is no JSON object"):
        read_local_model(folder)
