"""Our own programs under test: what they print line by line, and which of their children live."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.processes import ROOT, Process

__all__ = ["ROOT", "Program", "is_alive", "running", "wait_until"]

LIMIT_S = 30.0


class Program(Process):
    """A running `python ARGUMENTS`. Standard output and standard error are one."""

    @property
    def output(self) -> str:
        return self.log_text()

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()

    def wait_for(self, start: str, count: int = 1) -> list[str]:
        """The rest of the first `count` lines that begin with `start`, once they are there."""
        self.wait_until(
            lambda: len(self.starting(start)) >= count, LIMIT_S, f"{start!r} printed {count} times"
        )
        return self.starting(start)[:count]

    def starting(self, start: str) -> list[str]:
        return [line.removeprefix(start).strip() for line in self.lines if line.startswith(start)]

    def exit_code(self) -> int:
        """Waits for the end of the program."""
        wait_until(lambda: self.returncode is not None, lambda: self.output)
        assert self.returncode is not None
        return self.returncode


@contextlib.contextmanager
def running(*arguments: str, **environ: str) -> Iterator[Program]:
    """The program, which is killed at the end if it still runs."""
    with tempfile.TemporaryDirectory() as folder:
        program = Program(arguments[-1], [sys.executable, *arguments], Path(folder) / "log", environ)
        try:
            yield program
        finally:
            program.kill()


def wait_until(condition: Callable[[], bool], show: Callable[[], str] = str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"it did not come true; so far:\n{show()}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
