"""An open-loop client in a process of its own: requests come when they are due, whatever the answers do.

A plain loop over `epoll`, since an event loop's own delays would count as the server's. When bytes of an
answer came is the kernel's stamp of their arrival (`SO_TIMESTAMPNS`), so that a client which gets the CPU
late does not make the server late; the client's own time is kept beside it. Connections are kept and used
again, as openai's clients and proxies do, or each request has a new one. Not here: who is asked
(`bench_request_path.py`).
"""

from __future__ import annotations

import json
import multiprocessing
import random
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Final

_SO_TIMESTAMPNS: Final = 35  # Linux; the module `socket` does not name it
_STAMP: Final = struct.Struct("qq")
_READ_BYTES: Final = 1 << 16
_LAST_CHUNK: Final = b"0\r\n\r\n"
_LIMIT_S: Final = 60.0
_SPIN_S: Final = 5e-4  # `select` sleeps up to so much too long


@dataclass(slots=True)
class Timed:
    """One request. Times are monotonic seconds, the same in every process of the machine."""

    started_s: float  # just before it was written
    first_byte_s: float = 0.0  # of the answer, by the kernel's stamp
    first_text_s: float = 0.0
    seen_text_s: float = 0.0  # by the client's own clock
    late_s: float = 0.0  # the client wrote it so much after it was due
    status: int = 0
    is_done: bool = False
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    timings: dict[str, Any] = field(default_factory=dict)


class Client:
    """The process. `send` returns when all answers are complete, or raises what went wrong there."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()

    def send(
        self, port: int, requests: Sequence[bytes], rate: float | None, seed: int = 0, *, keeps: bool = True
    ) -> list[Timed]:
        """The requests in order, at times of a Poisson process of `rate` per second; None: one after the
        other, each when the answer to the one before is complete.

        `keeps`: connections are used again, those that were idle for longest first.
        """
        self._pipe.send((port, list(requests), rate, seed, keeps))
        result: list[Timed] | Exception = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _serve(pipe: Connection) -> None:
    while True:
        port, requests, rate, seed, keeps = pipe.recv()
        try:
            pipe.send(_Run(port, requests, rate, seed, keeps).run())
        except Exception as error:
            pipe.send(error)


class _Run:
    """One series of requests."""

    def __init__(
        self, port: int, requests: Sequence[bytes], rate: float | None, seed: int, keeps: bool
    ) -> None:
        rng = random.Random(seed)
        self._port = port
        self._keeps = keeps
        self._idle: deque[socket.socket] = deque()
        self._requests = requests
        self._is_in_turn = rate is None
        self._gaps_s = [0.0 if rate is None else rng.expovariate(rate) for _ in requests]
        self._poll = select.epoll()
        self._open: dict[int, _Stream] = {}
        # The kernel stamps with the wall clock. Several looks: this process may have to wait between two.
        self._epoch_s = median(time.time() - time.monotonic() for _ in range(9))

    def run(self) -> list[Timed]:
        results: list[Timed] = []
        due_s = time.perf_counter() + 0.05
        for request, gap_s in zip(self._requests, self._gaps_s, strict=True):
            due_s += gap_s
            self._read_until(due_s)
            if self._is_in_turn:
                self._read_all()
            connection = self._idle.popleft() if self._idle else _connected(self._port)
            stream = _Stream(connection, request, self._epoch_s)
            stream.timed.late_s = time.perf_counter() - due_s
            self._open[stream.fileno] = stream
            self._poll.register(stream.fileno, select.EPOLLIN)
            results.append(stream.timed)
        self._read_all()
        for connection in self._idle:
            connection.close()
        return results

    def _read_all(self) -> None:
        limit_s = time.perf_counter() + _LIMIT_S
        while self._open:
            if time.perf_counter() > limit_s:
                raise TimeoutError(f"{len(self._open)} of {len(self._requests)} answers did not end")
            self._read(0.1)

    def _read_until(self, due_s: float) -> None:
        while (left_s := due_s - time.perf_counter()) > 0:
            self._read(max(0.0, left_s - _SPIN_S))

    def _read(self, limit_s: float) -> None:
        for fileno, _ in self._poll.poll(limit_s):
            stream = self._open[fileno]
            if not stream.read():
                self._poll.unregister(fileno)
                del self._open[fileno]
                if self._keeps and stream.is_whole:
                    self._idle.append(stream.connection)
                else:
                    stream.connection.close()


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return connection


class _Stream:
    """One request and its answer, counted rather than parsed."""

    def __init__(self, connection: socket.socket, request: bytes, epoch_s: float) -> None:
        self.connection = connection
        self.fileno = connection.fileno()
        self.is_whole = False  # the connection can be used again
        self._epoch_s = epoch_s
        self._tail = b""
        connection.setblocking(True)
        self.timed = Timed(time.monotonic())
        connection.sendall(request)
        connection.setblocking(False)

    def read(self) -> bool:
        """Take what has come; whether more may come."""
        data, notes, _, _ = self.connection.recvmsg(_READ_BYTES, 64)
        timed = self.timed
        if not timed.first_text_s:
            self._begin(data, notes)
        tail = self._tail + data
        self._tail = tail[-2048:]
        if not tail.endswith(_LAST_CHUNK):
            return bool(data) and timed.status == 200
        self.is_whole = True
        if b"[DONE]" in tail:
            self._end(tail)
        return False

    def _begin(self, data: bytes, notes: Sequence[Any]) -> None:
        timed, seen_s = self.timed, time.monotonic()
        came_s = seen_s
        if notes:
            seconds, nanoseconds = _STAMP.unpack(notes[0][2])
            came_s = seconds + nanoseconds / 1e9 - self._epoch_s
        if not timed.first_byte_s:
            timed.first_byte_s = came_s
            timed.status = int(data[9:12] or 0)
        if data.count(b'"content":"') > data.count(b'"content":""'):
            timed.first_text_s, timed.seen_text_s = came_s, seen_s

    def _end(self, tail: bytes) -> None:
        timed = self.timed
        timed.is_done = True
        for line in tail.split(b"\n"):
            if line.startswith(b"data: {") and b'"usage"' in line:
                chunk = json.loads(line[6:])
                usage = chunk["usage"]
                timed.num_tokens = usage["completion_tokens"]
                timed.num_prompt_tokens = usage.get("prompt_tokens", 0)
                details = usage.get("prompt_tokens_details") or {}
                timed.num_cached_tokens = details.get("cached_tokens", 0)
                timed.timings = chunk.get("timings", {})
