"""Processes end with the worker, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.vllm_reaper import Reaper


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_closed_reaper_kills_nobody(sleeper: subprocess.Popen[bytes]) -> None:
    Reaper([sleeper.pid]).close()
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.2)


def test_killed_worker_takes_its_engine_along(sleeper: subprocess.Popen[bytes]) -> None:
    script = (
        "import sys, time; from backend.vllm_reaper import Reaper; "
        f"reaper = Reaper([{sleeper.pid}]); print('up', flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=root) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"up\n"
        os.kill(worker.pid, signal.SIGKILL)
        assert sleeper.wait(10) == -signal.SIGKILL
