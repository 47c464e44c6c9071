"""The way of a streamed body past uvicorn's `send`: its chunks go to the transport as they are pushed.

`send` is a coroutine that is made, run and thrown away for each message, which is a dict; it looks at six
objects of the request to write one chunk. With many streams each of them is cold; what that costs a token is
in `benchmarks/PROFILE.md`. Head and end of a response still go through `send`, and so does every chunk while
the client does not read.

Not here: what waits for a slow client (`gateway/outlet.py`).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from functools import partial
from typing import Final

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

DIRECT_EXTENSION: Final = "headrace.direct"  # a `BeginDirect` in the scope's extensions
WriteBytes = Callable[[bytes], None]
# Gives what takes bytes of a body, to be framed as chunks, or a WebSocket's text messages in UTF-8. None:
# only `send` may write now. The argument is called once, when that is so from then on.
BeginDirect = Callable[[Callable[[], None]], WriteBytes | None]


class DirectFlow(FlowControl):
    """uvicorn's flow control, which tells whoever writes past it when to stop."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._on_stop: Callable[[], None] | None = None

    def offer(self, cycle: RequestResponseCycle) -> dict[str, BeginDirect]:
        """The extension of one response's scope."""
        return {DIRECT_EXTENSION: partial(self._begin, weakref.ref(cycle))}  # it holds the scope

    def _begin(
        self, cycle_of: Callable[[], RequestResponseCycle | None], on_stop: Callable[[], None]
    ) -> WriteBytes | None:
        """From the head of a response to its end, while its client reads."""
        cycle = cycle_of()
        if cycle is None or not cycle.response_started or cycle.response_complete or cycle.disconnected:
            return None
        if not cycle.chunked_encoding or cycle.scope["method"] == "HEAD" or self.write_paused:
            return None
        self._on_stop = on_stop
        return self._transport.write

    def stop(self) -> None:
        """From now on only `send` may write."""
        on_stop, self._on_stop = self._on_stop, None
        if on_stop is not None:
            on_stop()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stop()
