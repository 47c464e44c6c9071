"""The streams of one link, as a gateway sees them: submits and aborts out, tokens to their sinks. No sockets.

The hot path is `step`: per delta a list index, a compare of generations and the sink's call. All that is rare
(first token, finish, strangers, a sink that raises) is off it. Slots are `backend.slots`.
"""

from __future__ import annotations

from collections.abc import Callable

from backend import link
from backend.fault_log import log_fault
from backend.link import Abort, Closed, Delta, Error, LinkError
from backend.slots import ABORTING, LIVE, Slot, SlotTable
from backend.uploads import Parts, Uploads
from pipeline.errors import EngineDied, EngineFault, EngineRejected, HeadraceError, QueueFull, WorkerLost
from pipeline.ports import Sink
from pipeline.values import EngineCall, FirstToken, TokenLogprobs


class Dispatch:
    """Gives `write` the frames to send, in parts; `worker` is the name for errors, set anew when it is known.

    What `write` is given it takes over: the parts may be views of a buffer that is used again when they are
    gone.
    """

    def __init__(self, worker: str, write: Callable[[Parts], None]) -> None:
        self.worker = worker
        self.slots = SlotTable()
        self._uploads = Uploads()
        self._write = write
        self._is_paused = False

    @property
    def copied_bytes(self) -> int:
        """Bytes of prompts that were copied on their way to the transport; those of long ones are not."""
        return self._uploads.copied_bytes

    # -- out -----------------------------------------------------------------------------------------------

    def submit(self, call: EngineCall, sink: Sink, is_background: bool = False) -> Slot:
        """Start a choice. Raises `QueueFull` when every slot is taken, and what `Uploads.start` raises."""
        slot = self.slots.allocate(call, sink, is_background)
        try:
            parts = self._uploads.start(slot.number, slot.generation, call)
        except HeadraceError:
            self.slots.release(slot, "unsent")
            raise
        if parts is None:
            self._send_pieces()
        else:
            self._write(parts)
        return slot

    def abort(self, slot: Slot, generation: int) -> None:
        """End a choice; nothing happens if it is over. What is left of a long prompt is not sent."""
        if slot.generation != generation or slot.state is not LIVE:
            return
        if self._uploads.drop(slot.number):  # the worker has never heard of it
            self.slots.release(slot, "unsent")
            return
        self.slots.abort(slot)
        self._write((link.encode(Abort([(slot.number, generation)])),))

    def pause(self) -> None:
        """The connection's buffer is full: long prompts wait."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._send_pieces()

    def _send_pieces(self) -> None:
        while not self._is_paused and (parts := self._uploads.take_piece()) is not None:
            self._write(parts)

    # -- in ------------------------------------------------------------------------------------------------

    def step(self, deltas: list[Delta], now_s: float) -> None:
        """The hot path. A sink that raises ends only its own stream. `LinkError` for an unused slot."""
        slots = self.slots.table
        for delta in deltas:
            try:
                slot = slots[delta.slot]
            except IndexError:
                raise LinkError(f"tokens for slot {delta.slot}, which was never used") from None
            if slot.live_generation != delta.generation:
                self._stray(slot, delta)
                continue
            try:
                if delta.extra is None and delta.finish is None:
                    slot.tokens(delta.ids, None, None, None, None, now_s)
                else:
                    self._rare(slot, delta, now_s)
            except Exception as error:
                self._sink_raised(slot, delta.generation, error)

    def _rare(self, slot: Slot, delta: Delta, now_s: float) -> None:
        """A first token, a finish, or logprobs. The slot is free before the sink hears of its finish."""
        first: FirstToken | None = None
        logprobs: list[TokenLogprobs] | None = None
        extra, tokens = delta.extra, slot.tokens
        if extra is not None:
            if extra.is_first:
                first = FirstToken(extra.cached_tokens, extra.queue_ms, extra.prefill_ms, extra.prompt_tokens)
                self.slots.first_token(slot)
            if extra.logprobs is not None:
                logprobs = [TokenLogprobs(*entry) for entry in extra.logprobs]
        if delta.finish is None:
            tokens(delta.ids, None, None, first, logprobs, now_s)
            return
        sink = slot.sink
        self._uploads.drop(slot.number)
        self.slots.release(slot, "finish")
        try:
            tokens(delta.ids, delta.finish, delta.stop, first, logprobs, now_s)
        except Exception as error:
            _tell_raised(sink, error)

    def _stray(self, slot: Slot, delta: Delta) -> None:
        """A delta that crossed our abort; anything else is a foreign token, dropped and counted."""
        if slot.state is ABORTING and slot.generation == delta.generation:
            if delta.finish is not None:
                self.slots.release(slot, "finish")
        else:
            self.slots.num_dropped += 1

    def _sink_raised(self, slot: Slot, generation: int, error: Exception) -> None:
        sink = slot.sink if slot.generation == generation else None
        self.abort(slot, generation)
        _tell_raised(sink, error)

    def closed(self, frame: Closed) -> None:
        for number, generation in frame.slots:
            slot = self.slots.find(number, generation)
            if slot is None:
                self.slots.num_dropped += 1
            elif slot.state is LIVE:
                self._uploads.drop(number)
                self._fail(slot, "closed", WorkerLost(f"worker {self.worker} closed a stream nobody aborted"))
            else:
                self.slots.release(slot, "closed")

    def error(self, frame: Error) -> None:
        slot = self.slots.find(frame.slot, frame.generation)
        if slot is None:
            self.slots.num_dropped += 1
            return
        self._uploads.drop(slot.number)
        self._fail(slot, "error", _fault(self.worker, frame))

    def fail_all(self, error: EngineFault) -> None:
        """The link is over: every live choice fails with this error."""
        self._uploads.clear()
        for slot in self.slots.occupied():
            self._fail(slot, "lost", error)

    def _fail(self, slot: Slot, event: str, error: HeadraceError) -> None:
        """Free a slot; its sink hears why, unless it was aborted."""
        sink = slot.sink
        self.slots.release(slot, event)
        if sink is not None:
            _tell(sink, error)


def _tell_raised(sink: Sink | None, error: Exception) -> None:
    """A stream ends by its own sink's fault. None: it has aborted itself, and waits for nothing."""
    log_fault(error)
    if sink is not None:
        _tell(sink, HeadraceError("An internal error ended this stream."))


def _tell(sink: Sink, error: HeadraceError) -> None:
    try:
        sink.failed(error)
    except Exception as error:
        log_fault(error)


def _fault(worker: str, frame: Error) -> HeadraceError:
    if frame.kind == "busy":
        return QueueFull(f"worker {worker} takes no more requests: {frame.message}")
    if frame.kind == "rejected":
        return EngineRejected(frame.message)
    return EngineDied(f"worker {worker}: {frame.message}")
