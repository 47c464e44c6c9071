"""The settings of tokenization: caches of token ids, buffers, and the queue in front of the tokenizers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from gateway.settings_field import EDGE, About


@dataclass(frozen=True, slots=True)
class Tokens:
    """Per gateway process, unless it says otherwise."""

    TOPIC: ClassVar = "Tokens"
    COMMANDS: ClassVar = EDGE

    token_cache_bytes: Annotated[
        int, About("memory for the token ids of texts that come again; 0 is none", "bytes", at_least=0)
    ] = 256 << 20
    token_cache_shared_bytes: Annotated[
        int,
        About("memory for them that several gateway processes share; 0 is none", "bytes", at_least=0),
    ] = 64 << 20
    token_cache_redis: Annotated[
        str | None,
        About(
            "Redis for token ids, redis://…, rediss://… or unix://…: derivatives of prompts at rest, under "
            "hashes; without it they stay in memory",
            secret=True,
        ),
    ] = field(default=None, repr=False)
    token_cache_redis_ttl_s: Annotated[
        int, About("time that Redis keeps token ids after they were last written", "s", at_least=1)
    ] = 3600
    token_cache_redis_limit_ms: Annotated[
        float, About("longest wait for Redis; then the text is encoded", "ms", above=0)
    ] = 5.0
    # The smallest holds a prompt of 4 million tokens: no model's context is longer.
    token_buffer_bytes: Annotated[
        int,
        About("memory for prompts as token ids; when it is full, requests wait", "bytes", at_least=16 << 20),
    ] = 256 << 20
    encode_queue_chars: Annotated[
        int, About("characters that wait for a tokenizer; more is 503", "characters", at_least=1)
    ] = 16_000_000
