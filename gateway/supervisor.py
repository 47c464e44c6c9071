"""Keeps child processes running: starts them, restarts a dead one with a growing pause, ends them in order.

What the children do is not known here. A child that dies before it was ever ready ends everything with its
exit code, and so does one that keeps dying. SIGTERM and SIGINT end the children group by group (gateways
before the worker that they need, and both before their store); a second signal kills them. SIGHUP goes on to
the children that reload.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

log = logging.getLogger("headrace.supervisor")

FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 10.0
# A child that lived this long was no quick death; five quick ones in a row are a crash loop.
QUICK_S: Final = 10.0
MAX_QUICK_DEATHS: Final = 5
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_CLEAN: Final = (0, -signal.SIGTERM)  # the signal: it was still starting and had no handler yet


class ChildError(Exception):
    """A child cannot be kept running. `code` is what the whole program should exit with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Program:
    """A child to keep running.

    `orders` makes the bytes for its standard input, given the descriptor on which it reports ready, and
    whether it has been ready before; the input stays open as long as we live. Groups end in ascending order,
    each child within `stop_limit_s`. `until_ready` is for a child that reports nothing: it returns when the
    child serves.
    """

    name: str
    command: Sequence[str]
    orders: Callable[[int, bool], bytes]
    stop_limit_s: float
    group: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    fds: Sequence[int] = ()
    reloads: bool = False  # SIGHUP makes it read its files again
    died: Callable[[int], None] = lambda pid: None
    until_ready: Callable[[], Coroutine[Any, Any, None]] | None = None


class Child:
    """One program and its current process."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ready = asyncio.Event()  # has been ready at least once
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._quick_deaths = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def keep(self) -> int:
        """Run until stopped; the last exit code. Raises `ChildError`."""
        while True:
            started_s = time.monotonic()
            code = await self._run_once()
            if self._stopping.is_set():
                return code
            self._count_death(code, time.monotonic() - started_s)
            pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**self._quick_deaths)
            log.error("%s died (%s); starting it again in %.1f s", self.program.name, _reason(code), pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
                return 0

    async def _run_once(self) -> int:
        program = self.program
        read_fd, write_fd = os.pipe()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *program.command,
                stdin=asyncio.subprocess.PIPE,
                env={**os.environ, **program.env},
                pass_fds=(*program.fds, write_fd),
                # Ctrl-C goes to the parent alone: a child would get two signals, and take the second for
                # "at once".
                process_group=0,
            )
        finally:
            os.close(write_fd)
        with _reading(read_fd, self.ready.set), _asking(program.until_ready, self.ready.set):
            return await self._feed_and_wait(process, program.orders(write_fd, self.ready.is_set()))

    async def _feed_and_wait(self, process: asyncio.subprocess.Process, orders: bytes) -> int:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died at once: its exit code says more
            process.stdin.write(orders)
            await process.stdin.drain()
        if self._stopping.is_set():
            process.terminate()
        code = await process.wait()
        self.program.died(process.pid)
        return code

    def _count_death(self, code: int, lived_s: float) -> None:
        name, reason = self.program.name, _reason(code)
        if not self.ready.is_set():
            raise ChildError(f"{name} could not start ({reason})", code if code > 0 else 1)
        self._quick_deaths = self._quick_deaths + 1 if lived_s < QUICK_S else 0
        if self._quick_deaths >= MAX_QUICK_DEATHS:
            raise ChildError(f"{name} died {self._quick_deaths} times in a row, the last time: {reason}", 1)

    def stop(self, sig: int = signal.SIGTERM) -> None:
        """End it and do not start it again."""
        self._stopping.set()
        self.send(sig)

    def send(self, sig: int) -> None:
        """A signal to the process, if there is one."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(sig)


class Supervisor:
    """Children under one pair of signals."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.children = [Child(program) for program in programs]
        self._tasks: dict[Child, asyncio.Task[int]] = {}
        self._stop = asyncio.Event()
        self._killed_by = 0
        self._failure: str | None = None

    async def run(self) -> int:
        """Run until a signal or a failure; the exit code: 0 after a clean drain."""
        loop = asyncio.get_running_loop()
        for each in _SIGNALS:
            loop.add_signal_handler(each, self._on_signal, each)
        if not sys.stderr.isatty():  # there SIGHUP means that the terminal was closed
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._tasks = {child: asyncio.create_task(child.keep()) for child in self.children}
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait([stop, *self._tasks.values()], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        await self._stop_all()
        return self._exit_code()

    def fail(self, reason: str) -> None:
        """End everything in order, as a failure that is told at the end."""
        self._failure = reason
        self._stop.set()

    def _on_signal(self, sig: int) -> None:
        if self._stop.is_set():
            self._killed_by = sig
            for child in self.children:
                child.stop(signal.SIGKILL)
        self._stop.set()

    def _reload(self) -> None:
        for child in self.children:
            if child.program.reloads and child.ready.is_set():
                child.send(signal.SIGHUP)

    async def _stop_all(self) -> None:
        for group in sorted({child.program.group for child in self.children}):
            members = [child for child in self.children if child.program.group == group]
            await asyncio.gather(*(self._end(child) for child in members))

    async def _end(self, child: Child) -> None:
        task, limit_s = self._tasks[child], child.program.stop_limit_s
        child.stop()
        await asyncio.wait([task], timeout=limit_s)
        if not task.done():
            log.error("%s did not end within %g s; killing it", child.program.name, limit_s)
            child.stop(signal.SIGKILL)
            await asyncio.wait([task])

    def _exit_code(self) -> int:
        if self._killed_by:
            return 128 + self._killed_by
        codes = []
        if self._failure is not None:
            print(f"headrace: {self._failure}", file=sys.stderr)
            codes.append(1)
        for child, task in self._tasks.items():
            error = task.exception()
            if isinstance(error, ChildError):
                print(f"headrace: {error}", file=sys.stderr)
                codes.append(error.code)
            elif error is not None:
                raise error
            elif child.program.group == 0 and task.result() not in _CLEAN:
                codes.append(1)
        return codes[0] if codes else 0


@contextlib.contextmanager
def _reading(fd: int, ready: Callable[[], None]) -> Iterator[None]:
    """Calls `ready` when a byte comes. The end of the pipe without one is a child that died, or that must be
    asked."""
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        loop.remove_reader(fd)
        if os.read(fd, 1):
            ready()

    loop.add_reader(fd, on_readable)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        os.close(fd)


@contextlib.contextmanager
def _asking(
    until_ready: Callable[[], Coroutine[Any, Any, None]] | None, ready: Callable[[], None]
) -> Iterator[None]:
    """Calls `ready` when `until_ready` returns, if the child lives as long."""
    if until_ready is None:
        yield
        return

    async def ask() -> None:
        await until_ready()
        ready()

    task = asyncio.create_task(ask())
    try:
        yield
    finally:
        task.cancel()


def _reason(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
