"""What a server tells of itself when it is connected, made into what the catalog keeps and warm-ups need.

No I/O.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from backend.link import Welcome
from backend.media_support import support_of
from pipeline.values import ModelInfo


def model_infos(welcome: Welcome) -> list[ModelInfo]:
    """What a linked worker tells of its models: one under each of its names."""
    return [
        ModelInfo(
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
        for name in welcome.model_names
    ]


@dataclass(slots=True)
class Introduced:
    """What warm-ups need of a server that sends no WELCOME."""

    worker: str
    model_names: list[str]
    max_model_len: int
    block_size: int
    fingerprint: str


def introduced(worker: str, infos: Sequence[ModelInfo]) -> Introduced:
    """The models of one server, of which there is one at least: they share its cache."""
    return Introduced(
        worker=worker,
        model_names=[info.name for info in infos],
        max_model_len=min(info.max_model_len for info in infos),
        block_size=infos[0].block_size,
        fingerprint=infos[0].fingerprint,
    )
