"""What a worker could not send yet, merged per slot: a slow reader costs ids, not frames. No I/O.

Bounded by the streams themselves: one entry per running slot, and never more ids than its `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable

from backend.link import Delta, Extra


class Outbox:
    """Pending deltas of one connection, in the order in which their slots first had to wait."""

    __slots__ = ("_pending", "peak_ids")

    def __init__(self) -> None:
        self._pending: dict[int, Delta] = {}
        self.peak_ids = 0  # the longest single entry so far

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, deltas: Iterable[Delta]) -> None:
        """Keep these too, after what already waits. The lists in them are copied before they grow."""
        pending = self._pending
        for delta in deltas:
            waiting = pending.get(delta.slot)
            if waiting is None:
                pending[delta.slot] = _copy(delta)
            else:
                _merge(waiting, delta)
                self.peak_ids = max(self.peak_ids, len(waiting.ids))

    def drop(self, slot: int) -> None:
        """Forget what waits for a slot: it was aborted."""
        self._pending.pop(slot, None)

    def take_slot(self, slot: int) -> Delta | None:
        """All that waits for one slot, out of turn."""
        return self._pending.pop(slot, None)

    def take(self, max_weight: int) -> list[Delta]:
        """The next deltas, at most `max_weight` numbers in all; a longer entry is cut, its rest is next."""
        taken: list[Delta] = []
        for slot in list(self._pending):
            delta = self._pending[slot]
            width = _width(delta)
            if width * len(delta.ids) > max_weight:
                if not taken:
                    taken.append(_cut(delta, max(1, max_weight // width)))
                return taken
            max_weight -= width * len(delta.ids)
            taken.append(self._pending.pop(slot))
        return taken


def _copy(delta: Delta) -> Delta:
    return Delta(
        delta.slot, delta.generation, list(delta.ids), delta.finish, delta.stop, _copy_extra(delta.extra)
    )


def _copy_extra(extra: Extra | None) -> Extra | None:
    if extra is None:
        return None
    logprobs = None if extra.logprobs is None else list(extra.logprobs)
    return Extra(extra.cached_tokens, extra.queue_ms, extra.prefill_ms, extra.is_first, logprobs)


def _merge(waiting: Delta, delta: Delta) -> None:
    waiting.ids += delta.ids
    waiting.finish, waiting.stop = delta.finish, delta.stop
    if delta.extra is None:
        return
    if waiting.extra is None:
        waiting.extra = _copy_extra(delta.extra)
        return
    if delta.extra.logprobs is not None:
        waiting.extra.logprobs = [*(waiting.extra.logprobs or ()), *delta.extra.logprobs]


def _width(delta: Delta) -> int:
    """Numbers per id: the id itself, and with logprobs twice their count and the rank."""
    if delta.extra is None or not delta.extra.logprobs:
        return 1
    return 2 + 2 * max(len(ids) for ids, _, _ in delta.extra.logprobs)


def _cut(delta: Delta, num_ids: int) -> Delta:
    """Split off the first ids with what is theirs: logprobs, the first token's facts, not the finish."""
    head = Delta(delta.slot, delta.generation, delta.ids[:num_ids], None, None, delta.extra)
    del delta.ids[:num_ids]
    if delta.extra is not None:
        logprobs = delta.extra.logprobs
        head.extra = _copy_extra(delta.extra)
        delta.extra = None
        if logprobs is not None and head.extra is not None:
            head.extra.logprobs = logprobs[:num_ids]
            delta.extra = Extra(logprobs=logprobs[num_ids:])
    return head
