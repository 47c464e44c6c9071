"""The real processes that end-to-end tests talk to: workers and gateways, each as a context manager.

`tests/conftest.py` makes fixtures of them; a test module that wants another scope uses them directly. A clean
end is part of the contract: whoever has not been ended by the test itself must exit with 0 after SIGTERM.
"""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.processes import Process, answers, free_port, headrace

ENGINE_START_S = 110.0  # the engine takes 7 s on two idle cores, and the machine may be busy
STEP_TOKENS = 512  # of the tests' engine; it computes some 600 tokens of prompts a second
START_S = 30.0
# Beside two other test processes a second thread waits more than it works: the engine needs a fifth less of
# two cores, and its steps are as quick. `tests/e2e/test_serve.py` has the engine as users have it.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
PARSERS_START_S = 90.0  # of a gateway with vLLM's parsers, whose import takes 5 s alone on the machine


@dataclass(frozen=True, slots=True)
class Worker:
    """A running worker. `address` is what a gateway's --worker takes."""

    process: Process
    address: str
    metrics_port: int

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels, from the worker's own /metrics."""
        return metric(self.metrics_port, name)


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway that has said it is ready."""

    process: Process
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels, from the gateway's /metrics."""
        return metric(self.port, name)

    @property
    def log(self) -> Path:
        return self.process.log

    @property
    def pid(self) -> int:
        return self.process.pid


@contextmanager
def running(process: Process) -> Iterator[Process]:
    """Stops the process at the end, unless the test has ended it. Nothing of its group is left."""
    try:
        yield process
        if process.returncode is None:
            process.signal(signal.SIGCONT)  # a test may have stopped it
            process.stop()
    finally:
        process.kill()


@contextmanager
def start_worker(
    folder: Path,
    *args: str,
    name: str = "worker",
    env: Mapping[str, str] | None = None,
    limit_s: float = START_S,
) -> Iterator[Worker]:
    """`headrace worker ARGS` on a Unix socket in `folder`, healthy."""
    address, port = f"unix://{folder}/{name}.sock", free_port()
    command = headrace("worker", "--listen", address, "--metrics-port", str(port), *args)
    with running(Process(name, command, folder / f"{name}.log", env)) as process:
        process.wait_until(lambda: answers(port, "/health") == 200, limit_s, "healthy")
        yield Worker(process, address, port)


@contextmanager
def start_engine(folder: Path, model: Path, *args: str, name: str = "engine") -> Iterator[Worker]:
    """A worker with vLLM and a model of this folder."""
    command = ("--model", str(model), *args)
    with start_worker(folder, *command, name=name, env=ONE_THREAD, limit_s=ENGINE_START_S) as worker:
        yield worker


@contextmanager
def start_scripted(folder: Path, tokenizer: Path, *args: str, name: str = "scripted") -> Iterator[Worker]:
    """A scripted worker with the tokenizer of a model folder. Steps take 1 ms unless `args` say otherwise."""
    options = ("--scripted", "--tokenizer", str(tokenizer), "--step-ms", "1", *args)
    with start_worker(folder, *options, name=name) as worker:
        yield worker


@contextmanager
def start_gateway(
    folder: Path,
    workers: Sequence[Worker | str] = (),
    *args: str,
    name: str = "gateway",
    env: Mapping[str, str] | None = None,
    until_ready: bool = True,
    limit_s: float = START_S,
) -> Iterator[Gateway]:
    """`headrace gateway ARGS` on a free port, ready; with `until_ready=False` as soon as it is alive."""
    port = free_port()
    addresses = [worker if isinstance(worker, str) else worker.address for worker in workers]
    links = [part for address in addresses for part in ("--worker", address)]
    command = headrace("gateway", "--host", "127.0.0.1", "--port", str(port), *links, *args)
    path = "/ready" if until_ready else "/health"
    with running(Process(name, command, folder / f"{name}.log", env)) as process:
        process.wait_until(lambda: answers(port, path) == 200, limit_s, f"answering {path}")
        # Of several processes one answers before the others listen; this is said when all of them do.
        process.wait_until(lambda: "listening on" in process.log_text(), START_S, "listening")
        yield Gateway(process, port)


def fetch(port: int, path: str) -> str:
    """The body of a GET that must succeed."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        body: str = response.read().decode()
    return body


def metric(port: int, name: str) -> float:
    """The sum of a metric over its labels. Raises `KeyError` if the server does not have it."""
    lines = [line.rsplit(" ", 1) for line in fetch(port, "/metrics").splitlines() if not line.startswith("#")]
    values = [float(value) for key, value in lines if key.partition("{")[0] == name]
    if not values:
        raise KeyError(name)
    return sum(values)
