"""Scans and tokenizes the answer of a chat that goes on when it ends, so that the next turn finds it known.

Most of a next turn's new text is the answer before it. The client sends it back as it saw it; whoever gave it
knows it already, and has time until then. Only chats that have gone on once are expected to do so again:
single requests cost nothing here. An answer that comes back changed, or never, was tokenized in vain.

Reasoning is no part of it: few clients send it back, and templates drop it from earlier turns. An answer with
tool calls is not learned at all: the template writes them and the content as one, and what comes back with
them is a client's own reading of their JSON (`whole_text` of `gateway/writers.py`).

Not here: what a segment is, and how long it is remembered (`pipeline/token_cache.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time

from backend.fault_log import log_fault
from gateway.encoders import Encoders
from gateway.models import AnyModel, Model
from gateway.needs import NeedServer
from pipeline.errors import HeadraceError
from pipeline.inbound import InputRules
from pipeline.values import ChatRequest, CompletionRequest

logger = logging.getLogger("headrace.next_turns")


class NextTurns:
    """One per process. `is_on` False: it never wants anything."""

    def __init__(self, needs: NeedServer, encoders: Encoders, is_on: bool = True) -> None:
        self._needs = needs
        self._encoders = encoders
        self._is_on = is_on
        self._tasks: set[asyncio.Task[None]] = set()

    def wants(self, model: AnyModel, request: ChatRequest | CompletionRequest) -> bool:
        """Whether the text of the answer should be kept for `learn`."""
        return (
            self._is_on
            and isinstance(request, ChatRequest)
            and isinstance(model, Model)
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
        if isinstance(request, ChatRequest) and isinstance(model, Model):
            task = asyncio.create_task(self._learn(model, request, answer, rules), name="learn an answer")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _learn(self, model: Model, request: ChatRequest, answer: str, rules: InputRules | None) -> None:
        try:
            await self._needs.serve(model.inbound.learn(request, answer, time.time(), rules))
        except HeadraceError as error:  # the template does not take such a chat, or a rule blocks it
            logger.debug("an answer was not tokenized: %s", type(error).__name__)
        except Exception as error:  # nobody waits for this task
            log_fault(error, "none")

    async def stop(self) -> None:
        """Nothing is under way any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
