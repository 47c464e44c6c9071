"""What Ctrl-C and SIGTERM do to a load test: the first ends the load, and does not cost its report.

Not here: the load (`gateway/bench/run.py`), the report (`gateway/bench/delivery.py`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from gateway.bench.terminal import say

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_ONCE_MORE: Final = "the report is being made; interrupt once more to end without it"


@contextmanager
def ending(stop: Callable[[], None]) -> Iterator[None]:
    """Within the event loop: the first signal calls `stop`, the second is only told, the third ends the
    program."""
    loop = asyncio.get_running_loop()
    num_heard = 0

    def heard() -> None:
        nonlocal num_heard
        num_heard += 1
        if num_heard == 1:
            stop()
        elif num_heard == 2:
            say(_ONCE_MORE)
        else:
            remove()
            signal.raise_signal(signal.SIGINT)

    def remove() -> None:
        for each in _SIGNALS:
            loop.remove_signal_handler(each)

    for each in _SIGNALS:
        loop.add_signal_handler(each, heard)
    try:
        yield
    finally:
        remove()


@contextmanager
def reporting() -> Iterator[None]:
    """Outside of any loop: the first signal is only told, the second ends the program."""

    def heard(number: int, frame: FrameType | None) -> None:
        restore()
        say(_ONCE_MORE)

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)

    before = {each: signal.signal(each, heard) for each in _SIGNALS}
    try:
        yield
    finally:
        restore()
