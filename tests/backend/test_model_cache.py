"""Model files: fetched once, checked, never half."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from backend.link import FileInfo
from backend.link_client import LinkClient
from backend.model_cache import ModelCache
from pipeline.errors import WorkerLost
from tests.backend.linked import linked, scripted


class Counted:
    """A link client whose fetches are counted."""

    def __init__(self, client: LinkClient) -> None:
        self.worker = client.worker
        self.num_fetches = 0
        self._client = client

    def fetch(self, sha256: str, num_bytes: int) -> object:
        self.num_fetches += 1
        return self._client.fetch(sha256, num_bytes)


async def test_files_are_fetched_once_and_then_come_from_the_folder(tmp_path: Path) -> None:
    async with scripted(tmp_path) as server, linked(server) as client:
        welcome = await client.welcomed()
        counted, cache = Counted(client), ModelCache(tmp_path / "cache")
        for _ in range(2):
            files = await cache.load(counted, welcome.files)  # type: ignore[arg-type]
            assert files["tokenizer.json"] == (tmp_path / "model" / "tokenizer.json").read_bytes()
            assert counted.num_fetches == len(welcome.files) == 2
        blobs = {path.name for path in (tmp_path / "cache" / "blobs").iterdir()}
        assert blobs == {info.sha256 for info in welcome.files}


async def test_damaged_blob_is_fetched_again(tmp_path: Path) -> None:
    async with scripted(tmp_path) as server, linked(server) as client:
        welcome = await client.welcomed()
        cache = ModelCache(tmp_path / "cache")
        whole = await cache.load(client, welcome.files)
        for path in (tmp_path / "cache" / "blobs").iterdir():
            path.write_bytes(path.read_bytes()[:-1])
        assert await cache.load(client, welcome.files) == whole


async def test_folder_that_cannot_be_written_costs_only_the_next_fetch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("in the way")
    async with scripted(tmp_path) as server, linked(server) as client:
        welcome = await client.welcomed()
        files = await ModelCache(tmp_path / "cache").load(client, welcome.files)
        assert set(files) == {info.name for info in welcome.files}
    assert "cannot keep a model file" in caplog.text


async def test_file_that_changed_since_it_was_announced_is_not_used(tmp_path: Path) -> None:
    async with scripted(tmp_path) as server, linked(server) as client:
        welcome = await client.welcomed()
        path = tmp_path / "model" / "tokenizer_config.json"
        announced = hashlib.sha256(path.read_bytes()).hexdigest()
        path.write_bytes(b"X" + path.read_bytes()[1:])
        with pytest.raises(WorkerLost, match="does not have its announced hash"):
            await ModelCache(tmp_path / "cache").load(client, welcome.files)
        assert not (tmp_path / "cache" / "blobs" / announced).exists()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([FileInfo("t", "../../../escape", 3)], "no SHA-256"),
        ([FileInfo("t", "A" * 64, 3)], "no SHA-256"),
        ([FileInfo("t", "a" * 64, -1)], "-1 bytes"),
        ([FileInfo("t", "a" * 64, 1 << 40)], "the limit is"),
        ([FileInfo("t", "a" * 64, 3)] * 65, "65 files; the limit is 64"),
    ],
)
async def test_announcement_that_no_model_has_is_refused(
    tmp_path: Path, files: list[FileInfo], reason: str
) -> None:
    async with scripted(tmp_path) as server, linked(server) as client:
        with pytest.raises(WorkerLost, match=reason):
            await ModelCache(tmp_path / "cache").load(client, files)
