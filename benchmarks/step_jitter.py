"""The gaps between a worker's steps while long prompts arrive. No command; see `prompt_path`.

The worker is a process of its own: the scripted one, or vLLM's real front end on the step path over an engine
core that only counts. The gateway that sends the prompts is the calling process.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import uvloop

from backend.address import Address
from backend.link import Stats
from backend.link_client import open_link
from backend.link_server import LinkServer
from backend.ports import EngineEvents, EngineInfo, Job, Key, Output, WorkerEngine
from backend.scripted import ScriptedEngine, ScriptedOptions
from backend.vllm_config import VllmOptions, is_cpu_build, prepare_environment
from benchmarks.prompt_path import MAX_MODEL_LEN, MODEL, Deaf, make_call
from benchmarks.report import Report, percentile

NUM_STREAMS: Final = 8  # that run while long prompts arrive
WARM_UP_S: Final = 1.0

Stamp: TypeAlias = tuple[float, float]  # seconds: monotonic, the same in every process, and CPU


@dataclass(frozen=True, slots=True)
class Jitter:
    """Milliseconds from one STEP frame of the running streams to the next, as the worker writes them.

    On a machine with other work the gaps show that too. The CPU time that the worker, with all its threads,
    spends between two frames does not: what is not in it could not delay a step.
    """

    quiet_ms: Sequence[float]
    busy_ms: Sequence[float]  # while long prompts arrive
    quiet_cpu_ms: Sequence[float]
    busy_cpu_ms: Sequence[float]
    num_prompts: int


def step_jitter(
    worker: StepWorker, window_s: float, prompt_tokens: int = 100_000, prompts_per_s: float = 5.0
) -> Jitter:
    """The gaps of 8 streams over two windows: with nothing else, and with prompts that arrive one by one.

    The worker is a process of its own; the gateway that sends the prompts runs here.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        address = Address(path=f"{folder}/link")
        process = spawn.Process(target=_serve, args=(worker, address, theirs))
        process.start()
        try:
            if not ours.poll(120) or ours.recv() != "ready":
                raise RuntimeError("the worker did not get ready")
            windows = uvloop.run(_load(address, window_s, prompt_tokens, prompts_per_s))
            ours.send("stop")
            stamps: list[Stamp] = ours.recv()
        finally:
            process.terminate()
            process.join()
    quiet, busy = ([stamp for stamp in stamps if start <= stamp[0] <= end] for start, end in windows)
    num_prompts = round(window_s * prompts_per_s)
    return Jitter(_gaps_ms(quiet, 0), _gaps_ms(busy, 0), _gaps_ms(quiet, 1), _gaps_ms(busy, 1), num_prompts)


def _gaps_ms(stamps: Sequence[Stamp], clock: int) -> list[float]:
    return [1e3 * (after[clock] - before[clock]) for before, after in pairwise(stamps)]


async def _load(
    address: Address, window_s: float, prompt_tokens: int, prompts_per_s: float
) -> list[tuple[float, float]]:
    """Start and end of the quiet and of the busy window."""
    client = await open_link(address)
    await client.welcomed()
    for number in range(NUM_STREAMS):
        client.submit(make_call(8, MAX_MODEL_LEN // 2, number), Deaf())
    calls = [make_call(prompt_tokens, seed=number) for number in range(4)]
    await asyncio.sleep(WARM_UP_S)
    windows = []
    for is_busy in (False, True):
        start_s = time.monotonic()
        for number in range(round(window_s * prompts_per_s)):
            await asyncio.sleep(max(0.0, start_s + number / prompts_per_s - time.monotonic()))
            if is_busy:
                client.submit(calls[number % len(calls)], Deaf())
        await asyncio.sleep(max(0.0, start_s + window_s - time.monotonic()))
        windows.append((start_s, time.monotonic()))
    client.close()
    return windows


def _serve(worker: StepWorker, address: Address, pipe: Connection) -> None:
    """The worker's process: serves until the pipe says stop, then sends when each step was written."""
    uvloop.run(_served(worker, address, pipe))


async def _served(worker: StepWorker, address: Address, pipe: Connection) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), stop.set)
    stamps: list[Stamp] = []
    server = LinkServer(_Stamped(worker(), stamps), address)
    await server.start()
    pipe.send("ready")
    await stop.wait()
    loop.remove_reader(pipe.fileno())
    await server.stop()
    pipe.send(stamps)


