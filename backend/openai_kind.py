"""Any OpenAI-compatible server as an `UpstreamKind`: the routes that nearly all have, and what they lack.

Not here: its calls (`upstream_openai.py`), the names of metrics (`load_metrics.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from backend.load_metrics import read_load, read_loads
from backend.upstream_models import read_models
from backend.upstream_openai import OpenAiWire
from backend.upstream_ports import NOT_SHOWN, Ask, EngineStats, ServedModel, Traits

# llama.cpp answers 501 where it was started without --metrics.
_LACKS: Final = (*NOT_SHOWN, 405, 501)


class OpenAiKind:
    """`upstream_ports.UpstreamKind`."""

    is_text = True

    async def models(self, ask: Ask) -> Sequence[ServedModel]:
        return read_models((await ask("GET", "/v1/models")).body)

    async def traits(self, ask: Ask, sends_defaults: bool) -> Traits:
        """A wire of its own, which learns what this server refuses."""
        return Traits(wire=OpenAiWire(), api="openai")

    async def token_ids(self, ask: Ask, model: str, text: str) -> None:
        """Its tokenizer is its own affair."""

    async def stats(self, ask: Ask) -> EngineStats:
        """Its metrics, where it has some; and whether it lives.

        `/health` is asked last: SGLang's generates a token and takes a second or more.
        """
        page = await ask("GET", "/metrics", allowed=_LACKS)
        if page.status == 200 and b"sglang:" in page.body:
            return read_load(page.body)
        if page.status != 200:
            loads = await ask("GET", "/v1/loads?include=core", allowed=_LACKS)
            if loads.status == 200:
                return read_loads(loads.body)
        health = await ask("GET", "/health", allowed=_LACKS)  # 503: it loads its model, or its engine died
        if health.status != 200:
            await ask("GET", "/v1/models")  # Ollama, OpenAI
        return read_load(page.body) if page.status == 200 else EngineStats()
