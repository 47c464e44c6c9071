"""Runs gateway processes: one in this process, or several, or one with a store, under the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from backend.large_blocks import give_back_large_blocks
from gateway import listen
from gateway.cli import FAILED
from gateway.commands import RULE_PROBLEMS, say, set_up_logging, with_settings
from gateway.embedded_store import with_store
from gateway.process import CHILD_COMMAND, Orders
from gateway.server import run
from gateway.settings import Http, Settings
from gateway.settings_load import SettingsError, plain
from gateway.settings_streams import EMBEDDED
from gateway.settings_table import with_values
from gateway.supervisor import Child, Program, Supervisor

log = logging.getLogger("headrace.gateway")

# What a drain may take beyond its limit: error frames, closing connections, the interpreter's end.
_STOP_MARGIN_S: Final = 15.0
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")

Bound = tuple[Settings, list[socket.socket]]


def serve(
    settings: Settings,
    sockets: list[socket.socket],
    started: Callable[[], None],
    token_fd: int | None = None,
    is_restart: bool = False,
) -> int:
    """One gateway process, until a signal ends it; the exit code.

    `token_fd`: memory of `shared_tokens`. `is_restart`: in place of one that died.
    """
    from gateway.app import build_app

    give_back_large_blocks()
    try:
        app = build_app(settings, token_fd, is_restart)
    except RULE_PROBLEMS as error:  # of the rule files, and of the link's TLS files
        say(str(error))
        return FAILED
    code = run(app, app.gateway, settings, sockets, started)
    if app.gateway.start_problem is not None:
        say(app.gateway.start_problem)
    return code


def main_gateway(flags: Mapping[str, Any]) -> int:
    return with_settings(flags, run_gateway)


def run_gateway(settings: Settings) -> int:
    """`headrace gateway`, until a signal or a failure; the exit code."""
    if not settings.link.worker and not settings.upstream.upstream:
        raise SettingsError(["worker or upstream is missing: to what should the gateway connect?"])
    set_up_logging(settings.general.log_level)
    is_one = settings.http.processes == 1 and settings.streams.redis != EMBEDDED
    return _run_one(settings) if is_one else _run_several(settings)


def _run_one(settings: Settings) -> int:
    with bound(settings, listen.bind) as (settings, sockets):
        return serve(settings, sockets, lambda: announce(settings, listen.url(settings.http, sockets)))


def _run_several(settings: Settings) -> int:
    with (
        run_folder() as folder,
        shared_tokens(settings) as token_fd,
        bound(settings, listen.reserve) as (settings, sockets),
    ):
        settings, stores = with_store(settings, folder)
        supervisor = Supervisor([*stores, *gateway_programs(settings, sockets, folder, token_fd)])
        url = listen.url(settings.http, sockets)
        return asyncio.run(supervise(supervisor, _announce_when_ready(supervisor.children, settings, url)))


async def supervise(supervisor: Supervisor, telling: Coroutine[Any, Any, None]) -> int:
    """Run the children; `telling` runs beside them, and what goes wrong in it never ends them."""
    task = asyncio.create_task(telling)
    task.add_done_callback(_log_failure)
    try:
        return await supervisor.run()
    finally:
        task.cancel()
        await asyncio.wait([task])


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("cannot tell whether the gateway is ready", exc_info=error)


def gateway_programs(
    settings: Settings,
    sockets: Sequence[socket.socket],
    folder: Path,
    token_fd: int | None = None,
    command: Sequence[str] = CHILD_COMMAND,
) -> list[Program]:
    """The children: TCP ones bind the port themselves, those of a Unix socket inherit it."""
    fds = [each.fileno() for each in sockets] if settings.http.uds is not None else []
    several = settings.http.processes > 1
    return [
        Program(
            name=f"gateway process {index}",
            command=command,
            orders=partial(_orders, settings, fds, token_fd),
            stop_limit_s=settings.http.drain_limit_s + _STOP_MARGIN_S,
            env={"PROMETHEUS_MULTIPROC_DIR": str(folder)} if several else {},
            fds=[*fds, token_fd] if token_fd is not None else fds,
            reloads=True,
            died=partial(_forget_metrics, folder) if several else _nothing,
        )
        for index in range(settings.http.processes)
    ]


def _orders(
    settings: Settings, fds: Sequence[int], token_fd: int | None, ready_fd: int, is_restart: bool
) -> bytes:
    return Orders("gateway", plain(settings), os.getpid(), fds, ready_fd, token_fd, is_restart).encode()


def _nothing(pid: int) -> None:
    """Metrics of a single process die with it."""


def _forget_metrics(folder: Path, pid: int) -> None:
    """The gauges of a dead process; its counters stay in the sums."""
    from prometheus_client import multiprocess

    multiprocess.mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def bound(settings: Settings, bind: Callable[[Http], list[socket.socket]]) -> Iterator[Bound]:
    """Sockets on the settings' address, and settings that name the port if a free one was asked for."""
    sockets = bind(settings.http)
    try:
        if settings.http.uds is None:
            settings = with_values(settings, port=sockets[0].getsockname()[1])
        else:
            for each in sockets:
                each.listen(settings.http.backlog)
        yield settings, sockets
    finally:
        listen.close(sockets)
        if settings.http.uds is not None:
            settings.http.uds.unlink(missing_ok=True)


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A private folder for sockets and metrics files, gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def shared_tokens(settings: Settings) -> Iterator[int | None]:
    """Memory for token ids that the processes share; None for one process, or where it is off."""
    num_bytes = settings.tokens.token_cache_shared_bytes
    if settings.http.processes == 1 or not num_bytes:
        yield None
        return
    from gateway.shared_tokens import create

    fd = create(num_bytes)
    try:
        yield fd
    finally:
        os.close(fd)


async def _announce_when_ready(children: Sequence[Child], settings: Settings, url: str) -> None:
    for child in children:
        await child.ready.wait()
    announce(settings, url)


def announce(settings: Settings, url: str) -> None:
    """Where the gateway listens, for a person. Warns of an address that everyone can use."""
    http, num = settings.http, settings.http.processes
    say(f"listening on {url}" + (f" with {num} processes" if num > 1 else ""))
    if http.uds is None and not settings.access.api_key and http.host not in _LOOPBACK:
        say(f"warning: {http.host} without --api-key: whoever reaches it can use it")