class _Stamped:
    """`WorkerEngine` around another one: notes when each of its steps had been written."""

    def __init__(self, engine: WorkerEngine, stamps: list[Stamp]) -> None:
        self._engine = engine
        self._stamps = stamps
        self.submit, self.abort = engine.submit, engine.abort
        self.stats, self.stop = engine.stats, engine.stop

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def start(self, events: EngineEvents) -> None:
        step = events.step

        def stamped(outputs: Sequence[Output]) -> None:
            step(outputs)
            self._stamps.append((time.monotonic(), time.process_time()))

        await self._engine.start(replace(events, step=stamped))


@dataclass(frozen=True, slots=True)
class ScriptedSteps:
    """The scripted worker. Its prefix cache is left out: hashing blocks of 16 costs more than all else."""

    tokenizer: Path
    step_ms: float = 5.0

    def __call__(self) -> WorkerEngine:
        options = ScriptedOptions(
            tokenizer=self.tokenizer,
            step_ms=self.step_ms,
            max_model_len=MAX_MODEL_LEN,
            block_size=MAX_MODEL_LEN,
            kv_tokens=1 << 30,
        )
        return ScriptedEngine(options)


@dataclass(frozen=True, slots=True)
class VllmSteps:
    """vLLM's own front end on the step path, for this model folder, over an engine core that only counts."""

    model: Path
    step_ms: float = 5.0

    def __call__(self) -> WorkerEngine:
        return _StepEngine(str(self.model), self.step_ms)


StepWorker: TypeAlias = ScriptedSteps | VllmSteps


class _StepEngine:
    """`WorkerEngine` of a real `StepPath`, real checks and real packing, without an engine core's process."""

    def __init__(self, model: str, step_ms: float) -> None:
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        prepare_environment(os.environ, VllmOptions(model), is_cpu_build(os.environ))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.input_processor import InputProcessor

            arguments = AsyncEngineArgs(model, enforce_eager=True, max_model_len=MAX_MODEL_LEN)
            config = arguments.create_engine_config()
            processor = InputProcessor(config)
        self.info = EngineInfo([MODEL], MAX_MODEL_LEN, 16, {}, "f", [], {}, {}, "steps")
        self._llm = SimpleNamespace(
            engine_core=_Core(step_ms / 1e3),
            input_processor=processor,
            logger_manager=None,
            model_config=config.model_config,
            renderer=processor.renderer,
        )

    async def start(self, events: EngineEvents) -> None:
        from backend.vllm_media import MediaReader
        from backend.vllm_steps import StepPath

        self._path = StepPath(self._llm, events, MediaReader(self._llm, max_image_pixels=0))
        await self._path.start()
        gc.freeze()  # vLLM's million objects are no garbage

    def submit(self, key: Key, job: Job) -> None:
        self._path.submit(key, job)

    def abort(self, keys: Sequence[Key]) -> None:
        self._path.abort(keys)

    def stats(self) -> Stats:
        return Stats()

    async def stop(self) -> None:
        await self._path.close()


class _Core:
    """An engine core's client: packs each request as vLLM does; a step gives every request one token."""

    def __init__(self, step_s: float) -> None:
        from vllm.v1.serial_utils import MsgpackEncoder

        self._encoder = MsgpackEncoder()
        self._step_s = step_s
        self._due_s = 0.0
        self._left: dict[str, int] = {}

    async def add_request_async(self, request: Any) -> None:
        self._encoder.encode(request)
        self._left[request.request_id] = request.sampling_params.max_tokens

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    async def get_output_async(self) -> Any:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        now_s = time.monotonic()
        self._due_s = max(self._due_s + self._step_s, now_s - 1.0)
        await asyncio.sleep(max(0.0, self._due_s - now_s))
        outputs = []
        for request_id, left in list(self._left.items()):
            finish = FinishReason.LENGTH if left <= 1 else None
            outputs.append(EngineCoreOutput(request_id, [7], finish_reason=finish))
            self._left[request_id] = left - 1
            if finish is not None:
                del self._left[request_id]
        return EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())


def report_step_jitter(report: Report, name: str, worker: StepWorker, window_s: float) -> None:
    """The figures of `step_jitter` as `step_<name>_<quiet or busy>_<gap or cpu>_<p50, p99 or max>_ms`."""
    jitter = step_jitter(worker, window_s)
    kinds = {
        "quiet_gap": jitter.quiet_ms,
        "busy_gap": jitter.busy_ms,
        "quiet_cpu": jitter.quiet_cpu_ms,
        "busy_cpu": jitter.busy_cpu_ms,
    }
    for kind, values in kinds.items():
        for share, label in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            report.add(f"step_{name}_{kind}_{label}_ms", percentile(values, share), "ms")
