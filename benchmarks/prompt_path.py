"""What a prompt costs between the gateway's buffer and the engine, and whether other streams notice it.

Measuring functions for the benchmarks that print them; no command, no goals. Each is called outside of an
event loop and gives one figure per run, or all of a window. Costs are CPU time of the one thread that does
the work, so that other processes on the machine do not count.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import socket
import tempfile
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import uvloop

from backend import link
from backend.address import Address
from backend.link import Framer, Hello, Stats, Welcome
from backend.link_client import LinkClient, open_link
from backend.link_server import LinkServer
from backend.ports import EngineEvents, EngineInfo, Job, Key, Output, WorkerEngine
from backend.scripted import ScriptedEngine, ScriptedOptions
from backend.uploads import Uploads
from backend.vllm_config import VllmOptions, is_cpu_build, prepare_environment
from backend.vllm_request import packed_ids, prompt_ids
from pipeline.errors import HeadraceError
from pipeline.values import EngineCall, Prompt

MODEL: Final = "prompts"
MAX_MODEL_LEN: Final = 1 << 20
VOCABULARY: Final = 49_000  # of the embedded model, about
NUM_STREAMS: Final = 8  # that run while long prompts arrive
WARM_UP_S: Final = 1.0
READ_BYTES: Final = 256_000  # uvloop's, of a socket

Stamp: TypeAlias = tuple[float, float]  # seconds: monotonic, the same in every process, and CPU


@dataclass(frozen=True, slots=True)
class GatewayCost:
    """From the prompt's view to its last byte in the kernel: CPU of the event loop, the sending too."""

    ns_per_token: Sequence[float]  # per run
    copied_bytes_per_token: float  # in Python; 4 bytes a token go to the kernel


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """CPU per token in the worker: up to the whole prompt, and from there to the engine's form of it."""

    read_ns_per_token: list[float] = field(default_factory=list)  # bytes read -> prompt whole
    packed_ns_per_token: list[float] = field(default_factory=list)  # -> packed for the engine core
    list_ns_per_token: list[float] = field(default_factory=list)  # -> `list[int]`, what packing replaces


def make_call(num_tokens: int, max_tokens: int = 1, seed: int = 0) -> EngineCall:
    """A call whose prompt lies in a buffer, as the gateway's lie in those of its pool."""
    ids = array("i", [(7 * index + seed) % VOCABULARY for index in range(num_tokens)])
    view = memoryview(bytearray(ids.tobytes())).toreadonly()
    return EngineCall(MODEL, Prompt(view, num_tokens, seed), {"temperature": 0.0}, max_tokens)


# -- the gateway ---------------------------------------------------------------------------------------------


def gateway_cost(num_tokens: int, num_runs: int) -> GatewayCost:
    """Prompts of this length, one after the other, over a link whose other end reads all it can."""
    return uvloop.run(_gateway_cost(num_tokens, num_runs))


async def _gateway_cost(num_tokens: int, num_runs: int) -> GatewayCost:
    ours, theirs = socket.socketpair()
    reader = threading.Thread(target=_read_all, args=(theirs,))
    reader.start()
    client = _FlushedClient()
    await asyncio.get_running_loop().create_connection(lambda: client, sock=ours)
    await client.welcomed()
    call, costs = make_call(num_tokens), []
    client.submit(call, _Ends())  # warm up
    await client.flush()
    copied = client.copied_bytes
    for _ in range(num_runs):
        start_ns = time.thread_time_ns()
        client.submit(call, _Ends())
        await client.flush()
        costs.append((time.thread_time_ns() - start_ns) / num_tokens)
    copied = client.copied_bytes - copied
    client.close()
    await asyncio.to_thread(reader.join)
    return GatewayCost(costs, copied / num_runs / num_tokens)


class _FlushedClient(LinkClient):
    """A link that knows when all was written."""

    def __init__(self) -> None:
        super().__init__(Address(path="/benchmark"), b"", "benchmark")
        self._resumed = asyncio.Event()
        self._resumed.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._resumed.clear()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._resumed.set()

    async def flush(self) -> None:
        await asyncio.sleep(0)
        while self._transport.get_write_buffer_size():
            await self._resumed.wait()
            await asyncio.sleep(1e-4)  # a rest that is too small to pause for


class _Ends:
    """A sink that hears nothing but the end of the link."""

    def tokens(self, *_: Any) -> None:
        pass

    def failed(self, error: HeadraceError) -> None:
        pass


