"""The gateway's end of the link: one connection to one worker.

The hot path is `_step`: one look at the clock per read, then per delta a list index, a compare of generations
and the sink's call. All that is rare (first token, finish, strangers) is off it. Slots are `backend.slots`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from backend import link
from backend.address import Address, connect, tune
from backend.file_receiver import FileReceiver
from backend.link import (
    Abort,
    Challenge,
    Closed,
    Delta,
    Error,
    FilePiece,
    Framer,
    LinkError,
    Stats,
    Step,
    Welcome,
)
from backend.silence import Silence
from backend.slots import ABORTING, LIVE, Slot, SlotTable
from backend.uploads import Uploads
from pipeline.errors import EngineFault, EngineRejected, HeadraceError, QueueFull, WorkerLost, WorkerStalled
from pipeline.ports import Sink
from pipeline.values import EngineCall, FirstToken, TokenLogprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Seconds of silence after which a worker is given up."""

    handshake_s: float = 10.0
    stall_s: float = 30.0


class LinkHandle:
    """A submitted choice; `pipeline.ports.Handle`."""

    __slots__ = ("_client", "_generation", "_slot")

    def __init__(self, client: LinkClient, slot: Slot) -> None:
        self._client = client
        self._slot = slot
        self._generation = slot.generation

    @property
    def worker(self) -> str:
        return self._client.worker

    def abort(self) -> None:
        self._client.abort(self._slot, self._generation)


