"""What the token cache and the buffers count -> Prometheus, once a second: theirs are plain ints, and hot."""

from __future__ import annotations

from typing import Final

from gateway.metrics import Metrics
from pipeline.tokenizing import TokenStore

# Name of a count in `stats()` -> help. Those that only grow are counters, with deltas published.
_CACHE_COUNTERS: Final = {
    "hits": "Segments of prompts whose ids were remembered.",
    "misses": "Segments that had to be tokenized.",
    "saved_tokens": "Prompt tokens that were not tokenized again.",
    "evictions": "Segments forgotten for want of memory.",
}
_CACHE_GAUGES: Final = {"bytes": "Memory of remembered segments.", "entries": "Remembered segments."}
_BUFFER_COUNTERS: Final = {
    "copied_bytes": "Bytes copied because conversations part or grow.",
    "forks": "Conversations that parted from another one's buffer.",
}
_BUFFER_GAUGES: Final = {
    "bytes": "Memory of prompts' buffers.",
    "peak_bytes": "Most memory of prompts' buffers so far.",
}


class TokenMetrics:
    """Publishes what a store counts."""

    def __init__(self, metrics: Metrics, store: TokenStore) -> None:
        self._store = store
        self._published: dict[str, int] = {}
        self._counters = {
            name: metrics.counter(f"headrace_{name}", help_)
            for name, help_ in (
                *((f"token_cache_{name}", help_) for name, help_ in _CACHE_COUNTERS.items()),
                *((f"token_buffer_{name}", help_) for name, help_ in _BUFFER_COUNTERS.items()),
            )
        }
        self._gauges = {
            name: metrics.gauge(f"headrace_{name}", help_, "livesum")
            for name, help_ in (
                *((f"token_cache_{name}", help_) for name, help_ in _CACHE_GAUGES.items()),
                *((f"token_buffer_{name}", help_) for name, help_ in _BUFFER_GAUGES.items()),
            )
        }

    def publish(self) -> None:
        """Bring all of them up to date."""
        counts = {f"token_cache_{name}": value for name, value in self._store.cache.stats().items()}
        counts |= {f"token_buffer_{name}": value for name, value in self._store.pool.stats().items()}
        for name, counter in self._counters.items():
            counter.inc(counts[name] - self._published.get(name, 0))
            self._published[name] = counts[name]
        for name, gauge in self._gauges.items():
            gauge.set(counts[name])
