"""What the token cache, the buffers and the encoders count is what a scrape shows."""

from __future__ import annotations

import os

from gateway.encoders import Encoders
from gateway.metrics import Metrics
from gateway.redis_tokens import RedisTokens
from gateway.shared_tokens import SharedTokens, create
from gateway.token_metrics import TokenMetrics
from pipeline.encoding import pack_ids
from pipeline.token_buffer import BufferPool
from pipeline.token_cache import TokenCache
from pipeline.tokenizing import TokenStore


def test_counters_show_what_is_new_and_gauges_what_is() -> None:
    metrics, encoders = Metrics(), Encoders()
    store = TokenStore(TokenCache(1 << 20), BufferPool(1 << 20))
    published = TokenMetrics(metrics, store, encoders)
    cache, prefixes = store.cache, store.prefixes
    tokens = cache.of("model")
    entries = [tokens.put("a", pack_ids(range(10))), tokens.put("b", pack_ids(range(5)))]
    tokens.get("a")
    tokens.get("c")
    held = [prefixes.assemble("model", entries), prefixes.assemble("model", entries[:1])]
    held.append(prefixes.assemble("model", [entries[0], tokens.put("c", pack_ids([1]))]))
    encoders.num_texts, encoders.num_batches, encoders.num_queue_chars = 3, 2, 77
    for _ in range(2):  # a second time: nothing is counted twice
        published.publish()

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"headrace_{name}")

    assert value("token_cache_hits_total") == 1
    assert value("token_cache_misses_total") == 1
    assert value("token_cache_saved_tokens_total") == 10
    assert value("token_cache_evictions_total") == 0
    assert value("token_cache_entries") == 3
    assert value("token_cache_bytes") == cache.num_bytes
    assert value("token_buffer_bytes") == 8192
    assert value("token_buffer_peak_bytes") == 8192
    assert value("token_buffer_copied_bytes_total") == 40
    assert value("token_buffer_appended_bytes_total") == 64
    assert value("token_buffer_reused_tokens_total") == 20
    assert value("token_buffer_forks_total") == 1
    assert (value("encoded_texts_total"), value("encoded_batches_total")) == (3, 2)
    assert value("encode_queue_characters") == 77
    assert value("token_cache_redis_hits_total") == 0
    tokens.get("a")
    published.publish()
    assert value("token_cache_hits_total") == 2
    encoders.close()


def test_second_levels_are_shown_where_there_are_some() -> None:
    metrics = Metrics()
    fd = create(1 << 20)
    near, far, encoders = SharedTokens(fd), RedisTokens("redis://127.0.0.1"), Encoders()
    store = TokenStore(TokenCache(0), BufferPool(1 << 20))
    published = TokenMetrics(metrics, store, encoders, near, far)
    near.hits, near.misses, far.hits, far.misses, far.num_late, far.num_errors = 1, 2, 3, 4, 5, 6
    published.publish()
    samples = ("shared_hits", "shared_misses", "redis_hits", "redis_misses", "redis_failures")
    values = [metrics.registry.get_sample_value(f"headrace_token_cache_{name}_total") for name in samples]
    assert values == [1, 2, 3, 4, 11]
    near.close()
    os.close(fd)
    encoders.close()


def test_store_alone_is_enough() -> None:
    metrics = Metrics()
    TokenMetrics(metrics, TokenStore(TokenCache(0), BufferPool(1 << 20))).publish()
    assert metrics.registry.get_sample_value("headrace_token_cache_misses_total") == 0
