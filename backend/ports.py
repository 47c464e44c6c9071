"""What a worker process's engine is to its link server: vLLM and the scripted engine both are one.

Plain callbacks on the event loop thread. `key` is the link server's own object for one running slot; the
engine only hands it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from backend.link import Extra, FileInfo, Stats
from pipeline.values import MediaKind, MediaSupport, Medium

Key = Any


class Output(msgspec.Struct, gc=False):
    """One slot's share of an engine step. A msgspec struct, since one is made per token: 0.06 us, not 0.25.

    The link server reads it before `EngineEvents.step` returns and keeps only `ids` and `extra`, unchanged.
    """

    key: Key
    ids: list[int]
    finish: str | None = None
    stop: int | str | None = None
    extra: Extra | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a worker's WELCOME says of its engine and model. `paths` maps a file's sha256 to where it lies."""

    model_names: Sequence[str]
    max_model_len: int
    block_size: int
    default_sampling: Mapping[str, Any]
    fingerprint: str
    files: Sequence[FileInfo]
    paths: Mapping[str, str]
    versions: Mapping[str, str]
    engine_path: str
    max_running: int = 0
    reasoning_parser: str | None = None
    scripted: bool = False
    media: Mapping[MediaKind, MediaSupport] = field(default_factory=dict)  # what the model takes beside text


@dataclass(frozen=True, slots=True)
class Job:
    """One choice to generate. `ids`: int32 little-endian bytes of the whole prompt, media not expanded."""

    ids: bytes
    sampling: Mapping[str, Any]
    priority: int = 0
    cache_salt: str | None = None
    reasoning_ended: bool | None = None  # as in `pipeline.values.EngineCall`
    reasoning_parser_kwargs: Mapping[str, Any] | None = None
    media: tuple[Medium, ...] = ()  # of kinds that `EngineInfo.media` has; `data` is any buffer


@dataclass(slots=True)
class EngineEvents:
    """Where an engine reports. Set by the link server before `start`."""

    step: Callable[[Sequence[Output]], None]  # one engine step: every slot that got something
    closed: Callable[[Sequence[Key]], None]  # aborted: no output for these follows
    failed: Callable[[Key, str, str], None]  # (key, kind, message); kind as in link.Error
    died: Callable[[str], None]  # the engine is dead; every slot fails


class WorkerEngine(Protocol):
    """Generates token ids for jobs."""

    @property
    def info(self) -> EngineInfo: ...

    async def start(self, events: EngineEvents) -> None:
        """Load and warm up; returns when ready to take jobs."""

    def submit(self, key: Key, job: Job) -> None:
        """Take a job. Whatever is wrong with it is reported through `events.failed`."""

    def abort(self, keys: Sequence[Key]) -> None:
        """Stop jobs. Answered by `events.closed` for every key that had no finish or failure before."""

    def stats(self) -> Stats:
        """The figures of this moment; metrics that the engine registered show them, too."""

    async def stop(self) -> None: ...
