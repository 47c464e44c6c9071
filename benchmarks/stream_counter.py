"""A client for thousands of streams: one process, one epoll, frames counted and gaps timed, nothing parsed.

3 us a frame, most of it the two system calls, so that one core can read 40,000 frames a second and have room
for the worker that makes them. `load.StreamClient` takes three times as much, and knows what it read.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from benchmarks.load import chat_request
from benchmarks.report import percentile

START_LIMIT_S: Final = 120.0
_MAX_RECV_BYTES: Final = 65536
_GOOD: Final = b"HTTP/1.1 200"
_CONTENT: Final = b'"content":"'
_AT_ONCE: Final = 64  # streams that wait for their first token while more are opened


@dataclass(frozen=True, slots=True)
class Counted:
    """What all streams got in one window. A gap is from one read with content of a stream to its next."""

    num_frames: int
    num_streams: int  # that got any
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    client_cpu_s: float


class StreamReader:
    """The streams of one process."""

    def __init__(self, port: int, num_tokens: int) -> None:
        self._port = port
        self._num_tokens = num_tokens
        self._epoll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._answered: set[int] = set()
        self._last_s: dict[int, float] = {}
        self._gaps_s: list[float] = []
        self._num_frames = 0

    def open(self, num_streams: int) -> None:
        """Returns when each has its first frame. Raises `TimeoutError`, `ConnectionError`."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while len(self._last_s) < num_streams:
            if len(self._sockets) < min(num_streams, len(self._last_s) + _AT_ONCE):
                self._open_one()
            self._poll(0.0 if len(self._sockets) < num_streams else 0.1)
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{len(self._last_s)} of {num_streams} streams have started")

    def count(self, window_s: float) -> Counted:
        self._num_frames, self._gaps_s, cpu_s = 0, [], time.process_time()
        end_s = time.monotonic() + window_s
        start_s = end_s - window_s
        while time.monotonic() < end_s:
            self._poll(0.01)
        gaps_ms = [gap_s * 1e3 for gap_s in self._gaps_s]
        return Counted(
            num_frames=self._num_frames,
            num_streams=sum(last_s > start_s for last_s in self._last_s.values()),
            gap_p50_ms=percentile(gaps_ms, 0.5),
            gap_p99_ms=percentile(gaps_ms, 0.99),
            gap_max_ms=max(gaps_ms),
            client_cpu_s=time.process_time() - cpu_s,
        )

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()
        self._epoll.close()

    def _open_one(self) -> None:
        stream = socket.create_connection(("127.0.0.1", self._port))
        stream.sendall(chat_request("scripted", f"stream {len(self._sockets)}", self._num_tokens))
        stream.setblocking(False)
        self._sockets[stream.fileno()] = stream
        self._epoll.register(stream.fileno(), select.EPOLLIN)

    def _poll(self, limit_s: float) -> None:
        sockets, last_s, gaps_s = self._sockets, self._last_s, self._gaps_s
        for descriptor, _ in self._epoll.poll(limit_s):
            data = sockets[descriptor].recv(_MAX_RECV_BYTES)
            num_frames = data.count(_CONTENT)
            is_good = descriptor in last_s or descriptor in self._answered or data.startswith(_GOOD)
            if not is_good or not data or b"[DONE]" in data[-20:]:
                raise ConnectionError(f"a stream ended while others were being watched: {data[-300:]!r}")
            if not num_frames:
                self._answered.add(descriptor)  # a head, or a heartbeat
            else:
                now_s = time.monotonic()
                if descriptor in last_s:
                    gaps_s.append(now_s - last_s[descriptor])
                last_s[descriptor] = now_s
                self._num_frames += num_frames


class Streams:
    """Streams that a process of its own reads."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def count(self, window_s: float) -> Counted:
        """All that comes for so long."""
        self._pipe.send(window_s)
        counted = self._pipe.recv()
        if isinstance(counted, Exception):
            raise counted
        assert isinstance(counted, Counted)
        return counted


@contextmanager
def streams(port: int, num_streams: int, num_tokens: int, cores: set[int]) -> Iterator[Streams]:
    """So many streams under way, read on these cores; cut off at the end."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_read, args=(port, num_streams, num_tokens, cores, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(START_LIMIT_S + 10):
            raise TimeoutError(f"{num_streams} streams did not start")
        started = ours.recv()
        if isinstance(started, Exception):
            raise started
        yield Streams(ours)
    finally:
        process.terminate()
        process.join()


def _read(port: int, num_streams: int, num_tokens: int, cores: set[int], pipe: Connection) -> None:
    """The reading process: serves until it is terminated."""
    os.sched_setaffinity(0, cores)
    reader = StreamReader(port, num_tokens)
    try:
        reader.open(num_streams)
        pipe.send("started")
        while True:
            pipe.send(reader.count(pipe.recv() if pipe.poll(0) else _next(reader, pipe)))
    except Exception as error:
        pipe.send(error)
    finally:
        reader.close()


def _next(reader: StreamReader, pipe: Connection) -> float:
    """The next window, while the streams go on being read."""
    while not pipe.poll(0):
        reader.count(0.1)
    window_s = pipe.recv()
    assert isinstance(window_s, float)
    return window_s
