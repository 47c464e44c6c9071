"""Processes of the tests: started with a log, waited for, stopped, and never left behind.

Each one leads a process group of its own, and only that group is ever signalled.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STOP_LIMIT_S = 30.0


class ProcessError(AssertionError):
    """A process did not do what it should; the message holds the end of its log."""


class Process:
    """A running program whose output goes to a file.

    `env` is added to this process's environment, less any HEADRACE_* of the developer's shell.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        clean = {key: value for key, value in os.environ.items() if keep_variable(key)}
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**clean, "PYTHONUNBUFFERED": "1", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until(self, is_true: Callable[[], bool], limit_s: float, what: str) -> None:
        """Poll a condition while the process runs. Raises `ProcessError` when it exits or time is up."""
        deadline_s = time.monotonic() + limit_s
        while not is_true():
            if self.returncode is not None:
                raise self._error(f"exited with {self.returncode} before {what}")
            if time.monotonic() > deadline_s:
                raise self._error(f"not {what} within {limit_s:.0f} s")
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """To this process alone."""
        self._popen.send_signal(number)

    def stop(self, limit_s: float = STOP_LIMIT_S) -> None:
        """SIGTERM, as an init system does. Raises `ProcessError` unless it then exits with 0 in time."""
        self.signal(signal.SIGTERM)
        try:
            code = self._popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise self._error(f"still running {limit_s:.0f} s after SIGTERM") from None
        if code != 0:
            raise self._error(f"exited with {code} after SIGTERM")

    def kill(self) -> None:
        """End the whole group at once, also children whose parent has gone. Idempotent."""
        with suppress(ProcessLookupError):  # nobody is left in it
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def _error(self, what: str) -> ProcessError:
        return ProcessError(f"{self.name}: {what}\n{self.log_text()[-4000:]}")


def keep_variable(name: str) -> bool:
    """Settings of the developer's shell would change the tests; where the model is cached may stay."""
    return not name.startswith("HEADRACE_") or name == "HEADRACE_CACHE"


def headrace(*args: str) -> list[str]:
    """The command line of `headrace …` with this interpreter."""
    return [sys.executable, "-m", "gateway", *args]


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now.

    Test processes that run side by side share the numbers out: none gets what another is about to use.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port // 2 % num_workers == int(worker):  # the kernel gives out even or odd ones only
            return port


def answers(port: int, path: str) -> int:
    """The status of a GET, or 0 when nobody answers."""
    request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
    try:
        with socket.create_connection(("127.0.0.1", port), 2) as connection:
            connection.settimeout(5)
            connection.sendall(request)
            line = connection.makefile("rb").readline()
    except OSError:
        return 0
    return int(line.split(b" ")[1]) if line.startswith(b"HTTP/") else 0
