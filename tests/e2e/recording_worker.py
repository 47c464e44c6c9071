"""A scripted worker in a thread of the test's own process: what reaches it over the link is remembered.

The gateway in front of it is a process of its own, with whatever flags a test wants. `recording.py` is the
other way round: a real worker, and the gateway within the test.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from backend.address import parse_address
from backend.link_server import LinkServer
from backend.ports import Job, Key
from backend.scripted import ScriptedEngine, ScriptedOptions

START_S: Final = 30.0


class RecordingWorker:
    """`address` is what a gateway's --worker takes."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._prompts: list[bytes] = []
        self._lock = threading.Lock()

    @property
    def num_jobs(self) -> int:
        """Not taken yet."""
        with self._lock:
            return len(self._prompts)

    def take(self) -> list[list[int]]:
        """The prompts' ids that came since the last call, in order."""
        with self._lock:
            taken, self._prompts = self._prompts, []
        return [array("i", ids).tolist() for ids in taken]

    def prompt(self) -> list[int]:
        """The ids of the one prompt that came since the last call."""
        (ids,) = self.take()
        return ids

    def note(self, job: Job) -> None:
        with self._lock:
            self._prompts.append(bytes(job.ids))


class _Engine(ScriptedEngine):
    def __init__(self, options: ScriptedOptions, worker: RecordingWorker) -> None:
        super().__init__(options)
        self._worker = worker

    def submit(self, key: Key, job: Job) -> None:
        self._worker.note(job)
        super().submit(key, job)


@contextmanager
def recording_worker(
    folder: Path, tokenizer: Path, name: str = "recorder", **options: Any
) -> Iterator[RecordingWorker]:
    """On a Unix socket in `folder`, listening. `options`: those of `ScriptedOptions`. Steps take 1 ms."""
    address = f"unix://{folder}/{name}.sock"
    worker = RecordingWorker(address)
    scripted = ScriptedOptions(tokenizer, address, **{"step_ms": 1.0, **options})
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        server = LinkServer(_Engine(scripted, worker), parse_address(address))
        await server.start()
        started.set()
        await stop.wait()
        await server.stop()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        assert started.wait(START_S), "the worker has not started"
        yield worker
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_S)
    assert not thread.is_alive(), "the worker has not stopped"
