"""A scripted worker in a process of its own that notes when each job came, spoke and was aborted.

The monotonic clock is one for all processes of a machine, so a client can take its own times from these. A
job is known by the request's `seed`. Not here: the engine (`backend/scripted.py`), and what a step costs
(`step_jitter.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import uvloop

from backend.address import Address
from backend.link import Stats
from backend.link_server import LinkServer
from backend.ports import EngineEvents, EngineInfo, Job, Key, Output
from backend.scripted import ScriptedEngine, ScriptedOptions
from benchmarks.texts import prompt

START_LIMIT_S: Final = 60.0
_ANSWER_WORDS: Final = 2000


@dataclass(slots=True)
class JobTimes:
    """One job as its engine saw it, in monotonic seconds."""

    submitted_s: float
    steps_s: list[float] = field(default_factory=list)  # when each token was handed on
    aborted_s: float | None = None


class StampedEngine:
    """`WorkerEngine` around a scripted one; `jobs` by the seed of their request."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.jobs: dict[int, JobTimes] = {}
        self._engine = engine
        self._by_key: dict[Key, JobTimes] = {}
        self.stop = engine.stop

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def start(self, events: EngineEvents) -> None:
        step = events.step

        def stamped(outputs: Sequence[Output]) -> None:
            now_s = time.monotonic()
            for output in outputs:
                self._by_key[output.key].steps_s.append(now_s)
                if output.finish is not None:
                    del self._by_key[output.key]
            step(outputs)

        await self._engine.start(replace(events, step=stamped))

    def submit(self, key: Key, job: Job) -> None:
        times = JobTimes(time.monotonic())
        self.jobs[int(job.sampling.get("seed") or 0)] = self._by_key[key] = times
        self._engine.submit(key, job)

    def abort(self, keys: Sequence[Key]) -> None:
        now_s = time.monotonic()
        for key in keys:
            if (times := self._by_key.pop(key, None)) is not None:
                times.aborted_s = now_s
        self._engine.abort(keys)

    def stats(self) -> Stats:
        return self._engine.stats()


@dataclass(frozen=True, slots=True)
class StampedWorker:
    """The running worker. `address` is what a gateway's --worker takes."""

    address: str
    _pipe: Connection

    def job(self, seed: int) -> JobTimes | None:
        """What is known of a job by now; None if it has not come. Asks the other process: 0.1 ms."""
        self._pipe.send(seed)
        times: JobTimes | None = self._pipe.recv()
        return times


@contextmanager
def stamped_worker(
    folder: Path, tokenizer: Path, step_ms: float, prefill_ms_per_1k: float
) -> Iterator[StampedWorker]:
    """A worker whose every answer is English text: a token is a frame."""
    script = folder / "answers.json"
    script.write_text(json.dumps([prompt(_ANSWER_WORDS, seed) for seed in range(8)]))
    options = ScriptedOptions(
        tokenizer=tokenizer,
        listen=f"unix://{folder}/stamped.sock",
        script=script,
        step_ms=step_ms,
        prefill_ms_per_1k=prefill_ms_per_1k,
    )
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(options, theirs))
    process.start()
    try:
        if not ours.poll(START_LIMIT_S) or ours.recv() != "ready":
            raise RuntimeError("the worker did not get ready")
        yield StampedWorker(options.listen, ours)
    finally:
        process.terminate()
        process.join()


def _serve(options: ScriptedOptions, pipe: Connection) -> None:
    """The worker's process: serves until it is terminated, and answers questions about jobs."""
    logging.getLogger("backend").setLevel(logging.ERROR)  # that it is scripted is no news here
    uvloop.run(_served(options, pipe))


async def _served(options: ScriptedOptions, pipe: Connection) -> None:
    engine = StampedEngine(ScriptedEngine(options))
    server = LinkServer(engine, Address(path=options.listen.removeprefix("unix://")))
    await server.start()

    def asked() -> None:
        question: Any = pipe.recv()
        pipe.send(engine.jobs.get(question))

    asyncio.get_running_loop().add_reader(pipe.fileno(), asked)
    pipe.send("ready")
    await asyncio.Event().wait()
