import os
import subprocess
import sys

import pytest

from gateway.bench.terminal import say
from tests.processes import ROOT


def run_with(shell: str, program: str) -> subprocess.CompletedProcess[bytes]:
    """A program whose standard streams a shell has set up: `{}` is the command."""
    command = shell.format(f'"{sys.executable}" -c "$PROGRAM"')
    return subprocess.run(
        ["sh", "-c", command],
        cwd=ROOT,
        env=os.environ | {"PROGRAM": program},
        capture_output=True,
        check=False,
    )


def test_closed_streams_are_put_right() -> None:
    """A socket must not get the number of one of them, and nothing that is printed fails."""
    program = """
import os, sys
from gateway.bench.terminal import open_streams, say
open_streams()
number = os.open("/dev/null", os.O_RDONLY)
say("x"); print("y"); sys.stdin.read(); sys.stderr.isatty()
os._exit(40 + number)
"""
    # 0 to 2 are taken.
    assert run_with("{} <&- >&- 2>&-", program).returncode >= 43


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux alone has it")
def test_a_message_that_cannot_be_written_is_none() -> None:
    program = "import sys; from gateway.bench.terminal import say; say('x'); say('y'); sys.exit(7)"
    assert run_with("{} 2>/dev/full", program).returncode == 7


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux alone has it")
def test_a_stream_that_is_full_is_told_once() -> None:
    program = """
import sys
from gateway.bench.terminal import show
try:
    show("x", sys.stdout)
except OSError as error:
    sys.stderr.write(error.strerror)
    sys.exit(7)
"""
    done = run_with("{} >/dev/full", program)
    assert (done.returncode, done.stderr) == (7, b"No space left on device")


def test_characters_that_a_stream_lacks_are_replaced() -> None:
    program = "import sys; from gateway.bench.terminal import show; show('a\u2026b', sys.stdout)"
    assert run_with("PYTHONIOENCODING=ascii {}", program).stdout == b"a?b"


def test_a_message_has_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    say("it said: \x1b[31mred\x07\n\x9bx")
    assert capsys.readouterr().err == "headrace: it said: [31mred x\n"
