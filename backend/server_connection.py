"""One gateway's connection, as a worker sees it: handshake, slots, prompts in pieces with media, deltas."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any, Final, cast

from backend import link
from backend.address import tune
from backend.file_sender import FileSender
from backend.framing import Framer
from backend.link import (
    Abort,
    Closed,
    Delta,
    Error,
    Fetch,
    Frame,
    Hello,
    LinkError,
    Media,
    Piece,
    Step,
    Submit,
)
from backend.outbox import Outbox
from backend.server_stream import ASSEMBLING, ENDED, FREE, REFUSED, RUNNING, Host, Stream

logger = logging.getLogger(__name__)

MAX_HANDSHAKE_FRAME_BYTES: Final = 4096  # all that a stranger can make us buffer
MAX_STEP_WEIGHT: Final = 32 << 10  # numbers in one frame of merged deltas: 300 KiB at most with logprobs


class GatewayConnection(asyncio.Protocol):
    """The protocol object. `deltas` collects an engine step; the host fills it and calls `send_step`."""

    def __init__(self, host: Host) -> None:
        self.deltas: list[Delta] = []
        self.gateway = "?"
        self.is_paused = False
        self.phase = "greeting"  # greeting -> waiting (for the engine) -> open -> closed
        self.outbox = Outbox()
        self.streams: dict[int, Stream] = {}
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._host = host
        self._framer = Framer(MAX_HANDSHAKE_FRAME_BYTES)
        self._nonce = secrets.token_bytes(32)
        self._gateway_nonce = b""
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)  # set before any other callback
        self._timer: asyncio.TimerHandle | None = None
        self._files = FileSender(self.send, lambda: self.is_paused, self.end)

    # -- asyncio's side ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._host.opened(self):
            self.phase = "closed"
            self._transport.abort()
            return
        tune(transport)
        self._transport.set_write_buffer_limits(high=self._host.limits.write_high_bytes)
        self._arm(self._host.limits.handshake_s, "no valid HELLO within the handshake limit")
        self.send(link.Challenge(self._nonce, link.VERSION))

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._framer.feed(data):
                if self.phase == "closed":
                    return
                self._receive(frame)
        except LinkError as error:
            self.end(str(error))

    def pause_writing(self) -> None:
        self.is_paused = True
        if self.phase != "closed":
            self._arm(self._host.limits.slow_reader_s, "it did not catch up within the slow-reader limit")

    def resume_writing(self) -> None:
        self.is_paused = False
        if self.phase == "closed":
            return
        self._disarm()
        self._pump()
        self._files.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.phase != "closed":
            logger.info("gateway %s disconnected: %s", self.gateway, exc or "closed by the gateway")
        self._release_all()
        if not self.gone.done():
            self.gone.set_result(None)

    # -- out -----------------------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        """Write one frame, whether or not the reader is slow: for the few and small ones."""
        self._transport.write(link.encode(frame))

    def send_step(self) -> None:
        """Send what the host put into `deltas`, or merge it into what already waits."""
        deltas, self.deltas = self.deltas, []
        if not self.is_paused and not self.outbox:
            frame = link.encode(Step(deltas))
            if len(frame) <= link.MAX_FRAME_BYTES:
                self._transport.write(frame)
                return
        self.outbox.add(deltas)
        self._pump()

    def send_heartbeat(self, stats: bytes | bytearray) -> None:
        """A slow reader has enough to read."""
        if self.phase in ("waiting", "open") and not self.is_paused:
            self._transport.write(stats)

    def finished(self, stream: Stream) -> None:
        """A delta with a finish is in `deltas`: the slot is free as soon as that is on its way."""
        if self.is_paused or self.outbox:
            stream.advance("hold")
        else:
            stream.advance("finish")
            del self.streams[stream.slot]

    def free(self, stream: Stream, event: str, last: Frame) -> None:
        """The worker's last word on a slot, after what still waits for it."""
        if (waiting := self.outbox.take_slot(stream.slot)) is not None:
            self._send_waiting(waiting)
        stream.advance(event)
        del self.streams[stream.slot]
        self.send(last)

    def _send_waiting(self, delta: Delta) -> None:
        rest = Outbox()
        rest.add([delta])
        while rest:
            self.send(Step(rest.take(MAX_STEP_WEIGHT)))

    def _pump(self) -> None:
        while self.outbox and not self.is_paused:
            deltas = self.outbox.take(MAX_STEP_WEIGHT)
            self.send(Step(deltas))
            for delta in deltas:
                stream = self.streams.get(delta.slot)
                if delta.finish is not None and stream is not None and stream.state is ENDED:
                    stream.advance("sent")
                    del self.streams[delta.slot]

    def end(self, reason: str) -> None:
        """Close because of what the peer did or did not do; says so in the log."""
        if self.phase == "closed":
            return
        logger.warning("closing the link to gateway %s: %s", self.gateway, reason)
        self.phase = "closed"
        self._release_all()
        self._transport.abort()

    def close(self) -> None:
        """Close after what was written and what waits; running streams must have had their last word."""
        while self.outbox:
            self.send(Step(self.outbox.take(MAX_STEP_WEIGHT)))
        self._release_all()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # -- in ------------------------------------------------------------------------------------------------

    def _receive(self, frame: Any) -> None:
        kind = type(frame)
        if self.phase == "greeting" and kind is Hello:
            self._hello(frame)
        elif self.phase == "open" and kind in _HANDLERS:
            _HANDLERS[kind](self, frame)
        else:
            raise LinkError(f"unexpected {kind.__name__.upper()} frame while {self.phase}")

    def _hello(self, hello: Hello) -> None:
        link.check_version(hello.version)
        link.check_proof(self._host.secret, self._nonce, b"gateway", hello.mac)
        self.gateway = hello.name[:200]
        self._gateway_nonce = hello.nonce
        self._disarm()
        self.phase = "waiting"
        if self._host.is_ready:
            self.welcome()

    def welcome(self) -> None:
        """The engine is ready: let a gateway that has proven itself in. Nothing for others."""
        if self.phase == "waiting":
            self.phase = "open"
            self._framer.max_frame_bytes = link.MAX_FRAME_BYTES
            self.send(self._host.welcome(self._gateway_nonce))
            logger.info("gateway %s connected", self.gateway)

    def _piece(self, frame: Piece) -> None:
        stream = self._arriving(frame.slot, frame.generation)
        assembly = self._host.assembly
        if stream.state is ASSEMBLING and self._is_taken(
            stream, assembly.refusal(stream, frame.ids, self._host.info.max_model_len)
        ):
            assembly.add(stream, frame.ids)

    def _media(self, frame: Media) -> None:
        stream = self._arriving(frame.slot, frame.generation)
        assembly = self._host.assembly
        if stream.state is ASSEMBLING and self._is_taken(
            stream, assembly.media_refusal(stream, frame.data, self._host.info.media)
        ):
            assembly.add_media(stream, frame.data)

    def _submit(self, frame: Submit) -> None:
        stream = self._arriving(frame.slot, frame.generation)
        assembly, info = self._host.assembly, self._host.info
        if stream.state is REFUSED or not self._is_taken(
            stream, assembly.submit_refusal(stream, frame, info.max_model_len, info.media)
        ):
            stream.advance("submit")
            del self.streams[stream.slot]
            return
        job = assembly.finish(stream, frame)
        stream.advance("submit")
        self._host.submit(stream, job)

    def _arriving(self, slot: int, generation: int) -> Stream:
        """The stream that a piece or submit belongs to, a new one where the slot is free."""
        stream = self.streams.get(slot)
        if stream is not None and stream.generation == generation:
            if stream.state is ASSEMBLING or stream.state is REFUSED:
                return stream
            raise LinkError(f"slot {slot} was submitted twice")
        if stream is not None:
            if stream.state is not REFUSED:
                raise LinkError(f"slot {slot} is in use ({stream.state})")
            stream.advance("replace")
        stream = self.streams[slot] = Stream(self, slot, generation)
        return stream

    def _is_taken(self, stream: Stream, refusal: tuple[str, str] | None) -> bool:
        """Whether this part of a prompt can be taken; answers with an ERROR where not."""
        if refusal is None and (reason := self._host.busy()) is not None:
            refusal = "busy", reason
        if refusal is None:
            return True
        self._host.assembly.drop(stream)
        stream.advance("refuse")
        self.send(Error(stream.slot, stream.generation, *refusal))
        return False

    def _abort(self, frame: Abort) -> None:
        """Slots that already had their last word are not answered: the gateway reads that word instead."""
        closed: list[tuple[int, int]] = []
        running: list[Stream] = []
        for slot, generation in frame.slots:
            stream = self.streams.get(slot)
            if stream is None or stream.generation != generation:
                continue
            if stream.state in (ASSEMBLING, ENDED):
                closed.append((slot, generation))
            elif stream.state is RUNNING:
                running.append(stream)
            self._host.assembly.drop(stream)
            self.outbox.drop(slot)
            stream.advance("abort")
            if stream.state is FREE:
                del self.streams[slot]
        if closed:
            self.send(Closed(closed))
        if running:
            self._host.abort(running)

    def _fetch(self, frame: Fetch) -> None:
        self._files.fetch(frame.sha256, self._host.info.paths)

    # -- the end -------------------------------------------------------------------------------------------

    def _release_all(self) -> None:
        """Whatever still runs for this connection is aborted at once. Idempotent."""
        self.phase = "closed"
        self._disarm()
        self._files.close()
        self.outbox = Outbox()
        streams, self.streams = list(self.streams.values()), {}
        for stream in streams:
            self._host.assembly.drop(stream)
        running = [stream for stream in streams if stream.state is RUNNING]
        for stream in streams:
            stream.advance("lost")
        self._host.lost(self, running)

    def _arm(self, limit_s: float, reason: str) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self.end, reason)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_HANDLERS: Final[dict[type, Any]] = {
    Submit: GatewayConnection._submit,
    Media: GatewayConnection._media,
    Piece: GatewayConnection._piece,
    Abort: GatewayConnection._abort,
    Fetch: GatewayConnection._fetch,
}
