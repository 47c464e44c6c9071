"""vLLM behind `backend.ports.WorkerEngine`: starts it, proves a token path, warms it, watches over it.

Which path brings the tokens is decided here, once, at the start: engine core steps (`vllm_steps`) for
versions that were tested and when a probe comes back right, else `AsyncLLM.generate` (`vllm_generate`),
with a log line.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any, Final

from backend.link import Stats
from backend.ports import EngineEvents, EngineInfo, Job, Key
from backend.progress import Progress
from backend.vllm_config import VllmOptions, describe, engine_config, is_cpu_build, prepare_environment
from backend.vllm_media import MediaReader
from backend.vllm_metrics import Tally, stat_logger
from backend.vllm_path import Probe, ProbeError, TokenPath
from backend.vllm_reaper import Reaper

logger = logging.getLogger(__name__)

# Versions whose engine core batches were read and tested: at least the first, less than the second.
STEPS_VERSIONS: Final = ((0, 32), (0, 33))
PROBE_LIMIT_S: Final = 120.0  # a GPU may compile kernels at the first request
STATS_LOG_S: Final = 10.0  # as vLLM's own server


class VllmEngine:
    """One vLLM engine. Build it anywhere; it runs on the loop that calls `start`.

    `start` raises `VllmConfigError`, `ModelFilesError`, or what vLLM raises while it loads.
    """

    def __init__(self, options: VllmOptions, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self._tally = Tally()
        self._llm: Any = None
        self._config: Any = None
        self._names: list[str] = []
        self._info: EngineInfo | None = None
        self._path: TokenPath | None = None
        self._media: MediaReader | None = None
        self._events: EngineEvents | None = None
        self._others: list[BaseProcess] = []  # this process's children before the load
        self._processes: list[BaseProcess] = []
        self._reaper: Reaper | None = None
        self._loading: asyncio.Future[None] | None = None
        self._logging: asyncio.Task[None] | None = None
        self._jobs: set[Key] = set()
        self._max_jobs = 0
        self._death: str | None = None

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine has not started"
        return self._info

    @property
    def process_ids(self) -> list[int]:
        """Of the engine core's processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self, events: EngineEvents) -> None:
        # In a thread, so that the worker's link and health port answer meanwhile, and because `AsyncLLM`
        # starts its own output handler when it is built inside a running loop.
        self._others = multiprocessing.active_children()
        self._loading = asyncio.ensure_future(asyncio.to_thread(self._load))
        await asyncio.shield(self._loading)
        self._watch()
        self._progress.stage("warming up")
        self._events = events
        self._max_jobs = self._job_limit()
        await self._choose_path()
        _settle_memory()
        self._logging = asyncio.create_task(self._log_stats())

    async def stop(self) -> None:
        """Drop all jobs and end the engine's processes. Idempotent; ends a load that is under way."""
        if self._loading is not None and not self._loading.done():
            for process in self._new_processes():
                process.kill()
            await asyncio.wait([self._loading])
            self._processes = []
        if self._logging is not None:
            self._logging.cancel()
        path, self._path = self._path, None
        if path is not None:
            await path.close()
        self._unwatch()
        llm, self._llm, self._media = self._llm, None, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # vLLM leaves its ZeroMQ context open
                del llm, path
                gc.unfreeze()
                gc.collect()  # its finalizer must run now, not when the interpreter is half gone

    def _load(self) -> None:
        """Import and build vLLM: seconds to minutes, so never on the loop."""
        is_cpu = is_cpu_build(os.environ)
        prepare_environment(os.environ, self._options, is_cpu)
        with warnings.catch_warnings():  # vLLM's and its libraries' deprecations are not our users' business
            warnings.simplefilter("ignore")
            self._progress.stage("importing vLLM")
            from vllm.v1.engine.async_llm import AsyncLLM

            self._progress.stage("reading the model's configuration")
            self._config, self._names = engine_config(self._options, is_cpu)
            self._progress.stage(f"loading weights and making room for the KV cache ({_device(is_cpu)})")
            self._llm = AsyncLLM.from_vllm_config(self._config, stat_loggers=[stat_logger(self._tally)])
            self._media = MediaReader(self._llm, self._options.max_image_pixels)
        self._processes = self._new_processes()
        _cache_environment()

    # -- the engine core's processes -----------------------------------------------------------------------

    def _new_processes(self) -> list[BaseProcess]:
        return [process for process in multiprocessing.active_children() if process not in self._others]

    def _watch(self) -> None:
        """A process's sentinel becomes readable the moment it ends: on both paths, also when nothing runs."""
        self._reaper = Reaper(self.process_ids)
        loop = asyncio.get_running_loop()
        for process in self._processes:
            loop.add_reader(process.sentinel, self._ended, process)

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        for process in self._processes:
            loop.remove_reader(process.sentinel)
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = None

    def _ended(self, process: BaseProcess) -> None:
        self._unwatch()
        process.join(0)
        status = process.exitcode  # None where a thread of vLLM's has just fetched it
        self._die(f"its process {process.name} ended" + ("" if status is None else f" with status {status}"))

    def _die(self, reason: str) -> None:
        if self._death is None:
            self._death = reason
            self._jobs.clear()
            if self._events is not None:
                self._events.died(reason)

    # -- the token path ------------------------------------------------------------------------------------

    async def _choose_path(self) -> None:
        fault = self._steps_fault()
        if fault is None:
            from backend.vllm_steps import StepPath

            try:
                await self._use(StepPath)
                return
            except Exception as error:
                if self._options.path == "steps" or self._death is not None:
                    raise
                fault = f"the probe failed ({type(error).__name__}: {error})"
        from backend.vllm_generate import GeneratePath

        logger.warning("tokens come by AsyncLLM.generate, at about 3 times the cost: %s", fault)
        await self._use(GeneratePath)

    def _steps_fault(self) -> str | None:
        """Why engine core steps are not to be tried, or None."""
        import vllm

        if self._options.path == "generate":
            return "the settings say so"
        if self._options.path == "auto" and not is_tested(vllm.__version__):
            low, high = (".".join(map(str, version)) for version in STEPS_VERSIONS)
            return f"vLLM {vllm.__version__} is outside the tested range, {low} to below {high}"
        return None

    async def _use(self, path_type: Any) -> None:
        assert self._events is not None
        path = await self._prove(path_type)
        assert self._media is not None
        self._info = describe(self._config, self._names, path.name, self._media.support)
        path.events = replace(self._events, step=self._step, failed=self._failed, died=self._die)
        self._path = path

    async def _prove(self, path_type: Any) -> TokenPath:
        """A path that has served a plain request and one with logprobs; both also warm the engine."""
        path: TokenPath = path_type(self._llm, _no_events(self._die), self._media)
        try:
            await path.start()
            for sampling in (
                {"temperature": 0.0},
                {"temperature": 1.0, "top_k": 8, "seed": 0, "logprobs": 2},
            ):
                await Probe(**sampling).run(path, PROBE_LIMIT_S)
        except BaseException:
            await path.close()
            raise
        return path

    # -- backend.ports.WorkerEngine ------------------------------------------------------------------------

    def submit(self, key: Key, job: Job) -> None:
        refusal = self._refusal()
        if refusal is not None:
            asyncio.get_running_loop().call_soon(self._refuse, key, *refusal)
            return
        assert self._path is not None, "the engine has not started"
        self._jobs.add(key)
        self._path.submit(key, job)

    def abort(self, keys: Sequence[Key]) -> None:
        known = [key for key in keys if key in self._jobs]
        self._jobs.difference_update(known)
        if known and self._path is not None:
            self._path.abort(known)

    def stats(self) -> Stats:
        if self._death is not None:
            return Stats(engine_alive=False)
        if self._path is not None:
            self._path.flush()
        return self._tally.stats()

    def _job_limit(self) -> int:
        """vLLM's own bound where it is set, which only its `generate` would heed."""
        scheduler = self._config.scheduler_config
        bound: int | None = getattr(scheduler, "max_num_queued_reqs", None)
        return scheduler.max_num_seqs + self._options.max_waiting if bound is None else bound

    def _refusal(self) -> tuple[str, str] | None:
        if self._death is not None:
            return "engine", f"the engine died: {self._death}"
        if len(self._jobs) >= self._max_jobs:
            return "busy", f"{len(self._jobs)} jobs run or wait; the limit is {self._max_jobs}"
        return None

    def _refuse(self, key: Key, kind: str, message: str) -> None:
        assert self._events is not None
        self._events.failed(key, kind, message)

    def _step(self, outputs: Any) -> None:
        assert self._events is not None
        for output in outputs:
            if output.finish is not None:
                self._jobs.discard(output.key)
        self._events.step(outputs)

    def _failed(self, key: Key, kind: str, message: str) -> None:
        assert self._events is not None
        self._jobs.discard(key)
        self._events.failed(key, kind, message)

    async def _log_stats(self) -> None:
        """vLLM's throughput line, where its log level shows it."""
        while True:
            await asyncio.sleep(STATS_LOG_S)
            try:
                self.stats()  # the line shows what has been recorded
                await self._llm.do_log_stats()
            except Exception:
                logger.exception("vLLM's throughput line could not be written")


def is_tested(version: str) -> bool:
    """Whether the engine core of this vLLM version has been read and tested. Odd version strings have not."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return False
    return STEPS_VERSIONS[0] <= (major, minor) < STEPS_VERSIONS[1]


def _cache_environment() -> None:
    """vLLM's statistics read an environment variable per token: 3.4 us, and 1.0 us once it is cached."""
    import vllm.envs

    if hasattr(vllm.envs, "enable_envs_cache"):
        vllm.envs.enable_envs_cache()


def _settle_memory() -> None:
    """Keep the garbage collector off vLLM's million objects, and off steps, which wait to be counted: they
    would set it off several times a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _device(is_cpu: bool) -> str:
    return "CPU" if is_cpu else "GPU"


def _no_events(died: Any) -> EngineEvents:
    def nobody(*_: Any) -> None:
        raise ProbeError("an output that nobody asked for")

    return EngineEvents(step=nobody, closed=nobody, failed=nobody, died=died)