class LinkClient(asyncio.Protocol):
    """The protocol object. Make one with `open_link`, await `welcomed()`, then `submit`.

    `ended` is done, with the reason, when the connection is over, and `on_end` is called with it before any
    sink is told. `on_stats` is called for each heartbeat.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes | None,
        name: str,
        limits: ClientLimits | None = None,
        on_stats: Callable[[Stats], None] = lambda stats: None,
        on_end: Callable[[EngineFault], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.address = address
        self.key = str(address)  # the same over a worker's restarts, for routing
        self.worker = str(address)  # the worker's own name once welcomed
        self.stats = Stats()
        self.slots = SlotTable()
        self.ended: asyncio.Future[EngineFault] = loop.create_future()
        self._welcome: asyncio.Future[Welcome] = loop.create_future()
        self._secret = secret or b""
        self._name = name
        self._nonce = secrets.token_bytes(32)
        self._limits = limits or ClientLimits()
        self._on_stats = on_stats
        self._on_end = on_end
        self._clock = clock
        self._phase = "greeting"  # greeting -> proving -> open -> closed
        self._framer = Framer()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # set before any other callback
        self._uploads = Uploads()
        self._is_paused = False
        self._files = FileReceiver()
        self._silence = Silence(self._stalled)

    @property
    def is_open(self) -> bool:
        """Whether calls can be submitted."""
        return self._phase == "open"

    async def welcomed(self) -> Welcome:
        """The worker's introduction, once its engine is ready. Raises the `EngineFault` that came first."""
        await asyncio.wait((self._welcome, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            raise self.ended.result()
        return self._welcome.result()

    async def over(self) -> EngineFault:
        """What ended the link, once it has ended. Cancelling the wait does not touch the link."""
        await asyncio.wait((self.ended,))
        return self.ended.result()

    # -- calls ---------------------------------------------------------------------------------------------

    def submit(self, call: EngineCall, sink: Sink) -> LinkHandle:
        """Start a choice. The sink is called from the event loop, never from inside.

        Raises `WorkerLost` when the connection is over, `QueueFull` when every slot is taken,
        `InvalidRequest` for sampling values that cannot travel.
        """
        if self._phase != "open":
            raise WorkerLost(f"worker {self.worker} is not connected")
        slot = self.slots.allocate(call, sink)
        try:
            frame = self._uploads.start(slot.number, slot.generation, call)
        except HeadraceError:
            self.slots.release(slot, "unsent")
            raise
        if frame is None:
            self._pump()
        else:
            self._transport.write(frame)
        return LinkHandle(self, slot)

    def abort(self, slot: Slot, generation: int) -> None:
        """End a choice; nothing happens if it is over. What is left of a long prompt is not sent."""
        if slot.generation != generation or slot.state is not LIVE:
            return
        if self._uploads.drop(slot.number):  # the worker has never heard of it
            self.slots.release(slot, "unsent")
            return
        self.slots.abort(slot)
        self._transport.write(link.encode(Abort([(slot.number, generation)])))

    def fetch(self, sha256: str, num_bytes: int) -> asyncio.Future[bytes]:
        """Ask for an announced file of this size. Fails with the `EngineFault` that ends the link."""
        future = self._files.expect(sha256, num_bytes)
        if self.ended.done():
            self._files.fail(self.ended.result())
        else:
            self._transport.write(link.encode(link.Fetch(sha256)))
        return future

    def close(self, reason: str = "the gateway closed the connection") -> None:
        """End the connection; live choices fail with `WorkerLost`, and the worker aborts them."""
        self.end(WorkerLost(f"worker {self.worker}: {reason}"))

    # -- asyncio's side ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        tune(transport)
        # One piece may be under way, so an abort never waits behind more of a long prompt than that.
        self._transport.set_write_buffer_limits(high=link.PIECE_BYTES // 2, low=0)
        self._silence.start(self._limits.handshake_s)

    def data_received(self, data: bytes) -> None:
        now_s = self._clock()
        self._silence.broken()
        try:
            for frame in self._framer.feed(data):
                if type(frame) is Step and self._phase == "open":
                    self._step(frame.deltas, now_s)
                else:
                    self._receive(frame)
                if self._phase == "closed":
                    return
        except LinkError as error:
            logger.warning("closing the link to worker %s at %s: %s", self.worker, self.address, error)
            self.end(WorkerLost(f"worker {self.worker} broke the protocol: {error}"))

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        reason = str(exc or "closed by the worker")
        if self._phase == "proving":
            reason += " after our HELLO; its log says why (do the shared secrets differ?)"
        self.end(WorkerLost(f"the connection to worker {self.worker} was lost: {reason}"))

    def end(self, error: EngineFault) -> None:
        """Close and fail every live choice with this error. Idempotent."""
        if self._phase == "closed":
            return
        self._phase = "closed"
        self._silence.stop()
        if self._transport is not None:
            self._transport.abort()
        self.ended.set_result(error)
        self._on_end(error)
        self._uploads = Uploads()
        self._files.fail(error)
        for slot in self.slots.occupied():
            self._fail(slot, "lost", error)

    def _pump(self) -> None:
        """Send long prompts, a piece per drained buffer."""
        while not self._is_paused and (part := self._uploads.take_piece()) is not None:
            self._transport.write(part)

    def _stalled(self, limit_s: float) -> None:
        logger.warning("worker %s at %s sent nothing for %.1f s", self.worker, self.address, limit_s)
        self.end(WorkerStalled(f"worker {self.worker} has sent nothing for {limit_s:g} s"))

    # -- in ------------------------------------------------------------------------------------------------

    def _step(self, deltas: list[Delta], now_s: float) -> None:
        """The hot path. A sink that raises ends its own stream only."""
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
                first = FirstToken(extra.cached_tokens, extra.queue_ms, extra.prefill_ms)
                self.slots.first_token(slot)
            if extra.logprobs is not None:
                logprobs = [TokenLogprobs(*entry) for entry in extra.logprobs]
        if delta.finish is not None:
            self._uploads.drop(slot.number)
            self.slots.release(slot, "finish")
        tokens(delta.ids, delta.finish, delta.stop, first, logprobs, now_s)

    def _stray(self, slot: Slot, delta: Delta) -> None:
        """A delta that crossed our abort; anything else is a foreign token, dropped and counted."""
        if slot.state is ABORTING and slot.generation == delta.generation:
            if delta.finish is not None:
                self.slots.release(slot, "finish")
        else:
            self.slots.num_dropped += 1

    def _sink_raised(self, slot: Slot, generation: int, error: Exception) -> None:
        logger.error("a stream's sink raised; its stream ends", exc_info=error)
        sink = slot.sink if slot.generation == generation else None
        self.abort(slot, generation)
        if sink is not None:
            _tell(sink, HeadraceError("An internal error ended this stream."))

    def _receive(self, frame: Any) -> None:
        handler = _HANDLERS.get((self._phase, type(frame)))
        if handler is None:
            raise LinkError(f"unexpected {type(frame).__name__.upper()} frame while {self._phase}")
        handler(self, frame)

    def _challenged(self, challenge: Challenge) -> None:
        link.check_version(challenge.version)
        mac = link.proof(self._secret, challenge.nonce, b"gateway")
        self._phase = "proving"
        self._transport.write(link.encode(link.Hello(link.VERSION, mac, self._nonce, self._name)))

    def _welcomed(self, welcome: Welcome) -> None:
        link.check_proof(self._secret, self._nonce, b"worker", welcome.mac)
        self.worker = welcome.worker[:200]
        self._phase = "open"
        self._silence.start(self._limits.stall_s)
        self._welcome.set_result(welcome)

    def _heartbeat(self, stats: Stats) -> None:
        self.stats = stats
        self._on_stats(stats)

    def _closed(self, frame: Closed) -> None:
        for number, generation in frame.slots:
            slot = self.slots.find(number, generation)
            if slot is None:
                self.slots.num_dropped += 1
            elif slot.state is LIVE:
                self._fail(slot, "closed", WorkerLost(f"worker {self.worker} closed a stream nobody aborted"))
            else:
                self.slots.release(slot, "closed")

    def _error(self, frame: Error) -> None:
        slot = self.slots.find(frame.slot, frame.generation)
        if slot is None:
            self.slots.num_dropped += 1
            return
        self._uploads.drop(slot.number)
        self._fail(slot, "error", _fault(self.worker, frame))

    def _file(self, piece: FilePiece) -> None:
        self._files.receive(piece)

    def _fail(self, slot: Slot, event: str, error: HeadraceError) -> None:
        """Free a slot; its sink hears why, unless it was aborted."""
        sink = slot.sink
        self.slots.release(slot, event)
        if sink is not None:
            _tell(sink, error)


def _tell(sink: Sink, error: HeadraceError) -> None:
    try:
        sink.failed(error)
    except Exception:
        logger.exception("a stream's sink raised when told of its failure")


def _fault(worker: str, frame: Error) -> HeadraceError:
    if frame.kind == "busy":
        return QueueFull(f"worker {worker} takes no more requests: {frame.message}")
    if frame.kind == "rejected":
        return EngineRejected(frame.message)
    return WorkerLost(f"worker {worker}: {frame.message}")


_HANDLERS: Final[dict[tuple[str, type], Any]] = {
    ("greeting", Challenge): LinkClient._challenged,
    ("proving", Stats): LinkClient._heartbeat,
    ("proving", Welcome): LinkClient._welcomed,
    ("open", Stats): LinkClient._heartbeat,
    ("open", Closed): LinkClient._closed,
    ("open", Error): LinkClient._error,
    ("open", FilePiece): LinkClient._file,
}


async def open_link(
    address: Address,
    secret: bytes | None = None,
    tls: ssl.SSLContext | None = None,
    name: str = "gateway",
    limits: ClientLimits | None = None,
    on_stats: Callable[[Stats], None] = lambda stats: None,
    on_end: Callable[[EngineFault], None] = lambda error: None,
) -> LinkClient:
    """Connect to a worker; await `welcomed()` on the result. Raises `OSError`, `TimeoutError`."""
    limits = limits or ClientLimits()

    def protocol() -> LinkClient:
        return LinkClient(address, secret, name, limits, on_stats, on_end)

    async with asyncio.timeout(limits.handshake_s):
        _, client = await connect(protocol, address, tls)
    return client
