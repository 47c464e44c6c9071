"""The settings of the token cache's second levels: what processes and machines share of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from gateway.settings_field import EDGE, About


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids that one gateway process has made and another can take."""

    TOPIC: ClassVar = "Shared tokens"
    COMMANDS: ClassVar = EDGE

    token_cache_shared_bytes: Annotated[
        int,
        About("memory for token ids that several gateway processes share; 0 is none", "bytes", at_least=0),
    ] = 64 << 20
    token_cache_redis: Annotated[
        str | None,
        About(
            "Redis that keeps token ids for all gateways, redis://, rediss:// or unix://; prompts can be "
            "read back from them",
            secret=True,
        ),
    ] = field(default=None, repr=False)
    token_cache_redis_ttl_s: Annotated[
        int, About("time that Redis keeps token ids after they were last written", "s", at_least=1)
    ] = 3600
    token_cache_redis_limit_ms: Annotated[
        float, About("longest wait for Redis; then the text is encoded", "ms", above=0)
    ] = 5.0
