"""Drives the way in as the gateway does, without its event loop: every need is served where it stands.

Here alone tests know how the ids of a prompt are asked for.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Final

from gateway.openai_schema import parse_chat
from pipeline.inbound import Inbound, InboundOptions, Ready
from pipeline.model_text import ModelText
from pipeline.needs import Compute, Encode, Steps, served
from pipeline.prompt_templates import PromptTemplate
from pipeline.token_buffer import BufferPool
from pipeline.token_cache import TokenCache
from pipeline.tokenizing import TokenStore
from pipeline.values import ChatRequest, CompletionRequest, ModelInfo

MAX_MODEL_LEN: Final = 1 << 17
INFO: Final = ModelInfo("m", max_model_len=MAX_MODEL_LEN, block_size=16, default_sampling={}, fingerprint="")
Request = ChatRequest | CompletionRequest


def parsed(body: Mapping[str, Any]) -> ChatRequest:
    """The request that a client's body makes."""
    return parse_chat(json.dumps(body).encode())


class Driver:
    """One model's way in, with a token cache of its own. `max_cache_bytes` 0: the cache is off."""

    def __init__(
        self,
        text: ModelText,
        max_cache_bytes: int = 64 << 20,
        templates: Mapping[str, PromptTemplate] | None = None,
    ) -> None:
        self.cache = TokenCache(max_cache_bytes)
        self.store = TokenStore(self.cache, BufferPool(64 << 20))
        self._inbound = Inbound(text, INFO, InboundOptions(templates=templates or {}), self.store)

    def ids(self, request: Request, now_s: float = 0.0) -> list[int]:
        """The ids of the request's prompt. Raises `ClientError`."""
        return _ids(served(self._inbound.prepare(request, now_s)))

    def ids_together(self, requests: Sequence[Request], rng: random.Random) -> list[list[int]]:
        """The ids of requests in flight at once: their texts are encoded by threads, and end in any order."""
        steps = [self._inbound.prepare(request, 0.0) for request in requests]
        found: list[list[int]] = [[] for _ in steps]
        with ThreadPoolExecutor(4) as threads:
            pending: dict[Future[Any], int] = {
                threads.submit(lambda: None): index for index in range(len(steps))
            }
            while pending:
                done = list(wait(pending, return_when=FIRST_COMPLETED).done)
                rng.shuffle(done)
                for future in done:
                    index = pending.pop(future)
                    need = self._advanced(steps[index], future.result(), found, index)
                    if need is not None:
                        pending[threads.submit(need)] = index
        return found

    def _advanced(self, steps: Steps[Ready], answer: Any, found: list[list[int]], index: int) -> Any:
        """Go one need further; what a thread has to do for it, or None at the end."""
        try:
            need = steps.send(answer)
        except StopIteration as ended:
            found[index] = _ids(ended.value)
            return None
        return need.run if isinstance(need, Encode | Compute) else lambda: None


def _ids(ready: Ready) -> list[int]:
    """Of the only prompt. A copy, so that its buffer is free again."""
    [prompt] = ready.prompts
    numbers = array("i")
    numbers.frombytes(bytes(prompt.ids))
    assert prompt.num_tokens == len(numbers)
    return numbers.tolist()
