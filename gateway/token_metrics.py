"""What `/metrics` shows of the token cache and the token buffers.

The objects count in plain integers; `publish` moves what is new into prometheus_client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from gateway.encoders import Encoders
from gateway.metrics import Metrics
from gateway.shared_tokens import SharedTokens
from pipeline.tokenizing import TokenStore

if TYPE_CHECKING:  # the client library takes 0.2 s and 8 MB, and most gateways do without
    from gateway.redis_tokens import RedisTokens

_COUNTERS: Final = {
    "headrace_token_cache_hits": "Segments of prompts whose token ids were known.",
    "headrace_token_cache_misses": "Segments of prompts that had to be looked up further or encoded.",
    "headrace_token_cache_saved_tokens": "Prompt tokens that were known.",
    "headrace_token_cache_evictions": "Segments that left the token cache for others.",
    "headrace_token_cache_shared_hits": "Segments found in the memory that gateway processes share.",
    "headrace_token_cache_shared_misses": "Segments looked for there in vain.",
    "headrace_token_cache_redis_hits": "Segments found in Redis.",
    "headrace_token_cache_redis_misses": "Segments looked for in Redis in vain.",
    "headrace_token_cache_redis_failures": "Look-ups in Redis, and writes, that failed or came too late.",
    "headrace_token_buffer_copied_bytes": "Bytes moved between buffers, by forks and growth.",
    "headrace_token_buffer_appended_bytes": "Bytes of token ids written to buffers.",
    "headrace_token_buffer_reused_tokens": "Prompt tokens that were in a buffer already.",
    "headrace_token_buffer_forks": "Conversations that left a shared buffer.",
    "headrace_encoded_texts": "Texts encoded off the event loop.",
    "headrace_encoded_batches": "Batches in which they were encoded.",
}
_GAUGES: Final = {
    "headrace_token_cache_bytes": "Memory that the token cache takes.",
    "headrace_token_cache_entries": "Segments in the token cache.",
    "headrace_token_buffer_bytes": "Memory of the buffers that hold prompts, in use or kept for a next turn.",
    "headrace_token_buffer_peak_bytes": "Most memory that all buffers ever took.",
    "headrace_encode_queue_characters": "Characters that wait for a tokenizer.",
}


class TokenMetrics:
    """Publishes what a store counts, and the encoders and second levels if they are given."""

    def __init__(
        self,
        metrics: Metrics,
        store: TokenStore,
        encoders: Encoders | None = None,
        near: SharedTokens | None = None,
        far: RedisTokens | None = None,
    ) -> None:
        self._store = store
        self._encoders = encoders
        self._near = near
        self._far = far
        self._counted: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self._counters = {name: metrics.counter(name, help_) for name, help_ in _COUNTERS.items()}
        self._gauges = {name: metrics.gauge(name, help_, "livesum") for name, help_ in _GAUGES.items()}

    def publish(self) -> None:
        """Bring the metrics up to date."""
        for name, value in self._values().items():
            if name in _GAUGES:
                self._gauges[name].set(value)
            else:
                self._counters[name].inc(value - self._counted[name])
                self._counted[name] = value

    def _values(self) -> Mapping[str, int]:
        store, encoders, near, far = self._store, self._encoders, self._near, self._far
        values = {f"headrace_token_cache_{name}": value for name, value in store.cache.stats().items()}
        values |= {f"headrace_token_buffer_{name}": value for name, value in store.pool.stats().items()}
        if encoders is not None:
            values["headrace_encode_queue_characters"] = encoders.num_queue_chars
            values["headrace_encoded_texts"] = encoders.num_texts
            values["headrace_encoded_batches"] = encoders.num_batches
        if near is not None:
            values["headrace_token_cache_shared_hits"] = near.hits
            values["headrace_token_cache_shared_misses"] = near.misses
        if far is not None:
            values["headrace_token_cache_redis_hits"] = far.hits
            values["headrace_token_cache_redis_misses"] = far.misses
            values["headrace_token_cache_redis_failures"] = far.num_late + far.num_errors
        return values
