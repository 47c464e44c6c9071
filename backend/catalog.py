"""Which models the linked workers serve, and who may join: one fingerprint per served name.

Two workers of one name whose tokenizer or template differ would give one conversation two meanings, so the
second is refused. A name whose last worker has left may come back as something else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

from backend.link import Welcome
from pipeline.values import ModelInfo

OnModel = Callable[[ModelInfo, Mapping[str, bytes]], Awaitable[None]]


class FingerprintError(Exception):
    """A worker of a known name with another tokenizer or template; the message names both sides."""


@dataclass(slots=True)
class _Entry:
    info: ModelInfo
    held_by: dict[Hashable, str] = field(default_factory=dict)  # worker object -> its name


class Catalog:
    """Served names and their workers. `on_model` is called before the first worker of a model is ready."""

    def __init__(self, on_model: OnModel) -> None:
        self._on_model = on_model
        self._entries: dict[str, _Entry] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def join(
        self, worker: Hashable, welcome: Welcome, read_files: Callable[[], Awaitable[Mapping[str, bytes]]]
    ) -> None:
        """Add a worker under each of its names. Raises `FingerprintError`, and what `on_model` raises.

        The files are read only where `on_model` must be told. After an error call `leave`.
        """
        for name in welcome.model_names:
            async with self._locks.setdefault(name, asyncio.Lock()):
                await self._join_one(name, worker, welcome, read_files)

    async def _join_one(
        self,
        name: str,
        worker: Hashable,
        welcome: Welcome,
        read_files: Callable[[], Awaitable[Mapping[str, bytes]]],
    ) -> None:
        entry = self._entries.get(name)
        info = _info(name, welcome)
        if entry is not None and entry.held_by:
            if entry.info.fingerprint != info.fingerprint:
                raise FingerprintError(
                    f"worker {welcome.worker} serves {name!r} with fingerprint {info.fingerprint[:12]}, but "
                    f"{', '.join(entry.held_by.values())} with {entry.info.fingerprint[:12]}: "
                    f"their tokenizers or templates differ"
                )
        elif entry is None or replace(entry.info, created=info.created) != info:
            await self._on_model(info, await read_files())
            entry = self._entries[name] = _Entry(info)
        entry.held_by[worker] = welcome.worker

    def leave(self, worker: Hashable) -> None:
        for entry in self._entries.values():
            entry.held_by.pop(worker, None)

    def names(self) -> tuple[str, ...]:
        """Every name that was ever served, whether or not a worker is there now."""
        return tuple(self._entries)

    def info(self, name: str) -> ModelInfo | None:
        entry = self._entries.get(name)
        return None if entry is None else entry.info


def _info(name: str, welcome: Welcome) -> ModelInfo:
    return ModelInfo(
        name=name,
        max_model_len=welcome.max_model_len,
        block_size=welcome.block_size,
        default_sampling=welcome.default_sampling,
        fingerprint=welcome.fingerprint,
        scripted=welcome.scripted,
        created=int(time.time()),
    )
