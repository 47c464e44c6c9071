"""A server's process and all its children as one: what they cost and what they hold.

Not here: which servers there are (`peers.py`), and how one is started (`processes.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# The title that vLLM gives the process that computes; it and its children are the engine.
ENGINE_CORE: Final = "VLLM::EngineCore"


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """The process with this id and its children, without an engine core."""

    pid: int

    def pids(self) -> list[int]:
        return list(_walk(self.pid))

    def cpu_s(self) -> float:
        """CPU seconds of those alive, of ended threads too, in the scheduler's nanoseconds."""
        return sum(_cpu_s(pid) for pid in self.pids())

    def memory_bytes(self) -> int:
        """Resident memory that is their own."""
        return sum(_memory_bytes(pid) for pid in self.pids())


def pin(tree: ProcessTree, cores: set[int]) -> None:
    """Keep every thread of the tree on these cores; threads that they start inherit it."""
    for pid in tree.pids():
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                os.sched_setaffinity(int(task.name), cores)
            except ProcessLookupError:
                continue


def _walk(pid: int) -> Iterator[int]:
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:  # it has just ended
        return
    if title.startswith(ENGINE_CORE.encode()):
        return
    yield pid
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            yield from _walk(int(child))


def _cpu_s(pid: int) -> float:
    # The clock of another process, as clock_getcpuclockid(3) makes its number.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def _memory_bytes(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()
    except FileNotFoundError:
        return 0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")
