"""What goes wrong between nginx, gateway and worker while answers of every form are on their way: clients go
away in crowds, processes die, nginx reloads. Whatever is cut must show it, and nothing may stay behind.

Not here: single requests (`test_nginx_requests.py`), and resumable streams (`test_streams.py`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests import stack
from tests.e2e.asking import CHAT, chat
from tests.e2e.h2_client import connect_h2
from tests.e2e.nginx_site import Nginx, start_nginx
from tests.e2e.resting import assert_no_fault, num_jobs, wait_for
from tests.stack import Gateway, Worker
from tests.wire import Wire, connect

FORMS: Final = {"sse": "text/event-stream", "ndjson": "application/x-ndjson", "text": "text/plain"}
ENDLESS: Final = 20_000
NUM_PARALLEL: Final = 60


@dataclass(frozen=True, slots=True)
class Served:
    worker: Worker
    gateway: Gateway
    nginx: Nginx


@contextmanager
def start_all(folder: Path, model: Path) -> Iterator[Served]:
    """A scripted worker and a gateway behind the site."""
    with (
        stack.start_scripted(folder, model, "--step-ms", "5") as worker,
        stack.start_gateway(folder, [worker]) as gateway,
        start_nginx(folder, f"127.0.0.1:{gateway.port}") as nginx,
    ):
        yield Served(worker, gateway, nginx)


@pytest.fixture(scope="module")
def served(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with start_all(tmp_path_factory.mktemp("served"), embedded_model) as started:
        yield started


@pytest.fixture
def doomed(embedded_model: Path, tmp_path: Path) -> Iterator[Served]:
    """For one test, which kills a part of it."""
    with start_all(tmp_path, embedded_model) as started:
        yield started


async def rest_of(wire: Wire) -> tuple[bool, bytes]:
    """Whether the body has a tidy end, and what came until then."""
    body = b""
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        while piece := await wire.piece():
            body += piece
        return True, body
    return False, body


async def begin(wire: Wire, form: str, max_tokens: int = ENDLESS, content: str = "Tell me a story.") -> bytes:
    """The first piece of an answer, as much as has come."""
    assert (await wire.post(CHAT, chat(content, max_tokens), {"accept": FORMS[form]})).status == 200
    piece = await wire.piece()
    assert piece
    return piece


async def begin_everywhere(running: AsyncExitStack, served: Served) -> dict[tuple[str, str], Wire]:
    """An endless answer of every form on every way, by way and form."""
    nginx = served.nginx
    http2 = await running.enter_async_context(connect_h2(nginx.tls_port, nginx.tls("h2")))
    wires: dict[tuple[str, str], Wire] = {}
    for form in FORMS:
        wires["h2", form] = http2.stream()
        wires["h1", form] = await running.enter_async_context(connect(nginx.port))
        wires["tls", form] = await running.enter_async_context(connect(nginx.tls_port, tls=nginx.tls()))
    await asyncio.gather(*(begin(wire, form) for (_, form), wire in wires.items()))
    return wires


async def until_free(served: Served) -> None:
    await asyncio.to_thread(wait_for, served.gateway, lambda: num_jobs(served.worker) == 0, "free")


async def test_half_of_many_streams_of_a_connection_are_reset_and_the_others_are_whole(
    served: Served,
) -> None:
    nginx, forms = served.nginx, list(FORMS)
    async with connect_h2(nginx.tls_port, nginx.tls("h2")) as http2:

        async def ask(number: int) -> tuple[str, bytes] | None:
            stream, form = http2.stream(), forms[number % len(forms)]
            leaves = number % 2 == 1
            first = await begin(stream, form, ENDLESS if leaves else 40)
            if leaves:
                await stream.close()
                return None
            is_whole, body = await rest_of(stream)
            assert is_whole
            return form, first + body

        answers = [answer for answer in await asyncio.gather(*map(ask, range(NUM_PARALLEL))) if answer]
        await until_free(served)
    assert len(answers) == NUM_PARALLEL / 2
    for form, body in answers:
        assert form != "sse" or body.endswith(b"data: [DONE]\n\n")
        assert form != "ndjson" or b'"finish_reason":"length"' in body.splitlines()[-1]
    assert len({body for form, body in answers if form == "text"}) == 1
    assert_no_fault(served.gateway)


async def test_reload_of_nginx_leaves_running_streams_alone(served: Served) -> None:
    nginx = served.nginx
    async with AsyncExitStack() as running:
        wires = {form: await running.enter_async_context(connect(nginx.port)) for form in FORMS}
        for form, wire in wires.items():
            await begin(wire, form, 200)
        os.kill(nginx.process.pid, signal.SIGHUP)
        nginx.process.wait_until(lambda: "reconfiguring" in nginx.error_log, 10, "reloading")
        for form, wire in wires.items():
            is_whole, body = await rest_of(wire)
            assert is_whole, form
            assert form != "sse" or body.endswith(b"data: [DONE]\n\n")


async def test_worker_that_dies_is_told_in_every_form_on_every_way(doomed: Served) -> None:
    async with AsyncExitStack() as running:
        wires = await begin_everywhere(running, doomed)
        os.kill(doomed.worker.process.pid, signal.SIGKILL)
        ends = dict(zip(wires, await asyncio.gather(*map(rest_of, wires.values())), strict=True))
    for (way, form), (is_whole, body) in ends.items():
        if form == "text":
            assert not is_whole, way
        else:
            assert is_whole, (way, form)
            assert b'"code":"worker_lost"' in body.strip().splitlines()[-1], (way, form)
    assert_no_fault(doomed.gateway)


@pytest.mark.long
async def test_gateway_that_is_killed_shows_in_every_form_on_every_way(doomed: Served) -> None:
    async with AsyncExitStack() as running:
        wires = await begin_everywhere(running, doomed)
        os.kill(doomed.gateway.pid, signal.SIGKILL)
        ends = dict(zip(wires, await asyncio.gather(*map(rest_of, wires.values())), strict=True))
    assert [way for way, (is_whole, _) in ends.items() if is_whole] == []
