"""The gateway's end of the link: one connection to one worker.

Handshake, framing, silence, files. What a frame means for the streams is `backend.dispatch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from backend import link
from backend.address import Address, connect, tune
from backend.dispatch import Dispatch
from backend.file_receiver import FileReceiver
from backend.first_tokens import FirstTokens
from backend.framing import Framer
from backend.link import (
    Challenge,
    Closed,
    Error,
    FilePiece,
    LinkError,
    Stats,
    Step,
    Welcome,
)
from backend.media_support import Support, lack, support_of
from backend.silence import Silence
from backend.slots import Slot, SlotTable
from backend.uploads import Parts
from pipeline.errors import EngineFault, EngineRejected, WorkerLost, WorkerStalled
from pipeline.ports import Sink
from pipeline.values import EngineCall


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
        self.stats = Stats()
        self.media: Support = {}  # what the worker takes, once it has introduced itself
        self.heard_s = clock()  # when the worker last sent anything
        self._dispatch = Dispatch(str(address), self._write)
        self._tokens = FirstTokens(self._dispatch.step, self._broken)
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
        self._files = FileReceiver()
        self._silence = Silence(self._stalled)

    @property
    def worker(self) -> str:
        """The worker's own name, its address until it has introduced itself."""
        return self._dispatch.worker

    @property
    def slots(self) -> SlotTable:
        return self._dispatch.slots

    @property
    def copied_bytes(self) -> int:
        """Bytes of prompts copied in this process on their way to this worker's transport, so far."""
        return self._dispatch.copied_bytes

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

    def submit(self, call: EngineCall, sink: Sink, is_background: bool = False) -> LinkHandle:
        """Start a choice. The sink is called from the event loop, never from inside. One in the background
        does not count as load (`SlotTable.allocate`).

        Raises `WorkerLost` when the connection is over, `QueueFull` when every slot is taken,
        `InvalidRequest` for sampling values that cannot travel, `EngineRejected` for media that the worker
        does not take.
        """
        if self._phase != "open":
            raise WorkerLost(f"worker {self.worker} is not connected")
        if call.media and (problem := lack(self.media, [each.kind for each in call.media])) is not None:
            raise EngineRejected(f"worker {self.worker}: {problem}")
        return LinkHandle(self, self._dispatch.submit(call, sink, is_background))

    def abort(self, slot: Slot, generation: int) -> None:
        """End the choice that had this slot and generation; nothing happens if it is over."""
        self._dispatch.abort(slot, generation)

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
        self.heard_s = now_s = self._clock()
        self._silence.broken()
        try:
            for frame in self._framer.feed(data):
                self._tokens.catch_up()
                if type(frame) is Step and self._phase == "open":
                    self._tokens.step(frame.deltas, now_s)
                else:
                    self._receive(frame)
                if self._phase == "closed":
                    return
        except LinkError as error:
            self._broken(error)

    def pause_writing(self) -> None:
        self._dispatch.pause()

    def resume_writing(self) -> None:
        self._dispatch.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        reason = str(exc or "closed by the worker")
        if self._phase == "proving":
            reason += " after our HELLO; its log says why (do the shared secrets differ?)"
        self.end(WorkerLost(f"the connection to worker {self.worker} was lost: {reason}"))

    def end(self, error: EngineFault) -> None:
        """Close and fail every live choice with this error. Idempotent."""
        if self._phase == "closed":
            return
        with contextlib.suppress(LinkError):
            self._tokens.catch_up()
        if self._phase == "closed":  # by one of the sinks
            return
        self._phase = "closed"
        self._silence.stop()
        if self._transport is not None:
            self._transport.abort()
        self.ended.set_result(error)
        self._on_end(error)
        self._files.fail(error)
        self._dispatch.fail_all(error)

    def _broken(self, error: LinkError) -> None:
        self.end(WorkerLost(f"worker {self.worker} broke the protocol: {error}"))

    def _stalled(self, limit_s: float) -> None:
        self.end(WorkerStalled(f"worker {self.worker} has sent nothing for {limit_s:g} s"))

    # -- in ------------------------------------------------------------------------------------------------

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
        self._dispatch.worker = welcome.worker[:200]
        self.media = support_of(welcome)
        self._phase = "open"
        self._silence.start(self._limits.stall_s)
        self._welcome.set_result(welcome)

    def _heartbeat(self, stats: Stats) -> None:
        self.stats = stats
        self._on_stats(stats)

    def _closed(self, frame: Closed) -> None:
        self._dispatch.closed(frame)

    def _error(self, frame: Error) -> None:
        self._dispatch.error(frame)

    def _file(self, piece: FilePiece) -> None:
        self._files.receive(piece)

    def _write(self, parts: Parts) -> None:
        """uvloop keeps views of what it could not send yet, and lets go of each when it is sent or lost.

        asyncio joins the parts, a copy of one piece, before Python 3.12.
        """
        if self._phase == "closed":
            return
        if len(parts) == 1:
            self._transport.write(parts[0])
        else:
            self._transport.writelines(parts)


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
