"""What a prompt costs between the gateway's buffer and the engine. Other streams' share: `step_jitter`.

Measuring functions for the benchmarks that print them; no command, no goals. Each is called outside of an
event loop and gives one figure per run, or all of a window. Costs are CPU time of the one thread that does
the work, so that other processes on the machine do not count.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import uvloop

from backend import link
from backend.address import Address
from backend.framing import Framer
from backend.link import Hello, Stats, Welcome
from backend.link_client import LinkClient
from backend.link_server import LinkServer
from backend.ports import EngineEvents, EngineInfo, Job, Key, Output
from backend.uploads import Uploads
from backend.vllm_request import packed_ids, prompt_ids
from benchmarks.report import Report
from pipeline.errors import HeadraceError
from pipeline.values import EngineCall, Prompt

MODEL: Final = "prompts"
MAX_MODEL_LEN: Final = 1 << 20
VOCABULARY: Final = 49_000  # of the embedded model, about
READ_BYTES: Final = 256_000  # uvloop's, of a socket


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
    client.submit(call, Deaf())  # warm up
    await client.flush()
    copied = client.copied_bytes
    for _ in range(num_runs):
        start_ns = time.thread_time_ns()
        client.submit(call, Deaf())
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


class Deaf:
    """A sink that does not care."""

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


def report_prompt_path(report: Report, lengths: Sequence[int], num_runs: int) -> None:
    """The figures of `gateway_cost` and `worker_cost` for prompts of these lengths in tokens, by name."""
    for num_tokens in lengths:
        gateway, worker = gateway_cost(num_tokens, num_runs), worker_cost(num_tokens, num_runs)
        for name, values in (
            ("gateway", gateway.ns_per_token),
            ("worker_read", worker.read_ns_per_token),
            ("worker_packed", worker.packed_ns_per_token),
            ("worker_list", worker.list_ns_per_token),
        ):
            report.add(f"{name}_ns_per_prompt_token_{num_tokens}", values, "ns")
        report.add(f"copied_bytes_per_prompt_token_{num_tokens}", gateway.copied_bytes_per_token, "bytes")
