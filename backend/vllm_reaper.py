"""Ends the engine's processes when the worker is killed. vLLM's would live on, with the GPU's memory.

A shell waits on a pipe that only the worker holds open: when the worker is gone, however it went, the read
ends and the shell kills what it was told to. It works for forked and spawned engines alike, which neither a
parent-death signal (bound to the forking *thread*) nor a fork hook does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Final

_SCRIPT: Final = 'read -r _; kill -9 "$@" 2>/dev/null'


class Reaper:
    """Holds the pipe. Start it when the processes run; `close` it once they have ended."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "reaper", *map(str, pids)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C for the worker is not for it
        )

    def close(self) -> None:
        """End the shell without killing anything: the pids may belong to others by now."""
        self._shell.kill()
        self._shell.wait()
        if self._shell.stdin is not None:
            self._shell.stdin.close()
