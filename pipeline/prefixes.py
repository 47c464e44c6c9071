"""Which token buffer holds the beginning of which prompt, so that only the new ids are written.

A prompt is a row of cache entries. For each kept buffer a *line* says which entries it holds and where each
ends; an index leads from every beginning of a line to that line, by the sum of the entries' digests. A sum
only points: the entries' numbers are compared. It is all arrays of machine integers instead of a tree of
objects: a boundary costs 150 bytes, the garbage collector has nothing to walk, and a prompt of 200 entries is
looked up in 20 us, where a hash over the row takes 70.

What happens to a prompt, by the longest beginning that some buffer holds:

* It ends at the tip of the buffer: the rest is appended in place; views handed out before end before it.
* Ids follow it (the last turn's generation prompt, reasoning that the template drops from older turns):
  the buffer is **cut back** to it and appended, if no living view reaches beyond and what is cut is not
  longer than what stays.
* Otherwise it is **forked**: the beginning is copied to a new buffer, and both go on apart.
* The buffer is too small: the beginning moves to one of the next size; the small one is free once unseen.

The rule on lengths bounds the cost when a longer prompt is cut off and does come back: its tail is
written again from the token cache, at most as many bytes as the fork would have copied at once. So users
who share a system prompt and meet rarely take turns in one buffer, those who overlap get their own, and a
long conversation is never given up for the system prompt it begins with.

Not here: where entries come from (`pipeline/token_cache.py`), memory (`pipeline/token_buffer.py`). No locks:
one thread, the event loop's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Final

from pipeline.encoding import BYTES_PER_ID
from pipeline.token_buffer import BufferPool, TokenBuffer
from pipeline.token_cache import DIGEST_MASK, Entry

MAX_BOUNDARIES: Final = 1 << 18  # 40 MB; 256 MiB of buffers hold as many with 256 tokens each


class _Line:
    """What a kept buffer holds: entry numbers, where each ends (bytes), the sum of digests up to each."""

    __slots__ = ("buffer", "ends", "numbers", "sums")

    def __init__(self, buffer: TokenBuffer) -> None:
        self.buffer = buffer
        self.numbers = array("q")
        self.ends = array("q")
        self.sums = array("q")


class Prefixes:
    """The kept prompts of all models, in the buffers of one pool."""

    def __init__(self, pool: BufferPool, max_boundaries: int = MAX_BOUNDARIES) -> None:
        self._pool = pool
        self._max_boundaries = max_boundaries
        self._index: dict[int, _Line] = {}
        self.num_boundaries = 0

    def assemble(self, fingerprint: str, entries: Sequence[Entry]) -> memoryview | None:
        """The ids of all entries, one after the other: a read-only view that never changes.

        `fingerprint`: the model's, as for `TokenCache.of`. None: the pool is full; wait for
        `pool.can_acquire` and call again. Raises `InvalidRequest` for a prompt larger than the pool.
        """
        numbers = array("q", [entry.number for entry in entries])
        start_sum = hash(fingerprint) & DIGEST_MASK
        sums = list(accumulate([entry.digest for entry in entries], initial=start_sum))
        line, depth = self._longest(numbers, sums)
        start = line.ends[depth - 1] if line is not None else 0
        tail = entries[depth:]
        num_bytes = start + sum([len(entry.ids) for entry in tail])
        if line is not None and not tail:
            self._pool.touch(line.buffer)
        else:
            line = self._place(line, depth, num_bytes)
            if line is None:
                return None
            self._append(line, tail, numbers, sums)
        self._pool.reused_tokens += start // BYTES_PER_ID
        return line.buffer.view(num_bytes)

    def _longest(self, numbers: array[int], sums: list[int]) -> tuple[_Line | None, int]:
        """The line that holds the longest beginning, and how many entries that is."""
        find = self._index.get
        for depth in range(len(numbers), 0, -1):
            line = find(sums[depth])
            if line is not None and line.numbers[:depth] == numbers[:depth]:
                return line, depth
        return None, 0

    def _place(self, line: _Line | None, depth: int, num_bytes: int) -> _Line | None:
        """A line that ends after `depth` entries, with room for `num_bytes`. None: the pool is full."""
        if line is None:
            buffer = self._pool.acquire(num_bytes)
            return self._keep(_Line(buffer)) if buffer is not None else None
        old = line.buffer
        start = line.ends[depth - 1]
        is_ours = self._cut(line, depth, start)
        if is_ours and num_bytes <= len(old.data):
            self._pool.touch(old)
            return line
        beginning = old.view(start)  # held: making room must not give up this one
        buffer = self._pool.acquire(num_bytes)
        if buffer is None:
            return None
        buffer.append(beginning)
        beginning.release()
        self._pool.copied_bytes += start
        if is_ours:
            self._pool.lend(old)
            line.buffer = buffer
            return self._keep(line)
        self._pool.forks += 1
        return self._keep(self._fork(line, depth, buffer))

    def _cut(self, line: _Line, depth: int, start: int) -> bool:
        """Make the line end after `depth` entries, if that is allowed."""
        num_behind = line.buffer.num_bytes - start
        if num_behind > start or not line.buffer.can_cut(start):
            return False
        self._unregister(line, depth)
        line.buffer.cut(start)
        return True

    def _fork(self, line: _Line, depth: int, buffer: TokenBuffer) -> _Line:
        """A line with the same beginning in another buffer. The index goes on pointing to the first."""
        fork = _Line(buffer)
        fork.numbers, fork.ends, fork.sums = line.numbers[:depth], line.ends[:depth], line.sums[:depth]
        self.num_boundaries += depth
        for key in fork.sums:
            self._index.setdefault(key, fork)
        return fork

    def _append(self, line: _Line, tail: Sequence[Entry], numbers: array[int], sums: list[int]) -> None:
        """Write the ids of the tail. Entries after one that is not kept will not come again: no boundary."""
        buffer = line.buffer
        depth = len(line.numbers)
        start = buffer.num_bytes
        ids = b"".join([entry.ids for entry in tail])
        buffer.append(ids)
        self._pool.appended_bytes += len(ids)
        num_kept = next((index for index, entry in enumerate(tail) if not entry.is_kept), len(tail))
        if not depth + num_kept:
            return self._pool.lend(buffer)
        end = depth + num_kept
        line.numbers.extend(numbers[depth:end])
        line.sums.extend(sums[depth + 1 : end + 1])
        ends = accumulate([len(entry.ids) for entry in tail[:num_kept]], initial=start)
        next(ends)
        line.ends.extend(ends)
        for key in sums[depth + 1 : end + 1]:
            self._index[key] = line
        self.num_boundaries += num_kept
        while self.num_boundaries > self._max_boundaries and self._pool.num_kept > 1:
            self._pool.give_up_oldest()
        return None

    def _keep(self, line: _Line) -> _Line:
        self._pool.keep(line.buffer, partial(self._unregister, line, 0))
        return line

    def _unregister(self, line: _Line, depth: int) -> None:
        """Forget all boundaries but the first `depth`."""
        if depth == len(line.sums):
            return
        for key in line.sums[depth:]:
            if self._index.get(key) is line:
                del self._index[key]
        self.num_boundaries -= len(line.sums) - depth
        del line.numbers[depth:], line.ends[depth:], line.sums[depth:]
