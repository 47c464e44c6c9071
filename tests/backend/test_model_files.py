"""Which files are announced, and what changes the fingerprint."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from backend.model_files import CONFIG_FILES, TOKENIZER_FILES, ModelFilesError, read_model_files, sha256_of


def _folder(path: Path, **contents: str) -> Path:
    path.mkdir()
    for name in (*TOKENIZER_FILES, *CONFIG_FILES, "model.safetensors", "README.md"):
        (path / name).write_text(contents.get(name.split(".")[0], f"content of {name}"))
    return path


def test_files_are_listed_in_fixed_order_with_hash_and_size(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model")
    files, paths, _ = read_model_files(folder)
    assert [info.name for info in files] == [*TOKENIZER_FILES, *CONFIG_FILES]
    for info in files:
        content = (folder / info.name).read_bytes()
        assert info.sha256 == hashlib.sha256(content).hexdigest()
        assert info.num_bytes == len(content)
        assert Path(paths[info.sha256]).read_bytes() == content


def test_optional_files_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert [info.name for info in read_model_files(tmp_path).files] == ["tokenizer.json"]


def test_missing_tokenizer_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFilesError, match=r"no tokenizer\.json"):
        read_model_files(tmp_path)


def test_fingerprint_is_the_same_for_the_same_content_elsewhere(tmp_path: Path) -> None:
    first, second = _folder(tmp_path / "a"), _folder(tmp_path / "b")
    assert read_model_files(first).fingerprint == read_model_files(second).fingerprint


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_fingerprint_changes_with_each_tokenizer_file(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path / "model")
    before = read_model_files(folder).fingerprint
    (folder / name).write_text("something else")
    changed = read_model_files(folder).fingerprint
    assert changed != before
    if name != "tokenizer.json":
        (folder / name).unlink()
        assert read_model_files(folder).fingerprint not in (before, changed)


@pytest.mark.parametrize("name", [*CONFIG_FILES, "model.safetensors"])
def test_fingerprint_ignores_what_does_not_make_ids(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path / "model")
    before = read_model_files(folder).fingerprint
    (folder / name).write_text("something else")
    assert read_model_files(folder).fingerprint == before


def test_contents_swapped_between_two_files_change_the_fingerprint(tmp_path: Path) -> None:
    plain = _folder(tmp_path / "a", tokenizer_config="one", special_tokens_map="two")
    swapped = _folder(tmp_path / "b", tokenizer_config="two", special_tokens_map="one")
    assert read_model_files(plain).fingerprint != read_model_files(swapped).fingerprint


def test_tokenizer_of_another_folder_keeps_the_models_configs(tmp_path: Path) -> None:
    model, tokenizer = (
        _folder(tmp_path / "m", config="of model"),
        _folder(tmp_path / "t", tokenizer="of tokenizer"),
    )
    files, paths, fingerprint = read_model_files(model, tokenizer)
    where = {info.name: Path(paths[info.sha256]) for info in files}
    assert where["tokenizer.json"].read_text() == "of tokenizer"
    assert where["config.json"].read_text() == "of model"
    assert fingerprint == read_model_files(tokenizer).fingerprint


def test_linked_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("{}")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "tokenizer.json").symlink_to(tmp_path / "blob")
    info = read_model_files(folder).files[0]
    assert info.num_bytes == 2
    assert read_model_files(folder).paths[info.sha256] == str((tmp_path / "blob").resolve())


def test_sha256_of_reads_more_than_one_piece(tmp_path: Path) -> None:
    content = bytes(range(256)) * (5 << 12)  # 5 MiB
    (tmp_path / "big").write_bytes(content)
    assert sha256_of(tmp_path / "big") == hashlib.sha256(content).hexdigest()
