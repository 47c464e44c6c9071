"""Scans and tokenizes the answer of a chat that goes on when it ends, so that the next turn finds it known.

Most of a next turn's new text is the answer before it. The client sends it back as it saw it; whoever gave it
knows it already, and has time until then. Only chats that have gone on once are expected to do so again:
single requests cost nothing here. An answer that comes back changed, or never, was tokenized in vain.

Reasoning is no part of it: few clients send it back, and templates drop it from earlier turns. An answer with
tool calls is not learned at all: the template writes them and the content as one, and what comes back with
them is a client's own reading of their JSON (`whole_text` of `gateway/writers.py`).

Answers that end within `GATHER_S` are learned together: their texts then go to a tokenizer's thread in one
batch. One by one each costs twice as much, in threads that wake and in caches that are cold. A next turn
takes longer to be typed.

Not here: what a segment is, and how long it is remembered (`pipeline/token_cache.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Final

from backend.fault_log import log_fault
from gateway.encoders import Encoders
from gateway.models import AnyModel, Model
from gateway.needs import NeedServer
from pipeline.errors import HeadraceError
from pipeline.inbound import InputRules
from pipeline.values import ChatRequest, CompletionRequest

logger = logging.getLogger("headrace.next_turns")

GATHER_S: Final = 0.2
BATCH_TURNS: Final = 8  # scanned and rendered in one turn of the event loop: 0.5 ms
MAX_WAITING: Final = 1024


@dataclass(frozen=True, slots=True)
class _Turn:
    """An answer that waits to be learned."""

    model: Model
    request: ChatRequest
    answer: str
    rules: InputRules | None


class NextTurns:
    """One per process. `is_on` False: it never wants anything."""

    def __init__(
        self, needs: NeedServer, encoders: Encoders, is_on: bool = True, gather_s: float = GATHER_S
    ) -> None:
        self._needs = needs
        self._encoders = encoders
        self._is_on = is_on
        self._gather_s = gather_s
        self._waiting: list[_Turn] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all that was to be learned is."""
        return self._task is None

    def wants(self, model: AnyModel, request: ChatRequest | CompletionRequest) -> bool:
        """Whether the text of the answer should be kept for `learn`."""
        return (
            self._is_on
            and isinstance(model, Model)
            and isinstance(request, ChatRequest)
            and model.text.is_segmentable
            and request.generation.n == 1
            and not request.continue_final_message
            and any(message["role"] == "assistant" for message in request.messages)
        )

    def learn(
        self,
        model: AnyModel,
        request: ChatRequest | CompletionRequest,
        answer: str,
        rules: InputRules | None = None,
    ) -> None:
        """The answer of this request is complete. Nothing is done while others wait for a tokenizer."""
        if not answer or self._encoders.num_queue_chars or not self.wants(model, request):
            return
        if isinstance(model, Model) and isinstance(request, ChatRequest) and len(self._waiting) < MAX_WAITING:
            self._waiting.append(_Turn(model, request, answer, rules))
            if self._task is None:
                self._task = asyncio.create_task(self._learn_all(), name="learn answers")

    async def _learn_all(self) -> None:
        """Learn until nothing waits any more."""
        await asyncio.sleep(self._gather_s)
        while self._waiting:
            turns, self._waiting = self._waiting[:BATCH_TURNS], self._waiting[BATCH_TURNS:]
            await asyncio.gather(*map(self._learn, turns))
        self._task = None

    async def _learn(self, turn: _Turn) -> None:
        learn = turn.model.inbound.learn
        try:
            await self._needs.serve(learn(turn.request, turn.answer, time.time(), turn.rules))
        except HeadraceError as error:  # the template does not take such a chat, or a rule blocks it
            logger.debug("an answer was not tokenized: %s", type(error).__name__)
        except Exception as error:  # nobody waits for this task
            log_fault(error, "none")

    async def stop(self) -> None:
        """Nothing is under way any more."""
        self._waiting = []
        if self._task is not None:
            task = self._task
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._task = None
