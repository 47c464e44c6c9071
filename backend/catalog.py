"""Which models the linked workers serve, and who may join: one fingerprint per served name.

Two workers of one name whose tokenizer or template differ would give one conversation two meanings, so the
second is refused. A name whose last worker has left may come back as something else. An engine that sees
another end of the reasoning than the gateway would bind its grammars there: its worker is refused too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

from backend.link import Welcome
from backend.media_support import support_of
from pipeline.values import ModelInfo

OnModel = Callable[[ModelInfo, Mapping[str, bytes]], Awaitable[None]]
ParserOf = Callable[[str], str | None]  # a model's name -> the reasoning parser that the gateway has for it


class FingerprintError(Exception):
    """A worker of a known name with another tokenizer or template; the message names both sides."""


class MisfitError(Exception):
    """A worker's model and this gateway's settings do not fit: it is not to be used. The message says why."""


class ReasoningParserError(MisfitError):
    """A worker whose engine has another reasoning parser than the gateway; the message says what to set."""


def no_parser(model: str) -> str | None:
    """For a gateway that parses no reasoning."""
    return None


@dataclass(slots=True)
class _Entry:
    info: ModelInfo
    held_by: dict[Hashable, str] = field(default_factory=dict)  # worker object -> its name


class Catalog:
    """Served names and their workers. `on_model` is called before the first worker of a model is ready."""

    def __init__(self, on_model: OnModel, reasoning_parser_of: ParserOf = no_parser) -> None:
        self._on_model = on_model
        self._reasoning_parser_of = reasoning_parser_of
        self._entries: dict[str, _Entry] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def join(
        self, worker: Hashable, welcome: Welcome, read_files: Callable[[], Awaitable[Mapping[str, bytes]]]
    ) -> None:
        """Add a worker under each of its names.

        Raises `ReasoningParserError`, `FingerprintError`, and what `on_model` raises. The files are read only
        where `on_model` must be told. After an error call `leave`.
        """
        for name in welcome.model_names:
            check_reasoning_parser(name, welcome, self._reasoning_parser_of(name))
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


def check_reasoning_parser(model: str, welcome: Welcome, ours: str | None) -> None:
    """Raises `ReasoningParserError` unless engine and gateway have the same one, or none."""
    theirs = welcome.reasoning_parser or None
    if theirs == ours:
        return
    if theirs is None:
        advice = f"start the worker with --reasoning-parser {ours}, or the gateway without it"
    else:
        advice = f"start the gateway with --reasoning-parser {theirs} (or {model}={theirs})"
    raise ReasoningParserError(
        f"worker {welcome.worker} serves {model!r} with {_named(theirs)}, but this gateway has "
        f"{_named(ours)} for it: {advice}"
    )


def _named(parser: str | None) -> str:
    return "no reasoning parser" if parser is None else f"the reasoning parser {parser!r}"


def _info(name: str, welcome: Welcome) -> ModelInfo:
    return ModelInfo(
        name=name,
        max_model_len=welcome.max_model_len,
        block_size=welcome.block_size,
        default_sampling=welcome.default_sampling,
        fingerprint=welcome.fingerprint,
        scripted=welcome.scripted,
        created=int(time.time()),
        reasoning_parser=welcome.reasoning_parser or None,
        media=support_of(welcome),
    )
