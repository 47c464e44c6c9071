"""What resumable streams need of the place where several processes keep them. `gateway/own_store.py` is that
place for one process alone, `gateway/stream_store.py` the shared one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from gateway.journal import Journal
from gateway.stream_meta import Pending, StreamMeta
from pipeline.errors import HeadraceError


class StoreEvents(Protocol):
    """What a store tells of this process's own streams. Called on the event loop."""

    def cancel_asked(self, stream_id: str) -> None:
        """A client has deleted it through another process."""

    def forget_asked(self, stream_id: str) -> None:
        """A client has deleted it through another process, after its end: it is no longer in the store."""

    def copy_lost(self, stream_id: str, error: HeadraceError) -> None:
        """The copy of another process's stream gets nothing more from here."""

    def broken(self, stream_id: str, error: HeadraceError) -> None:
        """Its events cannot be kept any more: it must end."""


class Store(Protocol):
    """Raises `StoreUnavailable` where it waits for an answer that does not come."""

    owner: str  # this process, until it ends

    async def start(self, events: StoreEvents) -> None: ...

    async def close(self) -> None: ...

    async def claim(self, key: str, stream_id: str, body_digest: str) -> StreamMeta | Pending | None:
        """Take an idempotency key; None if it was free. Else what it stands for: `body_digest` tells whether
        that is the same request. Raises `KeyReused` if a request with another body holds it."""

    async def release(self, key: str, stream_id: str) -> None:
        """The request has failed before there was a stream."""

    async def create(self, meta: StreamMeta, key: str | None) -> None:
        """Make the stream known, before its first event."""

    def journal_of(self, stream_id: str) -> Callable[[Journal], None] | None:
        """`on_written` of the journal of a stream of this process."""

    async def meta(self, stream_id: str) -> StreamMeta | None:
        """A stream of any process, if there is one."""

    def follow(self, meta: StreamMeta, copy: Journal) -> None:
        """Fill the copy of a stream of another process, from its beginning."""

    def unfollow(self, stream_id: str) -> None: ...

    async def cancel(self, meta: StreamMeta) -> bool:
        """Ask the process that owns the stream to end it. Whether it had ended, and is deleted now."""

    async def delete(self, stream_id: str) -> None:
        """Nobody knows it any more, its owner included."""

    async def read_elsewhere(self, stream_ids: Collection[str]) -> set[str]:
        """Those that are being read through another process, or were within the grace period."""
