"""One budget for all models, uses over recency, exact keys."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator

import pytest

from pipeline.encoding import pack_ids
from pipeline.token_cache import ENTRY_BYTES, ENTRY_SHARE, PINNED_SHARE, ModelTokens, TokenCache

ROOMY = 1 << 20


def ids_of(num_tokens: int, first: int = 0) -> bytes:
    return pack_ids(range(first, first + num_tokens))


def size_of(segment: str, ids: bytes) -> int:
    return sys.getsizeof(segment) + sys.getsizeof(ids) + ENTRY_BYTES


def test_put_then_get_gives_the_same_entry() -> None:
    tokens = TokenCache(ROOMY).of("model")
    entry = tokens.put("<|im_start|>user\nHi", ids_of(3))
    assert tokens.get("<|im_start|>user\nHi") is entry
    assert (entry.ids, entry.num_tokens, entry.is_kept) == (ids_of(3), 3, True)
    assert tokens.get("<|im_start|>user\nHi ") is None


def test_first_entry_of_a_segment_wins() -> None:
    tokens = TokenCache(ROOMY).of("model")
    entry = tokens.put("a", ids_of(1))
    assert tokens.put("a", ids_of(1)) is entry


def test_models_do_not_share_entries_but_the_budget() -> None:
    cache = TokenCache(ROOMY)
    one, two = cache.of("one"), cache.of("two")
    assert cache.of("one") is one
    first = one.put("a", ids_of(1))
    assert two.get("a") is None
    second = two.put("a", ids_of(2))
    assert one.get("a") is first
    assert second.number != first.number
    assert cache.num_bytes == size_of("a", ids_of(1)) + size_of("a", ids_of(2))
    assert cache.num_entries == 2


def test_numbers_are_never_used_again() -> None:
    tokens = TokenCache(ROOMY).of("model")
    owner: dict[int, str] = {}
    for index in range(10_000):
        segment = f"{index % 5000}"  # far more than fit: most are put twice
        entry = tokens.get(segment) or tokens.put(segment, ids_of(100))
        assert owner.setdefault(entry.number, segment) == segment
    assert len(owner) > 9000


def test_counters_count() -> None:
    cache = TokenCache(ROOMY)
    tokens = cache.of("model")
    tokens.put("a", ids_of(5))
    for segment in ("a", "b", "a"):
        tokens.get(segment)
    size = size_of("a", ids_of(5))
    expected = {"hits": 2, "misses": 1, "saved_tokens": 10, "bytes": size, "entries": 1, "evictions": 0}
    assert cache.stats() == expected


def test_ids_that_end_within_an_id_are_refused() -> None:
    cache = TokenCache(ROOMY)
    with pytest.raises(ValueError, match="5 bytes"):
        cache.of("model").put("a", b"12345")
    assert cache.num_entries == 0


def test_cache_that_is_off_keeps_nothing() -> None:
    cache = TokenCache(0)
    tokens = cache.of("model")
    entry = tokens.put("a", ids_of(1), pinned=True)
    assert (entry.ids, entry.is_kept) == (ids_of(1), False)
    assert tokens.get("a") is None
    assert (cache.num_bytes, cache.num_entries, cache.pinned_bytes) == (0, 0, 0)


def test_too_large_entry_is_not_kept_and_pushes_nothing_out() -> None:
    cache = TokenCache(ROOMY)
    tokens = cache.of("model")
    tokens.put("small", ids_of(1))
    large = tokens.put("x" * (ROOMY // ENTRY_SHARE), ids_of(1))
    assert not large.is_kept
    assert tokens.get("small") is not None
    assert cache.num_entries == 1


def test_pinned_entries_outlive_a_flood() -> None:
    cache = TokenCache(ROOMY)
    tokens = cache.of("model")
    pinned = tokens.put("static", ids_of(100), pinned=True)
    normal = tokens.put("other", ids_of(100))
    assert tokens.put("other", ids_of(100), pinned=True) is normal  # pinned later
    for index in range(5000):
        tokens.put(f"one-off {index}", ids_of(200))
    assert tokens.get("static") is pinned
    assert tokens.get("other") is normal
    assert cache.num_bytes <= ROOMY


def test_pinned_share_is_bounded() -> None:
    cache = TokenCache(ROOMY)
    tokens = cache.of("model")
    entries = [tokens.put(f"static {index}", ids_of(1000), pinned=True) for index in range(300)]
    assert 0 < cache.pinned_bytes <= ROOMY // PINNED_SHARE
    for index in range(5000):
        tokens.put(f"one-off {index}", ids_of(200))
    assert entries[0].is_kept
    assert not entries[-1].is_kept
    assert cache.num_bytes <= ROOMY


def test_forget_drops_one_model_with_its_pinned_entries() -> None:
    cache = TokenCache(ROOMY)
    one, two = cache.of("one"), cache.of("two")
    one.put("static", ids_of(9), pinned=True)
    one.put("a", ids_of(9))
    kept = two.put("a", ids_of(9))
    cache.forget("one")
    cache.forget("unknown")
    assert (one.get("static"), one.get("a"), two.get("a")) == (None, None, kept)
    assert (cache.pinned_bytes, cache.num_bytes) == (0, kept.num_bytes)


def test_used_entry_outlives_a_flood_and_a_dead_one_leaves_at_last() -> None:
    cache = TokenCache(ROOMY)
    tokens = cache.of("model")
    for name in ("hot", "dead"):
        tokens.put(name, ids_of(10))
        tokens.get(name)
    for index in range(20_000):
        segment = f"twice {index}"
        tokens.put(segment, ids_of(100))
        tokens.get(segment)  # so that it reaches the main queue and pushes there
        if index % 100 == 0:
            assert tokens.get("hot") is not None
    assert tokens.get("dead") is None


def flood(tokens: ModelTokens, name: str, num_bytes: int, num_uses: int = 0) -> None:
    """Put so many bytes of new segments."""
    while num_bytes > 0:
        segment = f"{name} {num_bytes}"
        num_bytes -= tokens.put(segment, ids_of(200)).num_bytes
        for _ in range(num_uses):
            tokens.get(segment)


def test_entry_that_comes_back_soon_is_not_on_probation_again() -> None:
    tokens = TokenCache(ROOMY).of("model")
    flood(tokens, "fill", 2 * ROOMY, num_uses=1)  # now the main queue has its nine tenths
    tokens.put("back", ids_of(10))
    flood(tokens, "a", ROOMY // 4)
    assert tokens.get("back") is None  # it went through the small queue unused
    tokens.put("back", ids_of(10))
    flood(tokens, "b", ROOMY // 2)
    assert tokens.get("back") is not None


def test_sums_stay_exact_under_random_use() -> None:
    rng = random.Random(3)
    cache = TokenCache(1 << 17)
    models = [cache.of(str(index)) for index in range(3)]
    for _ in range(20_000):
        tokens = rng.choice(models)
        segment = str(int(rng.paretovariate(0.3)) % 3000)
        ids = ids_of(len(segment), int(segment))
        entry = tokens.get(segment) or tokens.put(segment, ids, pinned=rng.random() < 0.01)
        assert entry.ids == ids
        assert cache.num_bytes <= cache.max_bytes
    kept = [entry for tokens in models for entry in tokens.entries.values()]
    assert cache.num_bytes == sum(entry.num_bytes for entry in kept)
    assert cache.num_entries == len(kept)
    assert cache.evictions > 1000


def test_num_bytes_is_what_the_memory_takes() -> None:
    rng = random.Random(5)
    tracemalloc.start()
    try:
        cache = TokenCache(4 << 20)
        tokens = cache.of("model")
        for index in range(10_000):
            segment = f"{index} " * rng.randint(2, 60)
            tokens.put(segment, rng.randbytes(4 * rng.randint(10, 100)))
            if index % 2:
                tokens.get(segment)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache.evictions > 1000
    assert 0.8 * cache.num_bytes < taken < 1.1 * cache.num_bytes


# -- against LRU and FIFO ------------------------------------------------------------------------------------


class Plain:
    """LRU, or FIFO, counted in the same bytes."""

    def __init__(self, max_bytes: int, is_lru: bool) -> None:
        self._max_bytes = max_bytes
        self._is_lru = is_lru
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._num_bytes = 0

    def use(self, segment: str, ids: bytes) -> bool:
        if segment in self._sizes:
            if self._is_lru:
                self._sizes.move_to_end(segment)
            return True
        self._sizes[segment] = size_of(segment, ids)
        self._num_bytes += self._sizes[segment]
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._sizes.popitem(last=False)[1]
        return False


class Ours:
    def __init__(self, max_bytes: int) -> None:
        self._tokens = TokenCache(max_bytes).of("model")

    def use(self, segment: str, ids: bytes) -> bool:
        if self._tokens.get(segment) is not None:
            return True
        self._tokens.put(segment, ids)
        return False


def mixed_load(rng: random.Random, num_requests: int) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """(kind, segments with their tokens): 20 system prompts by Zipf, one chat that grows, long one-offs."""
    chat: list[tuple[str, int]] = []
    for index in range(num_requests):
        if index % 10 == 9:  # the chat's next turn: a tenth of the load
            chat = [*chat, (f"user {index} " * 20, 60), (f"assistant {index} " * 60, 200)]
            yield "chat", chat[:-1]
            if len(chat) > 40:
                chat = []
        elif index % 10 in (3, 6):
            prompt = min(int(rng.paretovariate(0.7)), 20)
            yield "system", [(f"system {prompt} " * 500, 1500), (f"question {index}", 12)]
        else:
            yield "one-off", [(f"document {index} " * 800, 2400)]


def hit_rates(cache: Plain | Ours, num_requests: int) -> dict[str, float]:
    """Share of the reusable tokens that were found, by kind of request."""
    found: dict[str, int] = {}
    asked: dict[str, int] = {}
    seen: set[str] = set()
    for kind, segments in mixed_load(random.Random(11), num_requests):
        for segment, num_tokens in segments:
            is_hit = cache.use(segment, b"\0\0\0\0" * num_tokens)
            if segment in seen:
                asked[kind] = asked.get(kind, 0) + num_tokens
                found[kind] = found.get(kind, 0) + num_tokens * is_hit
            seen.add(segment)
    return {kind: found[kind] / asked[kind] for kind in asked}


def test_hot_prompts_survive_a_flood_better_than_with_lru_or_fifo() -> None:
    budget = 2 << 20  # about 100 of the one-off prompts; all system prompts take an eighth of it
    ours = hit_rates(Ours(budget), 6000)
    lru = hit_rates(Plain(budget, is_lru=True), 6000)
    fifo = hit_rates(Plain(budget, is_lru=False), 6000)
    print(f"ours {ours}\nLRU  {lru}\nFIFO {fifo}")
    assert ours["system"] > 0.95
    assert ours["system"] > lru["system"] + 0.1
    assert ours["system"] > fifo["system"] + 0.2
    assert ours["chat"] > 0.95
    assert ours["chat"] > fifo["chat"]


def test_getting_all_at_once_is_getting_one_after_the_other() -> None:
    one, all_ = (TokenCache(1 << 20).of("f") for _ in range(2))
    segments = ["a", "b", "c", "b", "a", "d"]
    for tokens in (one, all_):
        for number, segment in enumerate("abc"):
            tokens.put(segment, pack_ids(range(number + 1)))
    for _ in range(3):
        found = [entry.ids if entry else None for entry in map(one.get, segments)]
        assert [entry.ids if entry else None for entry in all_.get_all(segments)] == found
        for name in ("hits", "misses", "tokens_saved"):
            assert getattr(one, name) == getattr(all_, name)
        assert [one.entries[each].uses for each in "abc"] == [all_.entries[each].uses for each in "abc"]
