"""Segment text -> token ids, over all models, within one budget of bytes.

Segments of a rendered template encode independently of what precedes them, so the text alone is the key: a
chat of n turns stores each segment once, and dropped turns cost nothing. Keys are whole strings, no hashes.

Not here: what a segment is (`pipeline/rendering.py`), who encodes (`gateway/encoders.py`), where ids are put
together (`pipeline/prefixes.py`). No locks: all of it lives on one thread, the event loop's.

**Which entries go.** S3-FIFO (Yang et al., SOSP 2023) counted in bytes: new entries enter a small queue of a
tenth of the budget. Who is used there moves to the main queue when its turn comes; who is not, leaves, and
only a hash of its key is remembered: coming back soon, it enters the main queue. The main queue goes round:
each lap costs an entry one of at most three uses. So a flood of one-off prompts flows through the small
queue and never touches what is hot, a hit only counts up to three (LRU would move a link), and nothing is
sorted. Under a flood of one-off prompts (`tests/pipeline/test_token_cache.py`) 99 % of the tokens of system
prompts are found, with LRU 87 %, with FIFO 73 %; of a growing chat 100 %, 100 % and 97 %.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import count
from typing import Final

import msgspec

from pipeline.encoding import BYTES_PER_ID

SMALL_SHARE: Final = 10  # the small queue gets a tenth: the paper's value, flat from 5 to 20 %
PINNED_SHARE: Final = 4  # pinned entries get a quarter at most
ENTRY_SHARE: Final = 16  # one entry may take a sixteenth: a longer one would push out too much at once
MAX_USES: Final = 3
# What an entry costs besides its text and ids, by tracemalloc over 200,000 entries: the Entry, its four
# integers, the slot in the dictionary and in the queue, and its share of the remembered hashes.
ENTRY_BYTES: Final = 440
# Looks at the main queue in one eviction, 0.1 us each. Every look is paid for by an earlier hit, but a queue
# in which all is hot must not be walked at once.
_MAX_LOOKS: Final = 1000
_MIN_REMEMBERED: Final = 1024

DIGEST_MASK: Final = (1 << 40) - 1
_SMALL, _MAIN, _PINNED, _GONE = range(4)
_numbers = count(1)


class Entry(msgspec.Struct, gc=False, eq=False):
    """One segment's ids. `uses` and `place` are the cache's own.

    It holds no container, so that it cannot be part of a cycle and the garbage collector may pass it by: a
    full collection over 200,000 ordinary objects stops the event loop for 20 ms.
    """

    number: int  # unique in the process, never used again
    ids: bytes  # int32 little-endian
    num_tokens: int
    segment: str
    fingerprint: str
    digest: int  # 40 bits of the hash of model and segment: the sum of 8 million fits into 64 bits
    num_bytes: int
    uses: int = 0
    place: int = _GONE

    @property
    def is_kept(self) -> bool:
        """Whether the next `get` would find it."""
        return self.place != _GONE


class ModelTokens:
    """The segments of one model. Made by `TokenCache.of`."""

    __slots__ = ("_cache", "entries", "fingerprint", "hits", "misses", "tokens_saved")

    def __init__(self, cache: TokenCache, fingerprint: str) -> None:
        self._cache = cache
        self.fingerprint = fingerprint
        self.entries: dict[str, Entry] = {}
        self.hits = 0
        self.misses = 0
        self.tokens_saved = 0

    def get(self, segment: str) -> Entry | None:
        """The entry of this very text, or None. Counts as a use."""
        entry = self.entries.get(segment)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self.tokens_saved += entry.num_tokens
        if entry.uses < MAX_USES:
            entry.uses += 1
        return entry

    def get_all(self, segments: Sequence[str]) -> list[Entry | None]:
        """`get` of each, in half the time."""
        entries = list(map(self.entries.get, segments))
        num_found = 0
        for entry in entries:
            if entry is not None:
                num_found += 1
                self.tokens_saved += entry.num_tokens
                if entry.uses < MAX_USES:
                    entry.uses += 1
        self.hits += num_found
        self.misses += len(entries) - num_found
        return entries

    def put(self, segment: str, ids: bytes, pinned: bool = False) -> Entry:
        """Keep packed ids; the entry that is already there wins.

        `pinned` ones are never evicted, as far as their share goes. An entry that is too large, or any if the
        cache is off, is returned all the same but not kept. Raises `ValueError` for ids that end within one.
        """
        entry = self.entries.get(segment)
        if entry is None:
            entry = self._cache.add(self, segment, ids)
        if pinned:
            self._cache.pin(entry)
        return entry


class TokenCache:
    """Segments of all models. `max_bytes` 0: nothing is kept. `num_bytes`: texts, ids and `ENTRY_BYTES`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.pinned_bytes = 0
        self.evictions = 0
        self._models: dict[str, ModelTokens] = {}
        self._small: deque[Entry] = deque()
        self._main: deque[Entry] = deque()
        self._small_bytes = 0
        self._remembered: OrderedDict[int, None] = OrderedDict()  # hashes of keys that left the small queue

    def of(self, fingerprint: str) -> ModelTokens:
        """The segments of the model with this fingerprint of tokenizer and template."""
        tokens = self._models.get(fingerprint)
        if tokens is None:
            tokens = self._models[fingerprint] = ModelTokens(self, fingerprint)
        return tokens

    def forget(self, fingerprint: str) -> None:
        """Drop all of a model, pinned ones too: it is not served any more."""
        tokens = self._models.get(fingerprint)
        for entry in list(tokens.entries.values()) if tokens is not None else ():
            self._remove(entry)
        self._small = deque(entry for entry in self._small if entry.place == _SMALL)
        self._main = deque(entry for entry in self._main if entry.place == _MAIN)

    @property
    def hits(self) -> int:
        return sum(tokens.hits for tokens in self._models.values())

    @property
    def misses(self) -> int:
        return sum(tokens.misses for tokens in self._models.values())

    @property
    def tokens_saved(self) -> int:
        return sum(tokens.tokens_saved for tokens in self._models.values())

    @property
    def num_entries(self) -> int:
        return sum(len(tokens.entries) for tokens in self._models.values())

    def stats(self) -> dict[str, int]:
        """Counters and gauges, as `/metrics` names them after `headrace_token_cache_`."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "saved_tokens": self.tokens_saved,
            "bytes": self.num_bytes,
            "entries": self.num_entries,
            "evictions": self.evictions,
        }

    def add(self, tokens: ModelTokens, segment: str, ids: bytes) -> Entry:
        """A new entry, kept if it may be. For `ModelTokens.put`."""
        if len(ids) % BYTES_PER_ID:
            raise ValueError(f"packed ids have {len(ids)} bytes, which is no multiple of {BYTES_PER_ID}")
        num_bytes = sys.getsizeof(segment) + sys.getsizeof(ids) + ENTRY_BYTES
        fingerprint, num_tokens = tokens.fingerprint, len(ids) // BYTES_PER_ID
        digest = hash((fingerprint, segment)) & DIGEST_MASK
        entry = Entry(next(_numbers), ids, num_tokens, segment, fingerprint, digest, num_bytes)
        if num_bytes > self.max_bytes // ENTRY_SHARE:
            return entry
        tokens.entries[segment] = entry
        self.num_bytes += num_bytes
        if self._remembered.pop(digest, entry) is None:
            self._to_main(entry)
        else:
            entry.place = _SMALL
            self._small.append(entry)
            self._small_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            self._evict()
        return entry

    def pin(self, entry: Entry) -> None:
        """Never evict it, if the pinned share has room. For `ModelTokens.put`."""
        if entry.place in (_GONE, _PINNED):
            return
        if self.pinned_bytes + entry.num_bytes <= self.max_bytes // PINNED_SHARE:
            self._leave_small(entry)
            entry.place = _PINNED  # its queue lets it go when its turn comes
            self.pinned_bytes += entry.num_bytes

    def _evict(self) -> None:
        """One step: the head of a queue leaves it, or goes round."""
        if self._small and (self._small_bytes * SMALL_SHARE > self.max_bytes or not self._main):
            self._pass_small()
        else:
            self._pass_main()

    def _pass_small(self) -> None:
        entry = self._small.popleft()
        if entry.place != _SMALL:
            return
        if entry.uses:
            self._leave_small(entry)
            entry.uses -= 1
            self._to_main(entry)
            return
        self._remove(entry)
        self.evictions += 1
        self._remembered[entry.digest] = None  # of two with one digest one is let in too soon: no harm
        while len(self._remembered) > max(len(self._main), _MIN_REMEMBERED):
            self._remembered.popitem(last=False)

    def _pass_main(self) -> None:
        for looks in range(_MAX_LOOKS):
            entry = self._main.popleft()
            if entry.place != _MAIN:
                return
            if not entry.uses or looks == _MAX_LOOKS - 1:
                self._remove(entry)
                self.evictions += 1
                return
            entry.uses -= 1
            self._main.append(entry)

    def _to_main(self, entry: Entry) -> None:
        entry.place = _MAIN
        self._main.append(entry)

    def _leave_small(self, entry: Entry) -> None:
        if entry.place == _SMALL:
            self._small_bytes -= entry.num_bytes

    def _remove(self, entry: Entry) -> None:
        """Out of the dictionary and the sums; a queue that still holds it will pass over it."""
        self._leave_small(entry)
        if entry.place == _PINNED:
            self.pinned_bytes -= entry.num_bytes
        entry.place = _GONE
        self.num_bytes -= entry.num_bytes
        del self._models[entry.fingerprint].entries[entry.segment]
