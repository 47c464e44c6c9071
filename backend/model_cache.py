"""A gateway's copies of model files, by hash: `FOLDER/blobs/SHA256`. What is missing comes over the link.

A blob is written under another name, checked, and renamed, so that a half-written one is never read; each is
checked again when it is read. Several processes may share a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from backend.link import FileInfo
from backend.link_client import LinkClient
from pipeline.errors import WorkerLost

logger = logging.getLogger(__name__)

MAX_FILES: Final = 64
MAX_FILE_BYTES: Final = 256 << 20  # the largest tokenizer.json known has 35 MB
FETCH_LIMIT_S: Final = 120.0
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class ModelCache:
    """Files of models, from the folder or from a worker."""

    def __init__(self, folder: Path) -> None:
        self._blobs = folder / "blobs"

    async def load(self, client: LinkClient, files: Sequence[FileInfo]) -> dict[str, bytes]:
        """All these files by name.

        Raises `WorkerLost` when the worker announces what no model has, sends other bytes than it announced,
        takes too long, or leaves.
        """
        _check(client.worker, files)
        return {info.name: await self._one(client, info) for info in files}

    async def _one(self, client: LinkClient, info: FileInfo) -> bytes:
        data = await asyncio.to_thread(self._read, info.sha256)
        if data is not None:
            return data
        try:
            async with asyncio.timeout(FETCH_LIMIT_S):
                data = await client.fetch(info.sha256, info.num_bytes)
        except TimeoutError:
            raise WorkerLost(
                f"worker {client.worker} took longer than {FETCH_LIMIT_S:g} s to send {info.name!r}"
            ) from None
        if hashlib.sha256(data).hexdigest() != info.sha256:
            raise WorkerLost(
                f"worker {client.worker} sent a {info.name!r} that does not have its announced hash"
            )
        await asyncio.to_thread(self._write, info.sha256, data)
        return data

    def _read(self, sha256: str) -> bytes | None:
        try:
            data = (self._blobs / sha256).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == sha256 else None

    def _write(self, sha256: str, data: bytes) -> None:
        """Keep a blob. A folder that cannot be written costs the next start a fetch, and nothing now."""
        temporary = ""
        try:
            self._blobs.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._blobs, prefix=".part-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._blobs / sha256)
        except OSError as error:
            logger.warning("cannot keep a model file in %s: %s", self._blobs, error)
            if temporary:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)


def _check(worker: str, files: Sequence[FileInfo]) -> None:
    if len(files) > MAX_FILES:
        raise WorkerLost(f"worker {worker} announces {len(files)} files; the limit is {MAX_FILES}")
    for info in files:
        if not _SHA256.fullmatch(info.sha256):
            raise WorkerLost(f"worker {worker} announces {info.name[:200]!r} with a hash that is no SHA-256")
        if not 0 <= info.num_bytes <= MAX_FILE_BYTES:
            raise WorkerLost(
                f"worker {worker} announces {info.name[:200]!r} with {info.num_bytes} bytes; "
                f"the limit is {MAX_FILE_BYTES}"
            )
