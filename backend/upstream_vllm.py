"""A stock vLLM server as an `UpstreamKind`: where it tells of itself, and which of its APIs gets the calls.

`/inference/v1/generate` takes and gives ids and nothing else, but exists only with --enable-scale-out or
--tokens-only, and knows no defaults of the model's generation_config. `/v1/completions` is everywhere; it
decodes each token to text that nobody reads. Sources: vLLM 0.32, `entrypoints/openai` and
`entrypoints/scale_out`. Requests and streams: `upstream_completions.py`, `upstream_generate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from backend.load_metrics import VLLM, read_named
from backend.upstream_completions import CompletionsWire
from backend.upstream_generate import GENERATE, GenerateWire
from backend.upstream_metrics import label
from backend.upstream_models import read_models
from backend.upstream_ports import NOT_SHOWN, Ask, EngineStats, ServedModel, TokenWire, Traits
from backend.upstream_tokenize import ask_token_ids

BLOCK_SIZE: Final = 16  # vLLM's on a GPU
# 403: it is switched off. 404: a version without it. Anything else is a refusal of the empty request.
_IS_MISSING: Final = (403, 404, 405)
_ANY_REFUSAL: Final = (400, 403, 404, 405, 422)


class VllmKind:
    """`upstream_ports.UpstreamKind`."""

    is_text = False

    async def models(self, ask: Ask) -> Sequence[ServedModel]:
        return read_models((await ask("GET", "/v1/models")).body)

    async def traits(self, ask: Ask, sends_defaults: bool) -> Traits:
        wire: TokenWire = CompletionsWire()
        has_generate = sends_defaults and await self._has_generate(ask)
        if has_generate:
            wire = GenerateWire()
        page = (await ask("GET", "/metrics", allowed=NOT_SHOWN)).body
        return Traits(
            wire=wire,
            api="generate" if has_generate else "completions",
            block_size=_block_size(page),
            versions=_versions((await ask("GET", "/version", allowed=NOT_SHOWN)).body),
        )

    async def _has_generate(self, ask: Ask) -> bool:
        """An empty request is refused where the route exists, and nothing is computed."""
        response = await ask("POST", GENERATE, b"{}", allowed=_ANY_REFUSAL)
        return response.status not in _IS_MISSING

    async def token_ids(self, ask: Ask, model: str, text: str) -> Sequence[int] | None:
        return await ask_token_ids(ask, model, text)

    async def stats(self, ask: Ask) -> EngineStats:
        await ask("GET", "/health")  # 503 when its engine has died
        page = (await ask("GET", "/metrics", allowed=NOT_SHOWN)).body
        return read_named(page, VLLM)


def _block_size(page: bytes) -> int:
    told = label(page, b"vllm:cache_config_info", b"block_size") or ""
    return int(told) if told.isdecimal() and len(told) < 10 and int(told) > 0 else BLOCK_SIZE


class _Version(msgspec.Struct):
    version: str = ""


def _versions(body: bytes) -> dict[str, str]:
    try:
        version = msgspec.json.decode(body, type=_Version).version
    except (ValueError, RecursionError):  # it is told to operators and decides nothing
        return {}
    return {"vllm": version[:100]} if version else {}
