"""Programs started by a test: their lines, their signals, and no process left when the test ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 20.0


class Program:
    """A running program. Its output is collected line by line, standard error among it."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**inherited, **environ},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, start: str, count: int = 1) -> list[str]:
        """The rest of the first `count` lines that begin with `start`, once they are there."""
        self.wait_until(lambda: len(self.starting(start)) >= count or self.process.poll() is not None)
        found = self.starting(start)
        assert len(found) >= count, f"no {start!r} {count} times in:\n{self.output}"
        return found[:count]

    def starting(self, start: str) -> list[str]:
        return [line.removeprefix(start).strip() for line in list(self.lines) if line.startswith(start)]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: self.output)

    def signal(self, sig: int) -> None:
        self.process.send_signal(sig)

    def exit_code(self) -> int:
        """Waits for the end of the program."""
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return code


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


@contextlib.contextmanager
def running(*arguments: str, **environ: str) -> Iterator[Program]:
    """The program `python ARGUMENTS`; it is killed at the end if it still runs."""
    program = Program(*arguments, **environ)
    try:
        yield program
    finally:
        if program.process.poll() is None:
            program.signal(signal.SIGKILL)
        program.exit_code()
        assert program.process.stdout is not None
        program.process.stdout.close()
