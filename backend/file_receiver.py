"""Puts fetched files together again. No I/O; the other end is `file_sender`."""

from __future__ import annotations

import asyncio

from backend.link import FilePiece, LinkError


class _Expected:
    """A file on its way."""

    __slots__ = ("data", "future", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.data = bytearray()
        self.num_bytes = num_bytes
        self.future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()


class FileReceiver:
    """The files that were asked for, by hash. Whether their hashes are right is for the caller to check."""

    def __init__(self) -> None:
        self._expected: dict[str, _Expected] = {}

    def expect(self, sha256: str, num_bytes: int) -> asyncio.Future[bytes]:
        """The file's bytes, once they are all here."""
        self._expected[sha256] = _Expected(num_bytes)
        return self._expected[sha256].future

    def receive(self, piece: FilePiece) -> None:
        """Raises `LinkError` for a file that nobody wants, out of order, or longer than announced."""
        file = self._expected.get(piece.sha256)
        if file is None:
            raise LinkError("a piece of a file that was not asked for")
        if piece.offset != len(file.data) or piece.offset + len(piece.data) > file.num_bytes:
            raise LinkError(f"a file is out of order or longer than its announced {file.num_bytes} bytes")
        file.data += piece.data
        if piece.last:
            del self._expected[piece.sha256]
            if not file.future.done():
                file.future.set_result(bytes(file.data))

    def fail(self, error: Exception) -> None:
        """No more pieces will come."""
        expected, self._expected = self._expected, {}
        for file in expected.values():
            if not file.future.done():
                file.future.set_exception(error)
