"""What a gateway and its workers hold, as the processes themselves and the kernel tell it.

Whatever a request takes must be back when it is over: a test takes the figures before, and waits until they
are the same again afterwards.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError

from tests.processes import ProcessError, answers
from tests.stack import Gateway, Worker, fetch, metric

Started = TypeVar("Started")

LIMIT_S = 40.0  # longer than anything takes here; on a busy machine everything takes longer

# One look may see the last look's own connection, which a worker is still closing (3 in 100 looks), or a task
# less while the gateway reads its rule files (1 in 1,000). So looks must agree before they count as rest.
NUM_LOOKS = 3
LOOK_PERIOD_S = 0.1

# Of a worker in /ready?verbose: what this gateway thinks that it holds, and the engine's own counts.
_OUTSTANDING = (
    "outstanding_requests",
    "outstanding_tokens",
    "waiting_requests",
    "waiting_tokens",
    "running",
    "waiting",
)
_GATEWAY_GAUGES = ("headrace_open_requests", "headrace_buffered_bytes", "headrace_tasks")
_WORKER_GAUGES = (
    "headrace_link_connections",
    "headrace_link_jobs",
    "headrace_link_jobs_waiting",
    "headrace_link_assembly_bytes",
)


def enter_all(running: ExitStack, contexts: Sequence[AbstractContextManager[Started]]) -> list[Started]:
    """Start several processes at the same time: each spends a second of a core on its imports."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(running.enter_context, contexts))


def held(gateway: Gateway, workers: Sequence[Worker]) -> dict[str, float]:
    """Everything that a request may take and must give back."""
    figures = {name: gateway.metric(name) for name in _GATEWAY_GAUGES}
    for status in statuses(gateway):
        figures |= {f"{status['address']} {name}": status[name] for name in _OUTSTANDING}
    for worker in workers:
        figures |= {f"{worker.address} {name}": worker.metric(name) for name in _WORKER_GAUGES}
        figures[f"{worker.address} descriptors"] = num_descriptors(worker.process.pid)
    figures["descriptors"] = num_descriptors(gateway.pid)
    return figures


def at_rest(gateway: Gateway, workers: Sequence[Worker]) -> dict[str, float]:
    """What is held without any request, as several looks agree. The engines' counts come with heartbeats."""
    busy = (*_OUTSTANDING, "headrace_open_requests", "headrace_link_jobs")
    looks: list[dict[str, float]] = []

    def is_steady() -> bool:
        if looks:
            time.sleep(LOOK_PERIOD_S)
        looks.append(held(gateway, workers))
        is_idle = not any(value for name, value in looks[-1].items() if name.endswith(busy))
        return is_idle and len(looks) >= NUM_LOOKS and all(look == looks[-1] for look in looks[-NUM_LOOKS:])

    wait_for(gateway, is_steady, "idle")
    return looks[-1]


def wait_until_held(gateway: Gateway, workers: Sequence[Worker], before: Mapping[str, float]) -> None:
    """Until everything is as it was. An `AssertionError` names each figure that is not, with both values."""
    try:
        wait_for(gateway, lambda: held(gateway, workers) == before, "as before")
    except ProcessError as error:
        if gateway.process.returncode is not None:
            raise
        now = held(gateway, workers)
        if now != before:
            raise AssertionError(f"not as before: {_differences(before, now)}\n{error}") from None


def _differences(before: Mapping[str, float], now: Mapping[str, float]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} was {before.get(name)}, is {now.get(name)}" for name in names)


def wait_for(gateway: Gateway, is_true: Callable[[], bool], what: str) -> None:
    gateway.process.wait_until(is_true, LIMIT_S, what)


def statuses(gateway: Gateway) -> list[dict[str, Any]]:
    """The workers as the gateway sees them."""
    return ready(gateway)[1]["workers"]  # type: ignore[no-any-return]


def ready(gateway: Gateway) -> tuple[int, dict[str, Any]]:
    """Status and body of /ready?verbose."""
    try:
        return 200, json.loads(fetch(gateway.port, "/ready?verbose"))
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def are_ready(gateway: Gateway) -> bool:
    """Whether every process of a gateway is ready: the kernel gives each new connection to any of them."""
    return all(answers(gateway.port, "/ready") == 200 for _ in range(20))


def num_jobs(worker: Worker, waiting: bool = False) -> int:
    """Jobs in the worker's hands; those without a first token alone with `waiting`."""
    return int(metric(worker.metrics_port, "headrace_link_jobs_waiting" if waiting else "headrace_link_jobs"))


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_bytes(pid: int) -> int:
    """Physical memory of a process."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


def kept_bytes(gateway: Gateway) -> int:
    """What a gateway remembers of prompts on purpose, within bounds that a test does not reach."""
    names = ("token_cache_bytes", "token_buffer_bytes", "seen_text_bytes")
    return round(sum(gateway.metric(f"headrace_{name}") for name in names))


def children(pid: int) -> list[int]:
    """The processes that a process has started and that still run."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def exists(pid: int) -> bool:
    """Whether a process runs, or waits for its parent to take notice of its end."""
    return Path(f"/proc/{pid}").exists()


def request_lines(gateway: Gateway) -> list[dict[str, Any]]:
    """The request log, oldest first, without the audit's lines."""
    return [line for line in _log_lines(gateway) if "event" not in line]


def audit_lines(gateway: Gateway) -> list[dict[str, Any]]:
    """One for each rule hit, oldest first, where they go to the request log."""
    return [line for line in _log_lines(gateway) if line.get("event") == "rule_hit"]


def _log_lines(gateway: Gateway) -> list[dict[str, Any]]:
    lines = gateway.log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def logged(gateway: Gateway, request_id: str) -> dict[str, Any]:
    """The line of the request that was sent with this x-request-id; it comes a moment after the answer."""

    def found() -> list[dict[str, Any]]:
        return [line for line in request_lines(gateway) if line["id"] == request_id]

    wait_for(gateway, lambda: bool(found()), f"logging {request_id}")
    (line,) = found()
    return line


def assert_no_fault(gateway: Gateway) -> None:
    """Nothing happened that nobody had foreseen."""
    text = gateway.log.read_text()
    assert "Traceback" not in text, text[-4000:]
    assert "unexpected" not in text, text[-4000:]
    assert "internal_error" not in text, text[-4000:]
