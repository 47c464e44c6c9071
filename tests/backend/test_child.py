"""Programs run to their end, within their time, watched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from backend.child import ChildError, run_child


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_success_keeps_the_output_and_calls_watch(tmp_path: Path) -> None:
    calls: list[None] = []
    code = "import os, time; print(os.environ['GIVEN']); time.sleep(0.4)"
    run_child(_python(code), {"GIVEN": "yes"}, tmp_path / "log", 60, lambda: calls.append(None))
    assert (tmp_path / "log").read_text() == "yes\n"
    assert calls


def test_failure_tells_status_and_last_words(tmp_path: Path) -> None:
    code = "import sys; print('x' * 10000); print('last words', file=sys.stderr); sys.exit(3)"
    with pytest.raises(ChildError, match="status 3") as caught:
        run_child(_python(code), {}, tmp_path / "log", 60, lambda: None)
    assert len(caught.value.output) <= 4000
    assert "last words" in caught.value.output


def test_time_limit_ends_the_program(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    log = tmp_path / "log"
    with pytest.raises(ChildError, match="longer than 1 s"):
        run_child(_python(code), {}, log, 1.0, lambda: None)
    assert not _is_alive(int(log.read_text()))


def test_interrupt_while_waiting_ends_the_program(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def interrupt() -> None:
        if log.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child(
            _python("import os, time; print(os.getpid(), flush=True); time.sleep(60)"), {}, log, 60, interrupt
        )
    assert not _is_alive(int(log.read_text()))


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
