"""What the load test prints: streams may be closed, full or gone, and a report is more than they are.

Not here: the table (`gateway/bench/table.py`), the line of progress (`gateway/bench/progress.py`).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from gateway.bench.answer_frames import one_line


def open_streams() -> None:
    """Put the null device where the shell has closed a standard stream.

    Else its number goes to the next socket, and Python has None for it, whose methods are missed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for good)


def say(message: str) -> None:
    """One line on standard error, if that can be written. What servers wrote may be in it."""
    with suppress(OSError):
        show(f"headrace: {one_line(message)}\n", sys.stderr)


def show(text: str, out: TextIO) -> None:
    """Write all of it now. Raises `OSError`; then the stream takes no more, at the program's end neither.

    Characters that the stream's encoding lacks are replaced.
    """
    encoding = out.encoding or "utf-8"
    try:
        out.write(text.encode(encoding, "replace").decode(encoding))
        out.flush()
    except OSError:
        _mute(out)
        raise


def _mute(out: TextIO) -> None:
    with suppress(OSError, ValueError):  # one without a number is not the system's
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, out.fileno())
        os.close(null)
