"""The tests' own process control, which keeps a failed test from leaving an engine running."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import Process, ProcessError, free_port, keep_variable
from tests.stack import running


def python(code: str, folder: Path, env: dict[str, str] | None = None) -> Process:
    return Process("python", [sys.executable, "-c", code], folder / "python.log", env)


def is_running(pid: int) -> bool:
    """Also false for a process that has ended and waits for its parent to take notice."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return state.stdout.strip()[:1] not in ("", "Z")


def wait_for_line(process: Process, line: str) -> None:
    process.wait_until(lambda: f"{line}\n" in process.log_text(), 20, f"saying {line}")


def test_stop_takes_an_exit_code_of_0(tmp_path: Path) -> None:
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print('up'); signal.pause()"
    with running(python(code, tmp_path)) as process:
        wait_for_line(process, "up")
        process.stop()
    assert process.returncode == 0


def test_running_fails_when_the_process_does_not_exit_with_0(tmp_path: Path) -> None:
    with (
        pytest.raises(ProcessError, match="exited with -15 after SIGTERM"),
        running(python("import signal; print('up'); signal.pause()", tmp_path)) as process,
    ):
        wait_for_line(process, "up")


def test_stop_of_a_process_that_ignores_it_raises_and_leaves_nothing(tmp_path: Path) -> None:
    code = "import signal; signal.signal(15, signal.SIG_IGN); print('up')\nwhile True: signal.pause()"
    process = python(code, tmp_path)
    wait_for_line(process, "up")
    with pytest.raises(ProcessError, match="still running"):
        process.stop(limit_s=0.2)
    process.kill()
    assert process.returncode == -signal.SIGKILL


def test_kill_ends_children_whose_parent_has_gone(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid)"
    )
    process = python(code, tmp_path)
    with pytest.raises(ProcessError, match="exited with 0 before done"):
        process.wait_until(lambda: False, 20, "done")
    child = int(process.log_text())
    assert is_running(child)
    process.kill()
    deadline_s = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < deadline_s, f"process {child} is still there"
        time.sleep(0.01)


def test_wait_until_shows_the_log_of_a_process_that_failed(tmp_path: Path) -> None:
    process = python("raise SystemExit('no such model')", tmp_path)
    with pytest.raises(ProcessError, match="no such model"):
        process.wait_until(lambda: False, 20, "ready")


def test_environment_leaves_out_the_settings_of_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "1")
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    code = "import os; print([key for key in os.environ if key.startswith('HEADRACE_')])"
    process = python(code, tmp_path, {"HEADRACE_LOG_LEVEL": "debug"})
    wait_for_line(process, "['HEADRACE_LOG_LEVEL']")
    process.kill()
    assert keep_variable("HEADRACE_CACHE")


def test_free_port_is_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


def test_tests_side_by_side_keep_their_groups(request: pytest.FixtureRequest) -> None:
    """Else two engines start, and all takes twice as long; pytest 9.2 broke it."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@test_processes")
