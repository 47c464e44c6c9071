"""Int32 buffers for prompts, in size classes, from one bounded pool.

Not here: which conversation is in which buffer (`pipeline/prefixes.py`). No locks: one thread, the event
loop's.

**A view is the lease.** A prompt is a read-only memoryview of a buffer's beginning; whoever holds it (the
call to the engine, a transport that has not flushed) holds the buffer. Nothing has to be given back: a
bytearray of which any view is alive refuses to change its size, and the pool asks it by taking one byte off
and putting it back (0.08 us; 0.25 us when it refuses). So a view that is kept in a cycle of objects holds its
buffer until the garbage collector comes by. Checked on CPython 3.11: slices and `toreadonly()` count, and
so does what uvloop's transport has not sent; asyncio's own copies it.

**A view never changes.** Bytes are only written behind everything that was handed out while any view lives.

Memory is reserved when a size is first needed. When the pool is full, unused buffers of other sizes go
first, then conversations that are kept but not in use, the longest unused one first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

from pipeline.encoding import BYTES_PER_ID
from pipeline.errors import InvalidRequest

MIN_BUFFER_TOKENS: Final = 1024
# Buffers looked at in one call, 0.25 us each: with more than this many in use in front of an unused one the
# pool says that it is full, and finds the unused one a few calls later.
_MAX_LOOKS: Final = 256
_FEW_LOOKS: Final = 4  # at every call, so that what was used once comes back before more is reserved


class TokenBuffer:
    """Packed ids that grow to a fixed capacity. `num_bytes` is how many there are."""

    __slots__ = ("_handed_out", "data", "num_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        self.data = bytearray(capacity_bytes)
        self.num_bytes = 0
        self._handed_out = 0  # the longest view since the buffer was last unused

    def append(self, ids: bytes | memoryview) -> None:
        """Write packed ids behind the others. The caller has seen that they fit."""
        end = self.num_bytes + len(ids)
        assert end <= len(self.data)
        self.data[self.num_bytes : end] = ids
        self.num_bytes = end

    def view(self, num_bytes: int) -> memoryview:
        """The first so many bytes, read-only, without a copy."""
        assert num_bytes <= self.num_bytes
        if num_bytes > self._handed_out:
            self._handed_out = num_bytes
        return memoryview(self.data)[:num_bytes].toreadonly()

    def is_unused(self) -> bool:
        """Whether nobody holds a view."""
        try:
            last = self.data.pop()
        except BufferError:
            return False
        self.data.append(last)
        self._handed_out = 0
        return True

    def can_cut(self, num_bytes: int) -> bool:
        """Whether no view reaches beyond so many bytes."""
        return self._handed_out <= num_bytes or self.is_unused()

    def cut(self, num_bytes: int) -> None:
        """Drop what is behind; see `can_cut`."""
        self.num_bytes = num_bytes


class BufferPool:
    """Buffers of 1,024, 2,048, 4,096, … tokens, at most `max_bytes` in all.

    `reserved_bytes` is what all buffers take, `in_use_bytes` what those take that hold a prompt or are kept
    for one that continues it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.reserved_bytes = 0
        self.peak_bytes = 0  # most that was ever reserved
        self.copied_bytes = 0  # moved from one buffer to another: forks and growth
        self.appended_bytes = 0
        self.reused_tokens = 0  # that a prompt found in place
        self.forks = 0
        self._free: dict[int, list[TokenBuffer]] = {}  # by capacity in bytes
        self._free_bytes = 0
        self._lent: deque[TokenBuffer] = deque()  # free as soon as nobody holds a view
        # Kept for a continuation, the longest unused first, each with what makes its keeper forget it.
        self._kept: OrderedDict[TokenBuffer, Callable[[], None]] = OrderedDict()

    @property
    def in_use_bytes(self) -> int:
        return self.reserved_bytes - self._free_bytes

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_idle(self) -> int:
        """Kept buffers of which nobody holds a view. Looks at each, 0.1 to 0.25 us."""
        return sum(buffer.is_unused() for buffer in self._kept)

    def stats(self) -> dict[str, int]:
        """Counters and gauges, as `/metrics` names them after `headrace_token_buffer_`."""
        return {
            "bytes": self.in_use_bytes,
            "peak_bytes": self.peak_bytes,
            "copied_bytes": self.copied_bytes,
            "appended_bytes": self.appended_bytes,
            "reused_tokens": self.reused_tokens,
            "forks": self.forks,
        }

    def whole(self, ids: bytes) -> memoryview | None:
        """A prompt that shares nothing, in a buffer of its own. None: the pool is full, wait.

        Raises `InvalidRequest` for one that does not fit even into an empty pool.
        """
        buffer = self.acquire(len(ids))
        if buffer is None:
            return None
        self.lend(buffer)
        buffer.append(ids)
        self.appended_bytes += len(ids)
        return buffer.view(len(ids))

    def can_acquire(self, num_tokens: int) -> bool:
        """Whether a prompt of so many tokens would get a buffer now. Gives up what must go for it anyway."""
        return self._make_room(self._capacity(num_tokens * BYTES_PER_ID))

    def check_fit_together(self, prompts: Sequence[bytes]) -> None:
        """Raises `InvalidRequest` for prompts that do not fit even into an empty pool, all at once."""
        num_bytes = sum(self._capacity(len(ids)) for ids in prompts)
        if num_bytes > self.max_bytes:
            raise InvalidRequest(
                f"The request's {len(prompts)} prompts take buffers of {num_bytes} bytes; all token buffers "
                f"together may take {self.max_bytes} bytes."
            )

    def acquire(self, num_bytes: int) -> TokenBuffer | None:
        """An empty buffer for at least so many bytes, to be passed to `lend` or `keep` at once.

        Raises `InvalidRequest` for more than the pool's bound.
        """
        capacity = self._capacity(num_bytes)
        self._take_back(_FEW_LOOKS)
        if not self._make_room(capacity):
            return None
        free = self._free.get(capacity)
        if free:
            self._free_bytes -= capacity
            return free.pop()
        self.reserved_bytes += capacity
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        return TokenBuffer(capacity)

    def lend(self, buffer: TokenBuffer) -> None:
        """It is free as soon as nobody holds a view of it."""
        self._kept.pop(buffer, None)
        self._lent.append(buffer)

    def keep(self, buffer: TokenBuffer, forget: Callable[[], None]) -> None:
        """It stays, used or not, until `forget` is called because its room is needed."""
        self._kept[buffer] = forget

    def touch(self, buffer: TokenBuffer) -> None:
        """A kept buffer was used: it goes last."""
        self._kept.move_to_end(buffer)

    def give_up_oldest(self) -> None:
        """Forget the kept buffer that was not touched for longest, in use or not."""
        buffer, forget = self._kept.popitem(last=False)
        forget()
        self._lent.append(buffer)

    def _capacity(self, num_bytes: int) -> int:
        capacity = max(MIN_BUFFER_TOKENS * BYTES_PER_ID, 1 << (num_bytes - 1).bit_length())
        if capacity > self.max_bytes:
            raise InvalidRequest(
                f"The prompt has {num_bytes // BYTES_PER_ID} tokens and takes a buffer of {capacity} bytes; "
                f"all token buffers together may take {self.max_bytes} bytes."
            )
        return capacity

    def _make_room(self, capacity: int) -> bool:
        """Whether a buffer of this size can be had, after giving up what can be."""
        if self._has_room(capacity):
            return True
        self._take_back(_MAX_LOOKS)
        for _ in range(min(len(self._kept), _MAX_LOOKS)):
            if self._has_room(capacity):
                return True
            buffer = next(iter(self._kept))
            if buffer.is_unused():
                self._kept.pop(buffer)()
                self._free_again(buffer)
            else:
                self._kept.move_to_end(buffer)
        return self._has_room(capacity)

    def _has_room(self, capacity: int) -> bool:
        """Whether a buffer is free, or can be reserved once unused ones of other sizes are gone."""
        if self._free.get(capacity):
            return True
        excess = self.reserved_bytes + capacity - self.max_bytes
        if excess > self._free_bytes:
            return False
        for size in sorted(self._free, reverse=True):
            while excess > 0 and self._free[size]:
                self._free[size].pop()
                self._free_bytes -= size
                self.reserved_bytes -= size
                excess -= size
        return True

    def _take_back(self, num_looks: int) -> None:
        """Free the lent buffers that nobody holds any more."""
        for _ in range(min(num_looks, len(self._lent))):
            buffer = self._lent.popleft()
            if buffer.is_unused():
                self._free_again(buffer)
            else:
                self._lent.append(buffer)

    def _free_again(self, buffer: TokenBuffer) -> None:
        buffer.cut(0)
        capacity = len(buffer.data)
        self._free.setdefault(capacity, []).append(buffer)
        self._free_bytes += capacity
