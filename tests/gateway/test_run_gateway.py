"""Gateways and workers whose reasoning parsers differ: at the start, at a restart, and later."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from backend.link_server import LinkServer
from gateway.app import App, build_app
from gateway.http_client import open_connection
from gateway.settings import General, Link, Settings
from tests.backend.linked import make_tokenizer, scripted, until
from tests.gateway.programs import Program, is_alive, running, wait_until
from tests.pipeline.small_tokenizers import byte_level
from tests.tcp_server import dialled, listening

MISFIT = "worker bad serves 'scripted' with the reasoning parser 'olmo3', but this gateway has no"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


def bad_worker(folder: Path, tokenizer: Path) -> Any:
    """A scripted worker with a reasoning parser."""
    listen = f"unix://{folder}/bad.sock"
    return scripted(folder, tokenizer=tokenizer, listen=listen, name="bad", reasoning_parser="olmo3")


async def started(app: App) -> dict[str, Any]:
    """Whether ASGI's lifespan has begun, as the server is told; ended at once if it has."""
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    asked.put_nowait({"type": "lifespan.startup"})
    life = asyncio.create_task(app({"type": "lifespan", "app": app}, asked.get, told.put))
    message = await asyncio.wait_for(told.get(), 20)
    asked.put_nowait({"type": "lifespan.shutdown"})
    await asyncio.gather(life, return_exceptions=True)
    return message


def settings(folder: Path, *workers: LinkServer) -> Settings:
    addresses = tuple(str(worker.address) for worker in workers)
    return Settings(general=General(cache=folder / "cache"), link=Link(worker=addresses))


async def test_a_start_fails_without_a_traceback_although_another_worker_fits(
    tmp_path: Path, tokenizer: Path
) -> None:
    async with scripted(tmp_path, tokenizer=tokenizer) as good, bad_worker(tmp_path, tokenizer) as bad:
        for workers in ([bad], [good, bad]):
            app = build_app(settings(tmp_path, *workers))
            assert await started(app) == {"type": "lifespan.startup.failed", "message": ""}
            assert app.gateway.start_problem is not None
            assert app.gateway.start_problem.startswith(MISFIT)
        app = build_app(settings(tmp_path, good))
        assert (await started(app))["type"] == "lifespan.startup.complete"


async def test_a_start_waits_for_every_worker_that_answers(tmp_path: Path, tokenizer: Path) -> None:
    """One that fits is ready first; the other one's words are held up until then, and longer."""

    async def hold_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until(app.gateway.pool.models)
        await asyncio.sleep(0.1)
        async with dialled(uds=f"{tmp_path}/bad.sock") as (from_worker, to_worker):
            await asyncio.gather(pass_on(reader, to_worker), pass_on(from_worker, writer))

    path = tmp_path / "held.sock"
    async with (
        scripted(tmp_path, tokenizer=tokenizer) as good,
        bad_worker(tmp_path, tokenizer),
        listening(hold_up, uds=path),
    ):
        workers = (str(good.address), f"unix://{path}")
        app = build_app(Settings(general=General(cache=tmp_path / "cache"), link=Link(worker=workers)))
        assert (await started(app))["type"] == "lifespan.startup.failed"
        assert app.gateway.start_problem is not None


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
    finally:
        writer.close()


async def test_a_restart_serves_on_without_the_worker(tmp_path: Path, tokenizer: Path) -> None:
    async with scripted(tmp_path, tokenizer=tokenizer) as good, bad_worker(tmp_path, tokenizer) as bad:
        app = build_app(settings(tmp_path, good, bad), is_restart=True)
        assert (await started(app))["type"] == "lifespan.startup.complete"
        assert app.gateway.start_problem is None


# -- as programs ---------------------------------------------------------------------------------------------


def gateway(folder: Path, *addresses: str) -> AbstractContextManager[Program]:
    """Two processes."""
    workers = [word for address in addresses for word in ("--worker", address)]
    places = ("--port", "0", "--cache", str(folder / "cache"), "--processes", "2")
    return running("-m", "gateway", "gateway", *workers, *places)


async def becomes(condition: Callable[[], bool], program: Program) -> None:
    await asyncio.to_thread(wait_until, condition, lambda: program.output)


def states(program: Program) -> list[str]:
    """Of the workers, as one of the gateway's processes says."""
    url = program.wait_for("headrace: listening on ")[0].split()[0]
    connection = open_connection(url, 20.0)
    connection.request("GET", "/ready?verbose")
    workers = json.loads(connection.getresponse().read())["workers"]
    connection.close()
    return [status["state"] for status in workers]


def first_child(program: Program) -> int:
    return int(Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()[0])


async def test_processes_end_with_what_to_set(tmp_path: Path, tokenizer: Path) -> None:
    async with bad_worker(tmp_path, tokenizer) as bad:
        with gateway(tmp_path, str(bad.address)) as program:
            assert await asyncio.to_thread(program.exit_code) == 1, program.output
            told = program.starting("headrace: ")
            assert any(line.startswith(MISFIT) and "--reasoning-parser olmo3" in line for line in told)
            for unwanted in ("Traceback", "starting it again", "listening on"):
                assert unwanted not in program.output


async def test_a_worker_that_comes_later_is_refused_and_ends_nothing(tmp_path: Path, tokenizer: Path) -> None:
    async with scripted(tmp_path, tokenizer=tokenizer) as good:
        with gateway(tmp_path, str(good.address), f"unix://{tmp_path}/bad.sock") as program:
            await becomes(lambda: states(program) == ["ready", "connecting"], program)
            async with bad_worker(tmp_path, tokenizer):
                await becomes(lambda: program.output.count("refusing a worker: ") == 2, program)
                first = first_child(program)
                os.kill(first, signal.SIGKILL)
                await becomes(lambda: not is_alive(first), program)
                # The new process meets both workers at its start.
                await becomes(lambda: program.output.count("refusing a worker: ") == 3, program)
                found = await asyncio.to_thread(lambda: [states(program)[0] for _ in range(20)])
                assert set(found) == {"ready"}
                assert program.output.count("starting it again") == 1
            program.signal(signal.SIGTERM)
            assert await asyncio.to_thread(program.exit_code) == 0, program.output
