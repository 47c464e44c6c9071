"""The scripted engine: no model, made-up or given tokens, real timing. For tests, load and capacity simulation.

It is never a default and says that it is scripted in its WELCOME and its log. One timer serves all streams, one
step at a time, as a real engine does; prompts are prefilled one after the other, and their blocks are remembered
by a simulated prefix cache.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import logging
import random
import ssl
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from backend.address import parse_address
from backend.link import Extra, Stats
from backend.link_server import LinkServer, ServerLimits
from backend.model_files import read_model_files
from backend.ports import EngineEvents, EngineInfo, Job, Key, Output
from backend.scripted_cache import PrefixCache
from backend.scripted_faults import Faults, FaultyServer
from backend.scripted_tokens import Script, TokenTape, ordinary_ids

logger = logging.getLogger(__name__)

__all__ = ["Faults", "ScriptedEngine", "ScriptedOptions", "scripted_server", "serve_scripted"]

MAX_LATE_S: Final = (
    1.0  # steps missed by up to so much are made up for; later ones (a stopped process) are not
)
_END: Final = -1  # where an answer ends and the tokenizer has no end-of-sequence token
# What vLLM's get_diff_sampling_param() takes from a generation_config, by its own names.
_SAMPLING_DEFAULTS: Final = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class ScriptedOptions:
    """All of a scripted worker. `tokenizer` is a folder with a `tokenizer.json`. Raises `ValueError` by name."""

    tokenizer: Path
    listen: str = "tcp://127.0.0.1:7400"
    model_names: tuple[str, ...] = ("scripted",)
    secret: bytes | None = None
    tls: ssl.SSLContext | None = None
    name: str | None = None
    step_ms: float = 20.0
    jitter_ms: float = 0.0  # each step comes up to so much earlier or later; the mean rate stays
    prefill_ms_per_1k: float = 5.0  # per 1,000 tokens that are not cached
    max_running: int = 4096
    max_waiting: int = 1024  # for a place among the running ones
    max_model_len: int = 32768
    block_size: int = 16
    kv_tokens: int = 1 << 22  # what the simulated KV cache holds
    seed: int = 0
    script: Path | None = None
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        for name in ("step_ms", "jitter_ms", "prefill_ms_per_1k", "max_waiting"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("max_running", "max_model_len", "block_size", "kv_tokens"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.jitter_ms > self.step_ms:
            raise ValueError(f"jitter_ms is {self.jitter_ms}; it must not exceed step_ms, {self.step_ms}")
        if not self.model_names:
            raise ValueError("model_names is empty; a worker serves at least one name")


class _Stream:
    """One job on its way through the engine."""

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "filler",
        "is_ended",
        "is_plain",
        "job",
        "key",
        "left",
        "make",
        "min_tokens",
        "num_logprobs",
        "num_made",
        "num_prompt",
        "prefill_ends_s",
        "source",
        "started_s",
        "stops",
    )

    def __init__(self, key: Key, job: Job, num_prompt: int, left: int, now_s: float) -> None:
        self.key = key
        self.job = job
        self.num_prompt = num_prompt
        self.left = left  # tokens until its length ends it
        self.num_made = 0
        self.arrived_s = self.started_s = self.prefill_ends_s = now_s
        self.cached_tokens = 0
        self.is_ended = False
        self.is_plain = False  # past its first token, and no token of its source can end it or wants logprobs
        self.min_tokens = int(job.sampling.get("min_tokens") or 0)
        logprobs = job.sampling.get("logprobs")
        self.num_logprobs: int | None = None if logprobs is None else int(logprobs)
        self.stops: frozenset[int] = frozenset()
        self.filler: Iterator[int] = iter(())
        self.source: Iterator[int] = iter(())
        self.make = self.source.__next__


class ScriptedEngine:
    """`backend.ports.WorkerEngine` without a model. Build it anywhere; it runs on the loop that calls `start`."""

    def __init__(self, options: ScriptedOptions) -> None:
        self.num_tokens = 0  # made so far, over all streams
        self._options = options
        model = read_model_files(options.tokenizer)
        self._tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
        self.tape = TokenTape(ordinary_ids(self._tokenizer), options.seed)
        self._script = Script.read(options.script, self._tokenizer) if options.script is not None else None
        config = _generation_config(options.tokenizer)
        self._eos_ids = _eos_ids(config, options.tokenizer, self._tokenizer)
        self._info = EngineInfo(
            model_names=options.model_names,
            max_model_len=options.max_model_len,
            block_size=options.block_size,
            default_sampling={
                name: config[name] for name in _SAMPLING_DEFAULTS if config.get(name) is not None
            },
            fingerprint=model.fingerprint,
            files=model.files,
            paths=model.paths,
            versions={"engine": "scripted"},
            engine_path="scripted",
            max_running=options.max_running,
            scripted=True,
        )
        self._cache = PrefixCache(options.block_size, max(1, options.kv_tokens // options.block_size))
        self._jitter = random.Random(options.seed)
        self._streams: dict[Key, _Stream] = {}
        self._waiting: list[tuple[int, int, _Stream]] = []  # a heap: priority, then arrival
        self._num_waiting = 0
        self._prefilling: deque[_Stream] = deque()
        self._running: dict[Key, _Stream] = {}
        self._num_admitted = 0
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
        num_prompt, limit = len(job.ids) // 4, self._options.max_model_len
        if not num_prompt or len(job.ids) % 4 or num_prompt >= limit:
            message = f"the prompt has {len(job.ids)} bytes; it must be 1 to {limit - 1} ids of 4 bytes"
            self._events.failed(key, "rejected", message)
            return
        max_tokens = int(job.sampling.get("max_tokens") or 16)  # vLLM's own default
        stream = _Stream(key, job, num_prompt, min(max_tokens, limit - num_prompt), self._loop.time())
        is_full = self._num_admitted >= self._options.max_running
        if is_full and self._num_waiting >= self._options.max_waiting:
            self._events.failed(
                key, "busy", f"{self._num_waiting} jobs wait; the limit is {self._num_waiting}"
            )
            return
        self._write_part(stream)
        self._streams[key] = stream
        heapq.heappush(self._waiting, (job.priority, next(self._arrival), stream))
        self._num_waiting += 1
        self._admit(stream.arrived_s)
        self._wake(stream.arrived_s)

    def abort(self, keys: Sequence[Key]) -> None:
        closed = []
        for key in keys:
            stream = self._streams.get(key)
            if stream is not None:
                self._end(stream)
                closed.append(key)
        if closed:
            self._loop.call_soon(self._events.closed, closed)

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

    # -- what it says --------------------------------------------------------------------------------------

    def _write_part(self, stream: _Stream) -> None:
        """Decide what a stream will say, and which of it could end it."""
        sampling: Mapping[str, Any] = stream.job.sampling
        stream.filler = self.tape.walk(stream.job.ids, sampling.get("seed"))
        answer = self._script.answer(stream.job.ids) if self._script is not None else None
        if answer is None:
            stream.source = stream.filler
        else:
            end = next(iter(self._eos_ids), _END)
            stream.source = itertools.chain(answer, (end,), stream.filler)
        stream.make = stream.source.__next__
        stop_ids = frozenset(sampling.get("stop_token_ids") or ())
        ends = frozenset() if sampling.get("ignore_eos") else self._eos_ids | {_END}
        stream.stops = stop_ids | ends

    def _speak(self, stream: _Stream, now_s: float) -> Output:
        """One token with everything that can belong to it: stops, the first token's facts, logprobs."""
        token, finish, stop = self._next_token(stream)
        ids = [] if token == _END else [token]
        stream.num_made += len(ids)
        stream.left -= len(ids)
        if finish is None and stream.left <= 0:
            finish = "length"
        extra: Extra | None = None
        if stream.num_made <= 1:
            extra = Extra(
                cached_tokens=stream.cached_tokens,
                queue_ms=(stream.started_s - stream.arrived_s) * 1e3,
                prefill_ms=(now_s - stream.started_s) * 1e3,
                is_first=True,
            )
            stream.is_plain = (
                stream.source is stream.filler
                and stream.num_logprobs is None
                and stream.stops.isdisjoint(self.tape.ids)
            )
        if stream.num_logprobs is not None:
            extra = extra or Extra()
            extra.logprobs = [self._logprobs(made, stream.num_logprobs) for made in ids]
        return Output(stream.key, ids, finish, stop, extra)

    def _next_token(self, stream: _Stream) -> tuple[int, str | None, int | None]:
        token = stream.make()
        if token not in stream.stops:
            return (next(stream.filler) if token == _END else token), None, None
        if stream.num_made >= stream.min_tokens:
            return token, "stop", None if token in self._eos_ids or token == _END else token
        # An engine masks what would end it too early: it says something else.
        return next(other for other in stream.filler if other not in stream.stops), None, None

    def _logprobs(self, token: int, count: int) -> tuple[list[int], list[float], int]:
        """Of the shape that vLLM gives: the sampled token, then the `count` best ones, which begin with it."""
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        ids = [token, *((token + rank) % size for rank in range(count))]
        return ids, [-0.125, *(-0.125 - rank for rank in range(count))], 1

    # -- time ----------------------------------------------------------------------------------------------

    def _admit(self, now_s: float) -> None:
        """Let waiting streams in, most urgent first; their prefills queue behind each other."""
        while self._waiting and self._num_admitted < self._options.max_running:
            stream = heapq.heappop(self._waiting)[2]
            if stream.is_ended:
                continue
            self._num_waiting -= 1
            self._num_admitted += 1
            self._num_kv_tokens += stream.num_prompt
            stream.started_s = now_s
            stream.cached_tokens = self._cache.admit(stream.job.ids, stream.job.cache_salt)
            num_new = stream.num_prompt - stream.cached_tokens
            self._prefill_free_s = (
                max(self._prefill_free_s, now_s) + num_new * self._options.prefill_ms_per_1k / 1e6
            )
            stream.prefill_ends_s = self._prefill_free_s
            self._prefilling.append(stream)

    def _wake(self, now_s: float) -> None:
        if self._timer is None and not self._is_stopped:
            self._due_s = now_s + self._options.step_ms / 1e3
            self._timer = self._loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        """One engine step, then the timer for the next one, on a schedule that does not drift."""
        now_s = self._loop.time()
        outputs = self._step(now_s)
        self.num_tokens += len(outputs)
        faults = self._options.faults
        if faults.stall_after_tokens is not None and self.num_tokens >= faults.stall_after_tokens:
            return
        if outputs:
            self._events.step(outputs)
        if faults.die_after_tokens is not None and self.num_tokens >= faults.die_after_tokens:
            self._is_stopped = True
            self._events.died(f"scripted to die after {faults.die_after_tokens} tokens")
        self._timer = None
        if self._streams and not self._is_stopped:
            self._due_s += self._options.step_ms / 1e3
            if self._due_s < now_s - MAX_LATE_S:
                self._due_s = now_s
            jitter_s = self._options.jitter_ms / 1e3
            self._timer = self._loop.call_at(
                self._due_s + (self._jitter.uniform(-jitter_s, jitter_s) if jitter_s else 0.0), self._tick
            )

    def _step(self, now_s: float) -> list[Output]:
        """A token for every running stream. The plain ones are the hot path."""
        while self._prefilling and (
            self._prefilling[0].is_ended or self._prefilling[0].prefill_ends_s <= now_s
        ):
            stream = self._prefilling.popleft()
            if not stream.is_ended:
                self._running[stream.key] = stream
        outputs: list[Output] = []
        ended: list[_Stream] = []
        self._num_kv_tokens += len(self._running)
        for stream in self._running.values():
            if stream.is_plain and stream.left > 1:
                stream.left -= 1
                stream.num_made += 1
                outputs.append(Output(stream.key, [stream.make()]))
                continue
            output = self._speak(stream, now_s)
            outputs.append(output)
            if output.finish is not None:
                ended.append(stream)
        for stream in ended:
            self._end(stream)
        self._admit(now_s)
        return outputs

    def _end(self, stream: _Stream) -> None:
        del self._streams[stream.key]
        stream.is_ended = True
        if stream.key in self._running:
            del self._running[stream.key]
        elif stream not in self._prefilling:
            self._num_waiting -= 1
            return
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
