"""What calls make doubtful about an upstream server: whether it lives, and whether it has what it has listed.

One call proves nothing of the others: it may ask for a route that the server has not, or have in it what
breaks the server's answer. So the server itself is asked, and soon; a bound keeps one client from having it
asked all the time. Not here: the questions (`upstream_server.py`).
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

BROKEN_GAP_S: Final = 0.1  # between questions whether it lives: some prompts break every call
MODELS_GAP_S: Final = 2.0  # between questions for its models


class UpstreamDoubts:
    """Of one server. `passed_over`: the model that it serves to nobody while a sink is told of a fault.

    A sink that submits again within its `failed` must find another server, but nobody else must.
    """

    def __init__(self) -> None:
        self.passed_over: str | None = None
        self._broken = asyncio.Event()
        self._of_models = False
        self._models_from_s = -math.inf

    def missing(self, model: str) -> None:
        """A call was told that there is no such model or route, or that it may not have it."""
        self._of_models = True
        self.passed_over = model

    def broke(self, model: str) -> None:
        """A call broke before any byte of its response."""
        self.missing(model)  # it may be another server by now
        self._broken.set()

    def full(self, model: str) -> None:
        """A call was one too many. The next one may not be: some servers refuse long prompts so."""
        self.passed_over = model

    def told(self) -> None:
        """The call's sink has been told, and has submitted again if it does: nobody else is passed over."""
        self.passed_over = None

    async def broken_within(self, limit_s: float) -> bool:
        """Waits for a call that breaks. False: there was none in this time."""
        try:
            async with asyncio.timeout(limit_s):
                await self._broken.wait()
        except TimeoutError:
            return False
        self._broken.clear()
        return True

    def of_models(self, now_s: float) -> bool:
        """Whether its models must be asked for now; the doubt is then settled."""
        if not self._of_models or now_s < self._models_from_s:
            return False
        self._of_models, self._models_from_s = False, now_s + MODELS_GAP_S
        return True
