"""The start of one child process of a supervisor: `python -m gateway.process`. A gateway, worker or store.

The parent writes one JSON line to standard input: role, settings (secrets too, which is why they come
neither as arguments nor as variables) and what the child inherits. The child tells that it serves by one
byte on `ready_fd`; a store cannot, and the parent asks it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.settings import Settings

CHILD_COMMAND: Final = (sys.executable, "-m", "gateway.process")
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Orders:
    """What a child is told. `listen_fds` are listening sockets that it inherits; without any it binds its
    own."""

    role: str  # gateway, worker, store
    settings: Mapping[str, Any]  # as settings_load.plain() gives them
    parent_pid: int
    listen_fds: Sequence[int] = ()
    ready_fd: int | None = None
    token_fd: int | None = None  # memory of `gateway.shared_tokens`
    is_restart: bool = False  # it has served before, and died

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"


Role = Callable[[Settings, Orders], int]


def start(roles: Mapping[str, Role]) -> int:
    """Read the orders and do them; the exit code."""
    orders = Orders(**json.loads(_read_line(0)))
    _die_with_parent(orders)
    if orders.role == "gateway":  # until it listens for it: the parent passes it on
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from gateway.commands import set_up_logging
    from gateway.settings_load import restore

    settings = restore(orders.settings)
    set_up_logging(settings.general.log_level)
    return roles[orders.role](settings, orders)


def run_gateway(settings: Settings, orders: Orders) -> int:
    """One of the gateway's processes."""
    from gateway.run_gateway import serve

    sockets = sockets_of(settings, orders)
    return serve(settings, sockets, lambda: tell_ready(orders), orders.token_fd, orders.is_restart)


def run_worker(settings: Settings, orders: Orders) -> int:
    """The worker of `headrace serve`."""
    from gateway.run_worker import run

    return run(settings, lambda: tell_ready(orders))


def run_store(settings: Settings, orders: Orders) -> int:
    """The embedded store: from here on this process is another program."""
    from gateway.embedded_store import become_store

    if orders.ready_fd is not None:
        os.close(orders.ready_fd)
    become_store(settings)


def sockets_of(settings: Settings, orders: Orders) -> list[socket.socket]:
    """What a gateway child listens on: the inherited sockets, or its own share of the port."""
    from gateway.listen import bind

    return [socket.socket(fileno=fd) for fd in orders.listen_fds] or bind(settings.http, shared=True)


def tell_ready(orders: Orders) -> None:
    """Tell the parent that this child serves."""
    if orders.ready_fd is not None:
        os.write(orders.ready_fd, b"1")
        os.close(orders.ready_fd)


def _read_line(fd: int) -> bytes:
    """The only line that the parent writes."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(fd, 1 << 16)
        if not piece:
            sys.exit("gateway.process is started by headrace itself, not by hand")
        line += piece
    return bytes(line)


def _die_with_parent(orders: Orders) -> None:
    """Even a parent that was killed leaves no process behind.

    A gateway ends at once: its port must be free for the next start. A worker gets SIGTERM, so that it ends
    its engine, a process of its own. A store keeps the order when it becomes another program. Where the
    kernel does not do it, a thread watches for the end of standard input, which the parent holds open.
    """
    sig = signal.SIGTERM if orders.role == "worker" else signal.SIGKILL
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sig)
        if os.getppid() != orders.parent_pid:  # it died before the call
            os._exit(1)
    else:
        threading.Thread(target=_watch_stdin, args=(sig,), daemon=True).start()


def _watch_stdin(sig: int) -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), sig)


if __name__ == "__main__":
    sys.exit(start({"gateway": run_gateway, "worker": run_worker, "store": run_store}))
