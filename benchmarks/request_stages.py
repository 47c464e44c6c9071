"""A gateway that counts its own CPU time by stage: `python -m benchmarks.request_stages FILE gateway …`.

Functions that begin a stage are wrapped; what one takes counts for it, less what wrapped ones within take. So
the rows of `STAGES` add up to the event loop's thread, but for the loop itself, its system calls and the
garbage collector. SIGUSR1 begins the count, SIGUSR2 ends it and writes `Counted` to FILE as JSON.

Not here: who sends requests (`bench_request_path.py`).
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import json
import resource
import signal
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import thread_time_ns
from types import FrameType
from typing import Any, Final

# In the order of a request. Each name is `module:attribute`, looked up where it is called.
STAGES: Final[dict[str, tuple[str, ...]]] = {
    "connection": (
        "gateway.http_protocol:HttpProtocol.__init__",
        "gateway.http_protocol:HttpProtocol.connection_made",
        "gateway.http_protocol:HttpProtocol.connection_lost",
    ),
    "http": ("gateway.http_protocol:HttpProtocol.data_received",),
    "asgi": ("uvicorn.protocols.http.httptools_impl:RequestResponseCycle.run_asgi",),
    "endpoint": ("gateway.edge:Endpoint.__call__", "gateway.exchange:Exchange.__init__"),
    "read body": ("gateway.flow:Flow.read",),
    "parse": ("gateway.flow:parse_chat",),
    "admit": ("gateway.flow:Flow._admit",),
    "validate": ("pipeline.validation:Validator.check", "pipeline.inbound:Inbound._read"),
    "scan": ("pipeline.inbound:scan_request",),
    "render": ("pipeline.rendering:ChatTemplate.render",),
    "encode": ("pipeline.encoding:Encoder.encode_segment",),
    "tokenize": ("pipeline.tokenizing:Tokenizing.tokens",),
    "assemble": ("pipeline.tokenizing:Tokenizing.in_buffer", "pipeline.inbound:assemble"),
    "prepare": ("gateway.flow:Flow.prepare_request", "gateway.needs:NeedServer.serve"),
    "answer": ("gateway.flow:Flow._writer", "gateway.flow:Flow.start", "gateway.flow:Flow.generate"),
    "submit": ("backend.pool:WorkerPool.submit",),
    "link out": ("backend.link_client:LinkClient._write",),
    "link in": ("backend.link_client:LinkClient.data_received",),
    "tokens": ("gateway.token_choice:TokenChoice.tokens",),
    "first token": ("gateway.answer:Answer.on_first",),
    "frames": (
        "gateway.writers:SseWriter.first",
        "gateway.writers:SseWriter.text",
        "gateway.writers:SseWriter.finished",
        "gateway.writers:SseWriter.end",
    ),
    "send": ("gateway.outlet:Outlet._push",),
    "end": ("gateway.answer:Answer.on_choice_end", "gateway.flow:Flow.finish"),
    "learn": ("gateway.next_turns:NextTurns.learn", "gateway.next_turns:NextTurns._learn"),
    "metrics": ("gateway.record:RequestRecord.count",),
    "log line": ("gateway.record:RequestRecord.log_fields", "gateway.request_log:RequestLog.write"),
    "clock": ("gateway.watch:OpenRequests.look", "gateway.app:Gateway.publish"),
}
_CALIBRATION_CALLS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Counted:
    """CPU nanoseconds. `stages_ns` is of the event loop's thread, `user_ns` and `system_ns` of all."""

    stages_ns: dict[str, float]
    gc_ns: int
    loop_thread_ns: int
    user_ns: int
    system_ns: int


