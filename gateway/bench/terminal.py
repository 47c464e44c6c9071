"""What the load test prints: streams may be closed, full or gone, and a report is more than they are.

Not here: the table (`gateway/bench/table.py`), the line of progress (`gateway/bench/progress.py`).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from gateway.bench.phrases import one_line


def open_streams() -> None:
    """Put the null device where the shell has closed a standard stream.

    Python has None for it, whose methods are missed. What is opened takes the lowest number that is free,
    which is the stream's own; else the next socket would have it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for good)


def say(message: str) -> None:
    """One line on standard error, if that can be written. What servers wrote may be in it."""
    with suppress(OSError):
        show(f"headrace: {one_line(message)}\n", sys.stderr)


def show(text: str, out: TextIO) -> None:
    """Write all of it now. Raises `OSError`. Characters that the stream's encoding lacks are replaced."""
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, "replace").decode(encoding))
    out.flush()
