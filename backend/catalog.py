"""Which models the replicas serve, and who may join: one fingerprint per served name.

Two workers of one name whose tokenizer or template differ would give one conversation two meanings, so the
second is refused. A name whose last worker has left may come back as something else. An engine that sees
another end of the reasoning than the gateway would bind its grammars there: its worker is refused too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    held_by: dict[Hashable, str] = field(default_factory=dict)  # replica -> its title


class Catalog:
    """Served names and their workers. `on_model` is called before the first worker of a model is ready."""

    def __init__(self, on_model: OnModel, reasoning_parser_of: ParserOf = no_parser) -> None:
        self._on_model = on_model
        self._reasoning_parser_of = reasoning_parser_of
        self._entries: dict[str, _Entry] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def join(
        self,
        replica: Hashable,
        title: str,
        infos: Sequence[ModelInfo],
        read_files: Callable[[], Awaitable[Mapping[str, bytes]]],
    ) -> None:
        """Add a replica under each name that it serves. `title`: what errors call it.

        Raises `ReasoningParserError`, `FingerprintError`, and what `on_model` raises. The files are read only
        where `on_model` must be told. After an error call `leave`.
        """
        for info in infos:
            check_reasoning_parser(title, info, self._reasoning_parser_of(info.name))
        for info in infos:
            async with self._locks.setdefault(info.name, asyncio.Lock()):
                await self._join_one(replica, title, info, read_files)

    async def _join_one(
        self,
        replica: Hashable,
        title: str,
        info: ModelInfo,
        read_files: Callable[[], Awaitable[Mapping[str, bytes]]],
    ) -> None:
        name = info.name
        entry = self._entries.get(name)
        if entry is not None and entry.held_by:
            if entry.info.fingerprint != info.fingerprint:
                raise FingerprintError(
                    f"worker {title} serves {name!r} with fingerprint {info.fingerprint[:12]}, but "
                    f"{', '.join(entry.held_by.values())} with {entry.info.fingerprint[:12]}: "
                    f"their tokenizers or templates differ"
                )
        elif entry is None or replace(entry.info, created=info.created) != info:
            await self._on_model(info, await read_files())
            entry = self._entries[name] = _Entry(info)
        entry.held_by[replica] = title

    def leave(self, replica: Hashable, but: Container[str] = ()) -> None:
        """It serves nothing any more, `but` for these names."""
        for name, entry in self._entries.items():
            if name not in but:
                entry.held_by.pop(replica, None)

    def names(self) -> tuple[str, ...]:
        """Every name that was ever served, whether or not a worker is there now."""
        return tuple(self._entries)

    def info(self, name: str) -> ModelInfo | None:
        entry = self._entries.get(name)
        return None if entry is None else entry.info


def check_reasoning_parser(title: str, info: ModelInfo, ours: str | None) -> None:
    """Raises `ReasoningParserError` unless engine and gateway have the same one, or none."""
    model, theirs = info.name, info.reasoning_parser
    if theirs == ours:
        return
    if theirs is None:
        advice = f"start the worker with --reasoning-parser {ours}, or the gateway without it"
    else:
        advice = f"start the gateway with --reasoning-parser {theirs} (or {model}={theirs})"
    raise ReasoningParserError(
        f"worker {title} serves {model!r} with {_named(theirs)}, but this gateway has "
        f"{_named(ours)} for it: {advice}"
    )


def _named(parser: str | None) -> str:
    return "no reasoning parser" if parser is None else f"the reasoning parser {parser!r}"
