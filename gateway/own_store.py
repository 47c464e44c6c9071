"""The store of a gateway of one process: everything is in its memory, and nobody else asks.

Not here: the journals themselves, which `gateway/streams.py` holds in every case.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from uuid import uuid4

from gateway.journal import Journal
from gateway.stream_meta import PENDING, Pending, StreamMeta
from gateway.stream_ports import StoreEvents
from pipeline.stream_errors import KeyReused


class OwnStore:
    """`gateway.stream_ports.Store`: it only remembers which idempotency key stands for which stream."""

    def __init__(self) -> None:
        self.owner = uuid4().hex
        self._claims: dict[str, tuple[str, str, StreamMeta | None]] = {}  # key -> stream, digest, meta
        self._keys: dict[str, str] = {}  # stream -> key

    async def start(self, events: StoreEvents) -> None:
        """There is nothing to connect to."""

    async def close(self) -> None:
        """There is nothing to close."""

    async def claim(self, key: str, stream_id: str, body_digest: str) -> StreamMeta | Pending | None:
        """`Store.claim`."""
        _, digest, meta = self._claims.setdefault(key, (stream_id, body_digest, None))
        if digest != body_digest:
            raise KeyReused
        if meta is not None:
            return meta
        return None if self._claims[key][0] == stream_id else PENDING

    async def release(self, key: str, stream_id: str) -> None:
        """`Store.release`."""
        if self._claims.get(key, ("",))[0] == stream_id:
            del self._claims[key]

    async def create(self, meta: StreamMeta, key: str | None) -> None:
        """`Store.create`."""
        if key is not None:
            self._claims[key] = (meta.id, meta.body_digest, meta)
            self._keys[meta.id] = key

    def journal_of(self, stream_id: str) -> Callable[[Journal], None] | None:
        """Events are public at once."""
        return None

    async def meta(self, stream_id: str) -> StreamMeta | None:
        """There are no streams of others."""
        return None

    def follow(self, meta: StreamMeta, copy: Journal) -> None:
        raise AssertionError("there are no streams of others")

    def unfollow(self, stream_id: str) -> None:
        raise AssertionError("there are no streams of others")

    async def cancel(self, meta: StreamMeta) -> bool:
        raise AssertionError("there are no streams of others")

    async def delete(self, stream_id: str) -> None:
        """`Store.delete`."""
        key = self._keys.pop(stream_id, None)
        if key is not None:
            await self.release(key, stream_id)

    async def read_elsewhere(self, stream_ids: Collection[str]) -> set[str]:
        """Nobody else reads."""
        return set()