class Stopwatch:
    """Exclusive CPU time by stage, of the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._inner_ns: list[int] = [0]  # per open stage: what wrapped calls within it took
        self._times_ns: dict[str, int] = {}
        self._num_calls: dict[str, int] = {}
        self._num_inner: dict[str, int] = {}
        self._open: list[str] = [""]
        self._own_cost_ns = self._outer_cost_ns = 0.0
        self._calibrate()

    def reset(self) -> None:
        self._times_ns, self._num_calls, self._num_inner = {}, {}, {}

    def times_ns(self) -> dict[str, float]:
        """By stage, less what the wrapping itself cost."""
        return {
            stage: time_ns
            - self._num_calls[stage] * self._own_cost_ns
            - self._num_inner.get(stage, 0) * self._outer_cost_ns
            for stage, time_ns in self._times_ns.items()
        }

    def wrapped(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed; of a coroutine function or a generator each of its steps."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def stepped(*args: Any, **kwargs: Any) -> Any:
                return await _Steps(self, stage, function(*args, **kwargs).__await__())

            return stepped
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def generated(*args: Any, **kwargs: Any) -> Any:
                return (yield from _Steps(self, stage, function(*args, **kwargs)))

            return generated

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            return self.run(stage, function, *args, **kwargs)

        return timed

    def run(self, stage: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call, and count what it takes."""
        if threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        self._inner_ns.append(0)
        self._open.append(stage)
        start_ns = thread_time_ns()
        try:
            return function(*args, **kwargs)
        finally:
            took_ns = thread_time_ns() - start_ns
            self._open.pop()
            inner_ns, outer = self._inner_ns.pop(), self._open[-1]
            self._inner_ns[-1] += took_ns
            self._times_ns[stage] = self._times_ns.get(stage, 0) + took_ns - inner_ns
            self._num_calls[stage] = self._num_calls.get(stage, 0) + 1
            self._num_inner[outer] = self._num_inner.get(outer, 0) + 1

    def _calibrate(self) -> None:
        """What a wrapped call costs itself, and whoever calls it."""
        nothing = self.wrapped("nothing", _nothing)

        def many() -> None:
            for _ in range(_CALIBRATION_CALLS):
                nothing()

        self.run("many", many)
        self._own_cost_ns = self._times_ns["nothing"] / _CALIBRATION_CALLS
        self._outer_cost_ns = self._times_ns["many"] / _CALIBRATION_CALLS
        self.reset()


class _Steps:
    """A coroutine or a generator whose every step is timed."""

    def __init__(self, watch: Stopwatch, stage: str, steps: Generator[Any, Any, Any]) -> None:
        self._watch = watch
        self._stage = stage
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.__iter__()

    def __iter__(self) -> Generator[Any, Any, Any]:
        run, stage, steps = self._watch.run, self._stage, self._steps
        send: Callable[[Any], Any] = getattr(steps, "send", lambda value: next(steps))
        step, value = send, None
        while True:
            try:
                waits_for = run(stage, step, value)
            except StopIteration as done:
                return done.value
            try:
                step, value = send, (yield waits_for)
            except GeneratorExit:
                run(stage, steps.close)
                raise
            except BaseException as error:  # a cancel must reach the work where it waits
                step, value = steps.throw, error


def resolve(name: str) -> tuple[Any, str, Callable[..., Any]]:
    """Owner, attribute and function of a name in `STAGES`. Raises `AttributeError` for one that is gone."""
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function: Callable[..., Any] = getattr(owner, attribute)
    return owner, attribute, function


def install(watch: Stopwatch) -> None:
    """Wrap whatever begins a stage."""
    for stage, names in STAGES.items():
        for name in names:
            owner, attribute, function = resolve(name)
            setattr(owner, attribute, watch.wrapped(stage, function))


def _nothing() -> None:
    pass


def _usage_ns() -> tuple[int, int]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int(usage.ru_utime * 1e9), int(usage.ru_stime * 1e9)


class _Count:
    """The signals' side."""

    def __init__(self, watch: Stopwatch, file: Path) -> None:
        self._watch = watch
        self._file = file
        self._start = (0, 0, 0)
        self._gc_ns = self._gc_start_ns = 0
        gc.callbacks.append(self._collecting)

    def begin(self, sig: int, frame: FrameType | None) -> None:
        self._watch.reset()
        self._gc_ns = 0
        self._start = (thread_time_ns(), *_usage_ns())

    def end(self, sig: int, frame: FrameType | None) -> None:
        now = (thread_time_ns(), *_usage_ns())
        thread_ns, user_ns, system_ns = (
            after - before for after, before in zip(now, self._start, strict=True)
        )
        counted = Counted(self._watch.times_ns(), self._gc_ns, thread_ns, user_ns, system_ns)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(asdict(counted)))
        part.rename(self._file)

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_start_ns = thread_time_ns()
        else:
            self._gc_ns += thread_time_ns() - self._gc_start_ns


def main(file: Path, arguments: list[str]) -> int:
    from gateway.cli import main as headrace

    watch = Stopwatch()
    install(watch)
    count = _Count(watch, file)
    signal.signal(signal.SIGUSR1, count.begin)
    signal.signal(signal.SIGUSR2, count.end)
    sys.argv = ["headrace", *arguments]
    return headrace()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
