"""What the two ways of reading tokens out of vLLM, `vllm_steps` and `vllm_generate`, have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Protocol

from backend.ports import EngineEvents, Job, Key, Output

PROBE_IDS: Final = (1).to_bytes(4, "little") * 4  # any vocabulary has a token 1


class TokenPath(Protocol):
    """Takes jobs to the engine and brings its tokens back. `events` may be replaced while no job runs."""

    name: str
    events: EngineEvents

    async def start(self) -> None: ...
    def submit(self, key: Key, job: Job) -> None: ...
    def abort(self, keys: Sequence[Key]) -> None: ...
    def flush(self) -> None:
        """Have vLLM's metrics show all that has come."""

    async def close(self) -> None:
        """Drop all jobs without a word and stop reading."""


class ProbeError(Exception):
    """A probe did not give what it must."""


class Probe:
    """One request run through a path before gateways may use it, to prove it and to warm the engine."""

    def __init__(self, **sampling: Any) -> None:
        self._sampling = {"max_tokens": 3, "ignore_eos": True, **sampling}
        self._ids: list[int] = []
        self._extras: list[Any] = []
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, path: TokenPath, limit_s: float) -> None:
        """Raises `ProbeError` where tokens, finish or logprobs are not as asked, or do not come in time."""
        path.events = EngineEvents(step=self._step, closed=self._closed, failed=self._failed, died=self._end)
        path.submit(self, Job(PROBE_IDS, self._sampling))
        try:
            await asyncio.wait_for(self._ended, limit_s)
        except TimeoutError:
            raise ProbeError(f"no finish within {limit_s:.0f} s") from None
        if len(self._ids) != self._sampling["max_tokens"]:
            raise ProbeError(f"{len(self._ids)} tokens came; {self._sampling['max_tokens']} were asked for")
        if "logprobs" in self._sampling and not all(extra and extra.logprobs for extra in self._extras):
            raise ProbeError("tokens came without the logprobs that were asked for")

    def _step(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self._ids += output.ids
            self._extras.append(output.extra)
            if output.finish is not None:
                self._end(None if output.finish == "length" else f"it finished with {output.finish}")

    def _closed(self, keys: Sequence[Key]) -> None:
        self._end("it was aborted")

    def _failed(self, key: Key, kind: str, message: str) -> None:
        self._end(f"{kind}: {message}")

    def _end(self, fault: str | None) -> None:
        if self._ended.done():
            return
        if fault is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(ProbeError(fault))