def _read_all(sock: socket.socket) -> None:
    """A worker's handshake, then an end that only reads."""
    with sock:
        sock.sendall(link.encode(link.Challenge(b"w" * 32, link.VERSION)))
        framer, hellos = Framer(), list[Any]()
        while not hellos:
            hellos += framer.feed(sock.recv(1 << 16))
        mac = link.proof(b"", hellos[0].nonce, b"worker")
        sock.sendall(link.encode(Welcome(mac, "w", [MODEL], MAX_MODEL_LEN, 16, {}, "f", [], {})))
        buffer = bytearray(1 << 20)
        while sock.recv_into(buffer):
            pass


# -- the worker ----------------------------------------------------------------------------------------------


def worker_cost(num_tokens: int, num_runs: int) -> WorkerCost:
    """The bytes of a prompt as they come from the socket, until the engine could take it."""
    return uvloop.run(_worker_cost(num_tokens, num_runs))


async def _worker_cost(num_tokens: int, num_runs: int) -> WorkerCost:
    cost = WorkerCost()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        engine = _Catcher()
        server = LinkServer(engine, Address(path=f"{folder}/link"))
        await server.start()
        connection, wire = server.protocol(), _Wire()
        connection.connection_made(wire)
        mac = link.proof(b"", wire.take()[0].nonce, b"gateway")
        connection.data_received(bytes(link.encode(Hello(link.VERSION, mac, b"g" * 32, "benchmark"))))
        for run in range(-1, num_runs):
            reads = _reads(num_tokens, run + 2)
            start_ns = time.thread_time_ns()
            for data in reads:
                connection.data_received(data)
            read_ns = time.thread_time_ns() - start_ns
            ids = engine.end()
            packed_ns, list_ns = _thread_ns(packed_ids, ids), _thread_ns(prompt_ids, ids)
            if run >= 0:  # the first one warms up
                cost.read_ns_per_token.append(read_ns / num_tokens)
                cost.packed_ns_per_token.append(packed_ns / num_tokens)
                cost.list_ns_per_token.append(list_ns / num_tokens)
        await server.stop()
    return cost


def _thread_ns(convert: Callable[[bytes], object], ids: bytes) -> int:
    start_ns = time.thread_time_ns()
    convert(ids)
    return time.thread_time_ns() - start_ns


def _reads(num_tokens: int, generation: int) -> list[bytes]:
    """A prompt's frames, cut as uvloop reads them from a socket that is never empty."""
    uploads, data = Uploads(), b""
    parts = uploads.start(0, generation, make_call(num_tokens, seed=generation))
    while parts is not None or (parts := uploads.take_piece()) is not None:
        data += b"".join(parts)
        parts = None
    return [data[start : start + READ_BYTES] for start in range(0, len(data), READ_BYTES)]


class _Catcher:
    """`WorkerEngine` that keeps the last job until it is ended."""

    info = EngineInfo([MODEL], MAX_MODEL_LEN, 16, {}, "f", [], {}, {}, "steps")

    async def start(self, events: EngineEvents) -> None:
        self._events = events

    def submit(self, key: Key, job: Job) -> None:
        self._last = key, job

    def abort(self, keys: Sequence[Key]) -> None:
        pass

    def stats(self) -> Stats:
        return Stats()

    async def stop(self) -> None:
        pass

    def end(self) -> bytes:
        """The prompt of the last job, which ends."""
        key, job = self._last
        self._events.step([Output(key, [1], "length")])
        return job.ids


class _Wire(asyncio.Transport):
    """Keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self._framer = Framer()
        self._data = b""

    def write(self, data: Any) -> None:
        self._data += data

    def take(self) -> list[Any]:
        data, self._data = self._data, b""
        return list(self._framer.feed(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def abort(self) -> None:
        pass

    close = abort


# -- other streams -------------------------------------------------------------------------------------------


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
        client.submit(make_call(8, MAX_MODEL_LEN // 2, number), _Ends())
    calls = [make_call(prompt_tokens, seed=number) for number in range(4)]
    await asyncio.sleep(WARM_UP_S)
    windows = []
    for is_busy in (False, True):
        start_s = time.monotonic()
        for number in range(round(window_s * prompts_per_s)):
            await asyncio.sleep(max(0.0, start_s + number / prompts_per_s - time.monotonic()))
            if is_busy:
                client.submit(calls[number % len(calls)], _Ends())
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
        from backend.vllm_steps import StepPath

        self._path = StepPath(self._llm, events)
        self._path.start()
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
