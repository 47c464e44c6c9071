"""The scripted engine: no model, made-up or given tokens, real timing. For tests, load and simulation.

It is never a default, and says that it is scripted in its WELCOME and its log. One timer serves all streams,
one step at a time, as a real engine does; prompts are prefilled one after the other, and their blocks are
remembered by a simulated prefix cache.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import logging
import random
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from backend.address import parse_address
from backend.link import Stats
from backend.link_server import LinkServer
from backend.media_support import Support
from backend.model_files import ModelFiles, read_model_files
from backend.ports import EngineEvents, EngineInfo, Job, Key, Output
from backend.scripted_cache import PrefixCache
from backend.scripted_faults import Faults, FaultyServer, is_due
from backend.scripted_media import expanded, scripted_support
from backend.scripted_options import ScriptedOptions
from backend.scripted_stream import ScriptedStream
from backend.scripted_tokens import Script, TokenTape, ordinary_ids
from backend.server_stream import ServerLimits

logger = logging.getLogger(__name__)

__all__ = ["Faults", "ScriptedEngine", "ScriptedOptions", "scripted_server", "serve_scripted"]

MAX_LATE_S: Final = 1.0  # a step later than this (a stopped process) is not made up for
# What vLLM's get_diff_sampling_param() takes from a generation_config, by its own names.
_SAMPLING_DEFAULTS: Final = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


class ScriptedEngine:
    """`backend.ports.WorkerEngine` without a model; it runs on the loop that calls `start`.

    Raises `ModelFilesError`, `ScriptError`, `OSError` for a folder or script that cannot be used, and
    `ValueError` for a placeholder that the tokenizer lacks.
    """

    def __init__(self, options: ScriptedOptions) -> None:
        self.num_tokens = 0  # made so far, over all streams
        self._options = options
        model = read_model_files(options.tokenizer)
        self._tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
        self._script = Script.read(options.script, self._tokenizer) if options.script is not None else None
        self.tape = TokenTape(ordinary_ids(self._tokenizer), options.seed)
        self._vocabulary_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        config = _generation_config(options.tokenizer)
        self._eos_ids = _eos_ids(config, options.tokenizer, self._tokenizer)
        media = scripted_support(options.media, self._tokenizer)
        self._info = _info(options, model, config, media)
        self._cache = PrefixCache(options.block_size, max(1, options.kv_tokens // options.block_size))
        self._jitter = random.Random(options.seed)
        self._streams: dict[Key, ScriptedStream] = {}
        self._waiting: list[tuple[int, int, ScriptedStream]] = []  # a heap: priority, then arrival
        self._prefilling: deque[ScriptedStream] = deque()
        self._running: dict[Key, ScriptedStream] = {}
        self._num_admitted = 0  # prefilling and running
        self._num_kv_tokens = 0
        self._arrival = itertools.count()
        self._prefill_free_s = 0.0
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = True

    # -- backend.ports.WorkerEngine ------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def start(self, events: EngineEvents) -> None:
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._is_stopped = False
        logger.warning("this worker is scripted: it has no model, and its tokens are made up")

    def submit(self, key: Key, job: Job) -> None:
        try:
            prompt = expanded(job.ids, job.media, self._info.media)
        except ValueError as error:
            self._events.failed(key, "rejected", str(error))
            return
        if (trouble := self._trouble(prompt)) is not None:
            self._events.failed(key, *trouble)
            return
        answer = self._script.answer(job.ids) if self._script is not None else None
        length, vocabulary_size = self._options.max_model_len, self._vocabulary_size
        stream = ScriptedStream(key, job, prompt, self.tape, answer, self._eos_ids, length, vocabulary_size)
        stream.arrived_s = self._loop.time()
        self._streams[key] = stream
        heapq.heappush(self._waiting, (job.priority, next(self._arrival), stream))
        self._admit(stream.arrived_s)
        self._wake(stream.arrived_s)

    def _trouble(self, prompt: bytes) -> tuple[str, str] | None:
        """Kind and message of why a job cannot be taken."""
        options = self._options
        if not prompt or len(prompt) % 4 or len(prompt) // 4 >= options.max_model_len:
            longest = options.max_model_len - 1
            return (
                "rejected",
                f"the prompt has {len(prompt)} bytes; it must be 1 to {longest} ids of 4 bytes",
            )
        if self._num_admitted >= options.max_running and self._num_waiting >= options.max_waiting:
            return "busy", f"{self._num_waiting} jobs wait; the limit is {options.max_waiting}"
        return None

    def abort(self, keys: Sequence[Key]) -> None:
        known = [key for key in keys if key in self._streams]
        for key in known:
            self._move_up(self._streams[key])
            self._end(self._streams[key])
        if known:
            self._loop.call_soon(self._events.closed, known)

    def stats(self) -> Stats:
        return Stats(
            running=self._num_admitted,
            waiting=self._num_waiting,
            kv_usage=min(1.0, self._num_kv_tokens / self._options.kv_tokens),
            prefix_queries=self._cache.num_queried_tokens,
            prefix_hits=self._cache.num_hit_tokens,
        )

    async def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def _num_waiting(self) -> int:
        return len(self._streams) - self._num_admitted

    def _admit(self, now_s: float) -> None:
        """Let waiting streams in, most urgent first; their prefills queue behind each other."""
        while self._waiting and self._num_admitted < self._options.max_running:
            stream = heapq.heappop(self._waiting)[2]
            if stream.is_ended:
                continue
            stream.is_admitted = True
            self._num_admitted += 1
            self._num_kv_tokens += stream.num_prompt
            stream.started_s = now_s
            stream.cached_tokens = self._cache.admit(stream.prompt, stream.job.cache_salt)
            cost_s = (stream.num_prompt - stream.cached_tokens) * self._options.prefill_ms_per_1k / 1e6
            self._prefill_free_s = max(self._prefill_free_s, now_s) + cost_s
            stream.prefill_s, stream.prefill_ends_s = cost_s, self._prefill_free_s
            self._prefilling.append(stream)

    def _move_up(self, aborted: ScriptedStream) -> None:
        """The rest of an aborted prefill is not computed: those behind it come earlier."""
        saved_s = min(aborted.prefill_s, aborted.prefill_ends_s - self._loop.time())
        if saved_s <= 0:
            return
        for stream in self._prefilling:
            if stream.prefill_ends_s >= aborted.prefill_ends_s:
                stream.prefill_ends_s -= saved_s
        self._prefill_free_s -= saved_s

    def _wake(self, now_s: float) -> None:
        if self._timer is None and not self._is_stopped:
            self._due_s = now_s + self._options.step_ms / 1e3
            self._timer = self._loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        """One engine step, then the timer for the next one."""
        now_s = self._loop.time()
        outputs = self._step(now_s)
        self.num_tokens += len(outputs)
        faults = self._options.faults
        if is_due(faults.stall_after_tokens, self.num_tokens):
            return
        if outputs:
            self._events.step(outputs)
        if is_due(faults.die_after_tokens, self.num_tokens):
            self._is_stopped = True
            self._events.died(f"scripted to die after {faults.die_after_tokens} tokens")
        self._timer = None
        if self._streams and not self._is_stopped:
            self._schedule(now_s)

    def _schedule(self, now_s: float) -> None:
        """From the time when this step was due, not from now: 50 steps a second stay 50."""
        self._due_s += self._options.step_ms / 1e3
        if self._due_s < now_s - MAX_LATE_S:
            self._due_s = now_s
        jitter_s = self._options.jitter_ms / 1e3
        early_or_late_s = self._jitter.uniform(-jitter_s, jitter_s) if jitter_s else 0.0
        self._timer = self._loop.call_at(self._due_s + early_or_late_s, self._tick)

    def _step(self, now_s: float) -> list[Output]:
        """A token for every running stream. The plain ones are the hot path."""
        self._begin_running(now_s)
        outputs: list[Output] = []
        ended: list[ScriptedStream] = []
        for stream in self._running.values():
            if stream.is_plain and stream.left > 1:
                stream.left -= 1
                stream.num_made += 1
                outputs.append(Output(stream.key, [stream.make()]))
                continue
            output = stream.speak(now_s)
            outputs.append(output)
            if output.finish is not None:
                ended.append(stream)
                self._num_kv_tokens -= not output.ids  # an end without a token of its own
        self._num_kv_tokens += len(outputs)
        for stream in ended:
            self._end(stream)
        self._admit(now_s)
        return outputs

    def _begin_running(self, now_s: float) -> None:
        """The streams whose prefill is done, in the order of their prefills."""
        waiting = self._prefilling
        while waiting and (waiting[0].is_ended or waiting[0].prefill_ends_s <= now_s):
            stream = waiting.popleft()
            if not stream.is_ended:
                self._running[stream.key] = stream

    def _end(self, stream: ScriptedStream) -> None:
        """Finished or aborted, wherever it was; heap and queue pass over it later."""
        stream.is_ended = True
        del self._streams[stream.key]
        self._running.pop(stream.key, None)
        if stream.is_admitted:
            self._num_admitted -= 1
            self._num_kv_tokens -= stream.num_prompt + stream.num_made


def scripted_server(options: ScriptedOptions) -> LinkServer:
    """A link server with a scripted engine, not yet started. Call it inside the running loop.

    Raises `AddressError`, `ModelFilesError`, `ScriptError`, `OSError`.
    """
    engine = ScriptedEngine(options)
    limits = ServerLimits(max_waiting=options.max_waiting + options.max_running)
    server = FaultyServer if options.faults != Faults() else LinkServer
    built = server(engine, parse_address(options.listen), options.secret, options.tls, limits, options.name)
    if isinstance(built, FaultyServer):
        built.faults = options.faults
        built.num_tokens = lambda: engine.num_tokens
    return built


async def serve_scripted(options: ScriptedOptions, stop: asyncio.Event, drain_s: float = 30.0) -> None:
    """Run a scripted worker until `stop` is set, then drain it, or until its engine dies."""
    server = scripted_server(options)
    await server.start()
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((stopping, server.died), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await server.drain(drain_s)
    finally:
        stopping.cancel()
        await server.stop()


def _info(
    options: ScriptedOptions, model: ModelFiles, config: Mapping[str, Any], media: Support
) -> EngineInfo:
    return EngineInfo(
        model_names=options.model_names,
        max_model_len=options.max_model_len,
        block_size=options.block_size,
        default_sampling={name: config[name] for name in _SAMPLING_DEFAULTS if config.get(name) is not None},
        fingerprint=model.fingerprint,
        files=model.files,
        paths=model.paths,
        versions={"engine": "scripted"},
        engine_path="scripted",
        max_running=options.max_running,
        reasoning_parser=options.reasoning_parser,
        scripted=True,
        media=media,
    )


def _generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return config


def _eos_ids(config: Mapping[str, Any], folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """End-of-sequence ids from the generation_config, else from the tokenizer's configuration."""
    given = config.get("eos_token_id")
    if given is not None:
        return frozenset(given if isinstance(given, list) else [given])
    path = folder / "tokenizer_config.json"
    token = json.loads(path.read_text(encoding="utf-8")).get("eos_token") if path.is_file() else None
    name = token.get("content") if isinstance(token, dict) else token
    number = tokenizer.token_to_id(name) if isinstance(name, str) else None
    return frozenset() if number is None else frozenset([number])
