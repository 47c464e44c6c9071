"""One at a time among the gateway processes of a machine: a lock file for each thing that is taken in turns.

The kernel gives a dead process's turn back. Who waits asks again every few tens of milliseconds: nothing that
is in a hurry takes turns. Processes on other machines are not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import random
from collections.abc import AsyncIterator
from hashlib import blake2b
from pathlib import Path
from typing import IO, Final

_POLL_S: Final = (0.02, 0.06)  # at random, so that several do not ask in step


class Turns:
    """Turns by key. `folder` is private to the processes that share them; None: there is only this one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @contextlib.asynccontextmanager
    async def take(self, key: str) -> AsyncIterator[None]:
        """Wait for the key's turn, and keep it until the `with` ends. Raises `OSError` without a folder."""
        if self._folder is None:
            yield
            return
        path = self._folder / f"turn-{blake2b(key.encode(), digest_size=8).hexdigest()}.lock"
        with path.open("ab") as file:  # closing it ends the turn
            while not _try_lock(file):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(random.uniform(*_POLL_S))
            yield


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
