"""The tiny app under the real supervisor, as a program, with a child that stands for the worker.

As a parent it prints one line per event: `folder …`, `listening …`, and for each child `child ROLE PID` when
it has started. With TINY_CHILD_FAULT=deaf the worker ignores SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from gateway import listen, process
from gateway.process import Orders
from gateway.run_gateway import bound, gateway_programs, run_folder, supervise
from gateway.server import run
from gateway.settings import Settings
from gateway.settings_load import load, plain
from gateway.supervisor import Program, Supervisor
from tests.gateway.tiny_app import TinyApp

COMMAND = (sys.executable, "-m", "tests.gateway.tiny_supervisor", "child")


def gateway_child(settings: Settings, orders: Orders) -> int:
    app = TinyApp()

    def started() -> None:
        # One write: several children get it at the same moment.
        signal.signal(signal.SIGHUP, lambda *_: os.write(1, b"child reload %d\n" % os.getpid()) and None)
        print(f"child gateway {os.getpid()}", flush=True)
        process.tell_ready(orders)

    return run(app, app, settings, process.sockets_of(settings, orders), started)


def worker_child(settings: Settings, orders: Orders) -> int:
    if os.environ.get("TINY_CHILD_FAULT") == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"child worker {os.getpid()}", flush=True)
    process.tell_ready(orders)
    time.sleep(60)
    return 0


def worker_program(settings: Settings) -> Program:
    return Program(
        name="worker",
        command=COMMAND,
        orders=lambda ready_fd, _: Orders("worker", plain(settings), os.getpid(), ready_fd=ready_fd).encode(),
        stop_limit_s=1.0,
        group=1,
    )


def parent() -> int:
    settings = load().settings
    with run_folder() as folder, bound(settings, listen.reserve) as (settings, sockets):
        programs = gateway_programs(settings, sockets, folder, command=COMMAND)
        supervisor = Supervisor([*programs, worker_program(settings)])
        print(f"folder {folder}", flush=True)
        return asyncio.run(supervise(supervisor, tell(supervisor, listen.url(settings.http, sockets))))


async def tell(supervisor: Supervisor, url: str) -> None:
    for child in supervisor.children:
        await child.ready.wait()
    print(f"listening {url}", flush=True)


if __name__ == "__main__":
    is_child = sys.argv[1:] == ["child"]
    sys.exit(process.start({"gateway": gateway_child, "worker": worker_child}) if is_child else parent())
