"""Prompts on their way to a worker in pieces: put together, bounded in bytes over all connections. No I/O."""

from __future__ import annotations

from typing import Protocol


class Arriving(Protocol):
    """What a prompt is collected in; `backend.server_stream.Stream` is one."""

    pieces: list[bytes]
    num_bytes: int  # of the pieces


class Assembly:
    """One worker's prompts in pieces. `num_bytes` is their sum."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def refusal(self, stream: Arriving, ids: bytes, max_tokens: int) -> tuple[str, str] | None:
        """Kind and message of why these further ids (int32 bytes) cannot be taken, or None."""
        num_bytes = stream.num_bytes + len(ids)
        if len(ids) % 4:
            return "rejected", f"a part of the prompt has {len(ids)} bytes, not 4 per id"
        if num_bytes > 4 * max_tokens:
            return "rejected", f"the prompt has {num_bytes // 4} tokens or more; the limit is {max_tokens}"
        if self.num_bytes + len(ids) > self._max_bytes:
            return "busy", f"prompts on their way exceed {self._max_bytes} bytes"
        return None

    def add(self, stream: Arriving, ids: bytes) -> None:
        """A piece that is not the last."""
        stream.pieces.append(ids)
        stream.num_bytes += len(ids)
        self.num_bytes += len(ids)

    def finish(self, stream: Arriving, ids: bytes) -> bytes:
        """The whole prompt, of which `ids` is the last part, empty after pieces of a gateway that pools ids.

        One join for all: a single part is the prompt itself, without a copy.
        """
        whole = b"".join((*stream.pieces, ids) if ids else stream.pieces)
        self.drop(stream)
        return whole

    def drop(self, stream: Arriving) -> None:
        """Forget the pieces of a prompt."""
        self.num_bytes -= stream.num_bytes
        stream.pieces, stream.num_bytes = [], 0
