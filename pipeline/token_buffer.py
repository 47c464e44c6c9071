"""A prompt's token ids in one int32 buffer.

Not here yet: pools, cutting back and sharing between the turns of a conversation.
"""

from __future__ import annotations

from pipeline.encoding import BYTES_PER_ID


class TokenBuffer:
    """Int32 little-endian ids that grow by whole encoded pieces. Once viewed it is sealed."""

    __slots__ = ("_bytes", "_is_sealed")

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._is_sealed = False

    @property
    def num_tokens(self) -> int:
        return len(self._bytes) // BYTES_PER_ID

    def append(self, ids: bytes | bytearray | memoryview) -> None:
        """Add packed ids (`pipeline.encoding.pack_ids`). Raises `ValueError` if they end within an id."""
        if self._is_sealed:
            raise RuntimeError("the buffer was viewed; its ids are final")
        num_bytes = memoryview(ids).nbytes
        if num_bytes % BYTES_PER_ID:
            raise ValueError(f"packed ids have {num_bytes} bytes, which is no multiple of {BYTES_PER_ID}")
        self._bytes += ids

    def view(self) -> memoryview:
        """The ids as read-only bytes, without a copy. No `append` after it."""
        self._is_sealed = True
        return memoryview(self._bytes).toreadonly()
