"""Whom an answer is for that outlives every connection: its events go into a journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.record import RequestRecord
from pipeline.errors import HeadraceError

if TYPE_CHECKING:
    from gateway.journal_writer import JournalOutlet


class Detached:
    """`gateway.client.Client` of a resumable stream. It never goes away by itself: `gateway/streams.py`
    decides when nobody wants it any more."""

    read_timeout_s = None

    def __init__(self, record: RequestRecord, outlet: JournalOutlet) -> None:
        self.record = record
        self.outlet = outlet
        self.on_gone: Callable[[str], None] = _ignore
        self._over = asyncio.Event()
        outlet.on_closed = self._over.set

    async def finished(self) -> None:
        """Returns when the last event was written."""
        await self._over.wait()

    def refuse(self, error: HeadraceError) -> None:
        """It waits for nothing."""

    def close(self) -> None:
        """It has no connection."""


def _ignore(reason: str) -> None:
    pass
