"""The worker's own HTTP port, against link servers in every state. With a whole worker: test_worker."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from backend.worker_http import WorkerHttp


class Link:
    """A link server as far as the port looks at it."""

    def __init__(self) -> None:
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.is_ready = False
        self.is_accepting = False
        self.num_connections = 2
        self.num_running = 5
        self.num_waiting = 3
        self.assembly = SimpleNamespace(num_bytes=4096)
        self.num_late = 0

    def refresh(self) -> None:
        self.num_late = 1


@pytest.fixture
async def served() -> AsyncIterator[Any]:
    link = Link()
    http = WorkerHttp(link, "127.0.0.1", 0)  # type: ignore[arg-type]
    await http.start()
    yield SimpleNamespace(link=link, url=http.url)
    await http.stop()


async def _get(url: str) -> tuple[int, str]:
    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(get)


async def test_health_follows_the_engine(served: Any) -> None:
    assert await _get(f"{served.url}/health") == (503, '{"status":"starting"}')
    served.link.is_ready = True
    assert await _get(f"{served.url}/health") == (200, '{"status":"ok"}')
    served.link.died.set_result("it broke")
    assert await _get(f"{served.url}/health") == (503, '{"status":"dead"}')


async def test_metrics_show_the_links_figures(served: Any) -> None:
    status, text = await _get(f"{served.url}/metrics")
    assert status == 200
    for line in (
        "headrace_link_connections 2.0",
        "headrace_link_jobs 5.0",
        "headrace_link_jobs_waiting 3.0",
        "headrace_link_assembly_bytes 4096.0",
        "headrace_link_ready 0.0",
        "headrace_link_late_outputs_total 1.0",
    ):
        assert f"\n{line}\n" in f"\n{text}"


async def test_ready_metric_falls_while_draining_and_health_does_not(served: Any) -> None:
    served.link.is_ready = served.link.is_accepting = True
    assert "\nheadrace_link_ready 1.0\n" in (await _get(f"{served.url}/metrics"))[1]
    served.link.is_accepting = False
    assert "\nheadrace_link_ready 0.0\n" in (await _get(f"{served.url}/metrics"))[1]
    assert (await _get(f"{served.url}/health"))[0] == 200


async def test_other_paths_are_not_found(served: Any) -> None:
    assert (await _get(f"{served.url}/"))[0] == 404


async def test_taken_port_is_an_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = WorkerHttp(Link(), "127.0.0.1", taken.getsockname()[1])  # type: ignore[arg-type]
        with pytest.raises(OSError, match="in use"):
            await http.start()
        await http.stop()
