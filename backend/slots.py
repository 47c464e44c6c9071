"""The gateway's slots on one connection: who uses which number, and what is still to come for them. No I/O.

    free -> live -> (finish, error, lost) -> free
            live -> aborting -> (closed, finish, error, lost) -> free

A generation is never used twice on a connection, so an entry that carries one can reach one stream only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from backend.link import MAX_SLOTS
from pipeline.errors import QueueFull
from pipeline.ports import Sink
from pipeline.values import EngineCall

FREE, LIVE, ABORTING = "free", "live", "aborting"
LIFECYCLE: Final[dict[str, dict[str, str]]] = {
    FREE: {"submit": LIVE},
    LIVE: {"abort": ABORTING, "finish": FREE, "error": FREE, "closed": FREE, "lost": FREE, "unsent": FREE},
    ABORTING: {"finish": FREE, "error": FREE, "closed": FREE, "lost": FREE},
}
_NOBODY: Final = -1  # no entry carries a negative generation


def _no_tokens(*_: object) -> None:
    raise AssertionError("tokens for a slot without a stream")


class Slot:
    """One slot number and the stream that uses it now. `live_generation` is -1 unless tokens are welcome."""

    __slots__ = (
        "generation",
        "is_waiting",
        "live_generation",
        "number",
        "output_tokens",
        "prompt_tokens",
        "sink",
        "state",
        "tokens",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.generation = _NOBODY
        self.live_generation = _NOBODY
        self.state = FREE
        self.sink: Sink | None = None
        self.tokens: Callable[..., None] = _no_tokens
        self.prompt_tokens = 0
        self.output_tokens = 0  # at most
        self.is_waiting = False  # for its first token


class SlotTable:
    """Allocation, and the sums that routing and the queue bounds need."""

    def __init__(self) -> None:
        self.table: list[Slot] = []
        self.num_requests = 0  # live ones
        self.outstanding_tokens = 0  # prompts not prefilled and outputs not finished
        self.num_waiting = 0  # live requests without a first token
        self.waiting_tokens = 0  # their prompts
        self.num_dropped = 0  # entries for a generation that nobody uses
        self._free: list[Slot] = []
        self._next_generation = 1

    def allocate(self, call: EngineCall, sink: Sink, is_background: bool = False) -> Slot:
        """A slot for a new stream. Raises `QueueFull` when every number is taken.

        A background one is a live request, but neither waits nor weighs in the sums: no user is refused or
        sent elsewhere because of it.
        """
        slot = self._free.pop() if self._free else self._grow()
        slot.state = LIFECYCLE[slot.state]["submit"]
        slot.generation = slot.live_generation = self._next_generation
        self._next_generation += 1
        slot.sink, slot.tokens = sink, sink.tokens
        self.num_requests += 1
        if is_background:
            slot.prompt_tokens = slot.output_tokens = 0
            slot.is_waiting = False
            return slot
        slot.prompt_tokens, slot.output_tokens = call.prompt.num_tokens, call.max_tokens
        slot.is_waiting = True
        self.num_waiting += 1
        self.waiting_tokens += slot.prompt_tokens
        self.outstanding_tokens += slot.prompt_tokens + slot.output_tokens
        return slot

    def _grow(self) -> Slot:
        if len(self.table) >= MAX_SLOTS:
            raise QueueFull(f"all {MAX_SLOTS} slots of a worker's connection are in use")
        slot = Slot(len(self.table))
        self.table.append(slot)
        return slot

    def first_token(self, slot: Slot) -> None:
        """Its prompt is done with."""
        if slot.is_waiting:
            slot.is_waiting = False
            self.num_waiting -= 1
            self.waiting_tokens -= slot.prompt_tokens
            self.outstanding_tokens -= slot.prompt_tokens

    def abort(self, slot: Slot) -> None:
        """Nothing more is delivered; the number stays taken until the worker's last word."""
        slot.state = LIFECYCLE[slot.state]["abort"]
        self._detach(slot)

    def release(self, slot: Slot, event: str) -> None:
        """The worker's last word has come: the number is free."""
        was_live = slot.state is LIVE
        slot.state = LIFECYCLE[slot.state][event]
        if was_live:
            self._detach(slot)
        self._free.append(slot)

    def _detach(self, slot: Slot) -> None:
        self.first_token(slot)
        self.num_requests -= 1
        self.outstanding_tokens -= slot.output_tokens
        slot.live_generation = _NOBODY
        slot.sink, slot.tokens = None, _no_tokens

    def find(self, number: int, generation: int) -> Slot | None:
        """The slot, if this generation uses it now."""
        if number >= len(self.table):
            return None
        slot = self.table[number]
        return slot if slot.state is not FREE and slot.generation == generation else None

    def occupied(self) -> Iterator[Slot]:
        """Live and aborting slots, as they are now."""
        return iter([slot for slot in self.table if slot.state is not FREE])
