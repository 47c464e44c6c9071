"""vLLM in the tests' own process: imported with the worker's environment; stand-ins for its engine core."""

from __future__ import annotations

import array
import asyncio
import os
import warnings
from types import SimpleNamespace
from typing import Any

from backend.ports import EngineEvents, Output
from backend.vllm_config import VllmOptions, prepare_environment
from tests.components import need


def import_vllm() -> None:
    """Must come before anything else imports it: it reads its environment then. 4 s the first time."""
    need("vllm")
    prepare_environment(os.environ, VllmOptions(model="/"), is_cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.engine.async_llm  # noqa: F401


def pack(ids: list[int]) -> bytes:
    return array.array("i", ids).tobytes()


class Heard:
    """Records all that an engine or path reports, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.outputs: dict[Any, list[Output]] = {}
        self._changed = asyncio.Event()
        self.events = EngineEvents(step=self._step, closed=self._closed, failed=self._failed, died=self._died)

    def _step(self, outputs: Any) -> None:
        for output in outputs:
            self.outputs.setdefault(output.key, []).append(output)
            self._note("output", output.key, output.finish)

    def _closed(self, keys: Any) -> None:
        for key in keys:
            self._note("closed", key)

    def _failed(self, key: Any, kind: str, message: str) -> None:
        self._note("failed", key, kind, message)

    def _died(self, reason: str) -> None:
        self._note("died", reason)

    def _note(self, *what: Any) -> None:
        self.log.append(what)
        self._changed.set()

    def last(self, key: Any) -> tuple[Any, ...] | None:
        """The word that freed this key, if it has come."""
        for what in self.log:
            if what[0] in ("closed", "failed") and what[1] == key:
                return what
            if what[0] == "output" and what[1] == key and what[2] is not None:
                return what
        return None

    async def until(self, condition: Any, limit_s: float = 60.0) -> Any:
        """What the condition gives, once it is true."""
        async with asyncio.timeout(limit_s):
            while not (found := condition()):
                self._changed.clear()
                await self._changed.wait()
        return found

    async def end(self, key: Any) -> tuple[Any, ...]:
        last: tuple[Any, ...] = await self.until(lambda: self.last(key))
        return last

    def ids(self, key: Any) -> list[int]:
        return [token_id for output in self.outputs.get(key, []) for token_id in output.ids]


class FakeCore:
    """An engine core that does what the test says: `give` sends a batch."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.batches: asyncio.Queue[Any] = asyncio.Queue()

    async def get_output_async(self) -> Any:
        batch = await self.batches.get()
        if isinstance(batch, Exception):
            raise batch
        return batch

    async def add_request_async(self, request: Any) -> None:
        self.sent.append(("add", request.request_id))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.sent.append(("abort", list(request_ids)))

    def give(self, *outputs: Any, timestamp: float = 10.0) -> None:
        from vllm.v1.engine import EngineCoreOutputs

        self.batches.put_nowait(EngineCoreOutputs(outputs=list(outputs), timestamp=timestamp))

    @property
    def added(self) -> list[str]:
        return [what for kind, what in self.sent if kind == "add"]


class FakeLlm:
    """Just enough of `AsyncLLM` for a path: prompts pass through, records are kept."""

    def __init__(self) -> None:
        self.engine_core = FakeCore()
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 1000)
        self.renderer = SimpleNamespace(
            process_for_engine=lambda prompt, arrival_s: prompt,
            mm_processor_cache=SimpleNamespace(invalidate=lambda digest: self.invalidated.append(digest)),
            stat_mm_cache=lambda: None,
        )
        self.input_processor = SimpleNamespace(process_inputs=self._process)
        self.logger_manager = SimpleNamespace(record=lambda **figures: self.records.append(figures))
        self.invalidated: list[str] = []
        self.records: list[dict[str, Any]] = []

    def _process(self, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
        return SimpleNamespace(
            request_id=request_id, prompt_token_ids=prompt["prompt_token_ids"], sampling_params=params
        )
