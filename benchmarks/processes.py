"""Starts what is measured, each in a process of its own, and reads their CPU time and memory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backend.embedded import default_cache_dir, ensure_embedded_model
from backend.progress import StreamProgress

START_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A running process. `port` is where it listens, 0 if it does not."""

    pid: int
    port: int
    log: Path

    def cpu_s(self) -> float:
        """CPU seconds of all its threads, from the scheduler:

        nanoseconds, where `stat` has ticks of 10 ms.
        """
        total = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def memory_bytes(self) -> int:
        """Resident memory that is its own."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()
        return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def embedded_model() -> Path:
    return ensure_embedded_model(default_cache_dir(os.environ), StreamProgress())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, port: int, path: str = "/health") -> Iterator[Measured]:
    """The process, once `path` on `port` answers 200; ended with SIGTERM."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, log, port, path)
        yield Measured(process.pid, port, log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def worker(folder: Path, *args: str, name: str = "worker") -> Iterator[tuple[Measured, str]]:
    """`headrace worker ARGS` on a Unix socket; with its address."""
    address, port = f"unix://{folder}/{name}.sock", free_port()
    command = [*_headrace("worker"), "--listen", address, "--metrics-port", str(port), *args]
    with running(command, folder / f"{name}.log", port) as measured:
        yield measured, address


@contextlib.contextmanager
def gateway(folder: Path, addresses: Sequence[str], *args: str, name: str = "gateway") -> Iterator[Measured]:
    """`headrace gateway ARGS` in front of these workers, ready."""
    port = free_port()
    workers = [part for address in addresses for part in ("--worker", address)]
    command = [*_headrace("gateway"), "--port", str(port), *workers, *args]
    with running(command, folder / f"{name}.log", port, "/ready") as measured:
        yield measured


def _headrace(command: str) -> list[str]:
    return [sys.executable, "-m", "gateway", command]


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, port: int, path: str) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2):
                return
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{log.name} did not get ready:\n{log.read_text()[-2000:]}")
