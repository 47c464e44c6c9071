"""Texts that were scanned before, and what the rules made of them: each turn of a chat repeats the last one.

One object per set of rules, so that no result outlives them. It keeps the texts themselves, not digests:
exact, and a look costs 11 us for 50 kB where blake2b takes 60 (a request's strings are hashed once, by
Python). The memory is bounded in bytes.

Not here: what is scanned (`input_scan.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from filters.patterns import Patterns
from filters.scan import ScanResult

MAX_BYTES: Final = 64 << 20  # about 1,000 chats of 12k tokens
_ENTRY_BYTES: Final = 112  # of the dict
_HIT_BYTES: Final = 80
_UNKNOWN: Final = object()


class SeenTexts:
    """A memory of scans under `rules`, for one thread. Of a clean text it keeps the text alone.

    Two generations: what was not asked for while the younger one filled up is forgotten. A text above an
    eighth of `max_bytes` is not kept. `hits` and `misses` count texts.
    """

    def __init__(self, rules: Patterns, max_bytes: int = MAX_BYTES) -> None:
        self.rules = rules
        self._max_bytes = max_bytes
        self._young: dict[str, ScanResult | None] = {}  # None: nothing was found
        self._old: dict[str, ScanResult | None] = {}
        self._young_bytes = 0
        self._old_bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def num_bytes(self) -> int:
        return self._young_bytes + self._old_bytes

    def look_up(self, texts: Iterable[str], found: dict[str, ScanResult]) -> list[str]:
        """The texts that are unknown. What is known and not clean is added to `found`."""
        unknown = []
        young, num_texts = self._young, 0
        for text in texts:
            num_texts += 1
            result = young.get(text, _UNKNOWN)
            if result is _UNKNOWN:
                result = self._revive(text)
            if result is _UNKNOWN:
                unknown.append(text)
            elif result is not None:
                assert isinstance(result, ScanResult)
                found[text] = result
        self.misses += len(unknown)
        self.hits += num_texts - len(unknown)
        return unknown

    def add(self, text: str, result: ScanResult) -> None:
        """Remember what a scan found. A text that is blocked is not kept: its request ends here."""
        if not result.blocked:
            self._keep(text, result if result.num_hits else None)

    def _revive(self, text: str) -> object:
        """An old entry, young again."""
        result = self._old.pop(text, _UNKNOWN)
        if result is not _UNKNOWN:
            assert result is None or isinstance(result, ScanResult)
            self._old_bytes -= _size(text, result)
            self._keep(text, result)
        return result

    def _keep(self, text: str, result: ScanResult | None) -> None:
        size = _size(text, result)
        if size > self._max_bytes // 8 or text in self._young:
            return
        if self._young_bytes + size > self._max_bytes // 2:
            self._old, self._old_bytes = self._young, self._young_bytes
            self._young, self._young_bytes = {}, 0
        self._young[text] = result
        self._young_bytes += size


def _size(text: str, result: ScanResult | None) -> int:
    size = text.__sizeof__() + _ENTRY_BYTES
    if result is not None:
        size += (result.text or "").__sizeof__() + _HIT_BYTES * (1 + len(result.hits))
    return size
