"""Running a program to its end with a time limit, watched while it runs. For one-time work at a start."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.1
_TERMINATE_S: Final = 5.0


class ChildError(Exception):
    """A program failed, or was ended at its time limit. `output` is the last part of what it said."""

    def __init__(self, what: str, output: str) -> None:
        super().__init__(what)
        self.output = output


def run_child(
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    limit_s: float,
    watch: Callable[[], None],
) -> None:
    """Run a program, its output in the file `log`, calling `watch` ten times a second.

    Raises `ChildError`. Whatever ends the wait (an interrupt too) ends the program.
    """
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status = _wait(child, time.monotonic() + limit_s, watch)
        finally:
            _end(child)
    if status is None:
        raise ChildError(f"it took longer than {limit_s:.0f} s", _tail(log))
    if status != 0:
        raise ChildError(f"it ended with status {status}", _tail(log))


def _wait(child: subprocess.Popen[bytes], deadline_s: float, watch: Callable[[], None]) -> int | None:
    """The status, or None at the deadline."""
    while time.monotonic() < deadline_s:
        try:
            return child.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            watch()
    return None


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(_TERMINATE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _tail(log: Path, max_chars: int = 4000) -> str:
    return log.read_bytes()[-max_chars:].decode("utf-8", "replace").strip()
