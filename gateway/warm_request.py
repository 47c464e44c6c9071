"""One warm-up as a worker sees it: a greedy request for one token, and the sink that waits for its end.

When it is sent, and what its end means, is `gateway/warmup.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

from gateway.warm_table import WarmKey
from pipeline.encoding import BYTES_PER_ID
from pipeline.errors import EngineFailed, HeadraceError
from pipeline.ports import Handle, Sink
from pipeline.values import EngineCall, FirstToken, Prompt, TokenLogprobs

WARM_PRIORITY: Final = (1 << 31) - 1  # a larger number is later; clients rarely send one at all


class Introduction(Protocol):
    """What a worker says of itself; `backend.link.Welcome` is one."""

    worker: str
    model_names: list[str]
    max_model_len: int
    block_size: int
    fingerprint: str


class Worker(Protocol):
    """What a warm-up needs of a worker; `backend.remote_worker.RemoteWorker` is one."""

    @property
    def key(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def welcome(self) -> Introduction | None: ...
    def submit_background(self, call: EngineCall, sink: Sink) -> Handle: ...


class OneToken:
    """`pipeline.ports.Sink` of a warm-up: `ended` gives what came with the first token, or the error."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[FirstToken | HeadraceError] = loop.create_future()
        self._first = FirstToken()

    def tokens(
        self,
        ids: list[int],
        finish: str | None,
        stop: int | str | None,
        first: FirstToken | None,
        logprobs: Sequence[TokenLogprobs] | None,
        now_s: float,
    ) -> None:
        self._first = first or self._first
        if finish in ("stop", "length"):
            if not self.ended.done():
                self.ended.set_result(self._first)
        elif finish is not None:
            self.failed(EngineFailed(f"The engine ended the request with the reason {finish!r}."))

    def failed(self, error: HeadraceError) -> None:
        if not self.ended.done():  # its worker may have been given up before
            self.ended.set_result(error)


def call_for(key: WarmKey, ids: bytes) -> EngineCall:
    """The cheapest request that leaves these ids in the cache under the key's salt."""
    return EngineCall(
        model=key.model,
        prompt=Prompt(memoryview(ids), len(ids) // BYTES_PER_ID, affinity=0),
        sampling={"temperature": 0.0},
        max_tokens=1,
        priority=WARM_PRIORITY,
        cache_salt=key.salt,
    )
