"""What one process has for token ids, built from the settings: cache, buffers, encoders, second levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.encoders import Encoders
from gateway.metrics import Metrics
from gateway.needs import Load, NeedServer
from gateway.settings import Settings
from gateway.shared_tokens import SharedTokens
from gateway.token_metrics import TokenMetrics
from pipeline.token_buffer import BufferPool
from pipeline.token_cache import TokenCache
from pipeline.tokenizing import TokenStore

if TYPE_CHECKING:
    from gateway.redis_tokens import RedisTokens


class TokenParts:
    """Built by `gateway/app.py`. `token_fd`: memory that several processes share, if there is any.

    `load_media`: the one need of requests that is no affair of token ids.
    """

    def __init__(self, settings: Settings, metrics: Metrics, token_fd: int | None, load_media: Load) -> None:
        prompts = settings.prompts
        near = SharedTokens(token_fd) if token_fd is not None else None
        self._far = _redis_tokens(settings)
        self.encoders = Encoders(prompts.encode_queue_chars, near, self._far)
        self.store = TokenStore(
            TokenCache(prompts.token_cache_bytes), BufferPool(prompts.token_buffer_bytes), self.encoders.offer
        )
        self.needs = NeedServer(self.encoders, self.store.pool, settings.limits.queue_limit_s, load_media)
        self._metrics = TokenMetrics(metrics, self.store, self.encoders, near, self._far)

    def publish(self) -> None:
        """Bring their metrics up to date."""
        self._metrics.publish()

    async def close(self) -> None:
        """Nothing more is encoded."""
        self.encoders.close()
        if self._far is not None:
            await self._far.close()


def _redis_tokens(settings: Settings) -> RedisTokens | None:
    tokens = settings.tokens
    if tokens.token_cache_redis is None:
        return None
    from gateway.redis_tokens import RedisTokens  # takes 0.2 s and 8 MB

    return RedisTokens(
        tokens.token_cache_redis, tokens.token_cache_redis_ttl_s, tokens.token_cache_redis_limit_ms
    )
