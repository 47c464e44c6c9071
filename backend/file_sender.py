"""Answers FETCH: model files by hash, in pieces, between the steps and never faster than the reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

from backend.link import FilePiece, LinkError

MAX_WAITING_FETCHES: Final = 64  # a model has about seven files
FILE_PIECE_BYTES: Final = 256 << 10  # read and sent within 0.2 ms, so that a step in between is not late


class FileSender:
    """Sends the asked files in order.

    `send` writes one frame, `is_paused` says whether the reader is behind, `fail` ends the connection.
    """

    def __init__(
        self, send: Callable[[FilePiece], None], is_paused: Callable[[], bool], fail: Callable[[str], None]
    ) -> None:
        self._send = send
        self._is_paused = is_paused
        self._fail = fail
        self._waiting: deque[tuple[str, str]] = deque()
        self._file: BinaryIO | None = None
        self._offset = 0
        self._scheduled: asyncio.Handle | None = None

    def fetch(self, sha256: str, paths: Mapping[str, str]) -> None:
        """Queue a file. Raises `LinkError` for a hash that was not announced, and for too many at once."""
        path = paths.get(sha256)
        if path is None:
            raise LinkError("fetch of a file that this worker did not announce")
        if len(self._waiting) >= MAX_WAITING_FETCHES:
            raise LinkError(f"more than {MAX_WAITING_FETCHES} files asked for at once")
        self._waiting.append((sha256, path))
        self.resume()

    def resume(self) -> None:
        """Go on, in the loop's next round, if there is anything to send."""
        if self._waiting and self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self._send_piece)

    def close(self) -> None:
        self._waiting.clear()
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._close_file()

    def _send_piece(self) -> None:
        self._scheduled = None
        if self._is_paused():
            return  # resume() comes when the reader has caught up
        sha256, path = self._waiting[0]
        try:
            data = self._read(path)
        except OSError as error:
            self._fail(f"cannot read a model file: {error}")
            return
        last = len(data) < FILE_PIECE_BYTES
        self._send(FilePiece(sha256, self._offset, data, last))
        self._offset += len(data)
        if last:
            self._waiting.popleft()
            self._close_file()
        self.resume()

    def _read(self, path: str) -> bytes:
        if self._file is None:
            self._file, self._offset = Path(path).open("rb"), 0  # noqa: SIM115
        return self._file.read(FILE_PIECE_BYTES)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
