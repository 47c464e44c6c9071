"""The worker's end of the link: one engine, many gateways.

Here is what concerns all connections together: the engine's events and the way of each output to its slot,
the bounds on waiting jobs, heartbeats, draining, the engine's death. One connection is `server_connection`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import ssl
from collections.abc import Sequence

import msgspec

from backend import link
from backend.address import Address, check_trust, listen, remove_socket, stop_listening
from backend.assembly import Assembly
from backend.link import Closed, Delta, Error, Stats
from backend.media_support import announced
from backend.ports import EngineEvents, EngineInfo, Job, Key, Output, WorkerEngine
from backend.server_connection import GatewayConnection
from backend.server_stream import ABORTING, FREE, ORPHAN, RUNNING, Connection, ServerLimits, Stream

logger = logging.getLogger(__name__)

__all__ = ["LinkServer", "ServerLimits"]


class LinkServer:
    """Serves one engine to gateways. Build it inside the running loop.

    `died` is done, with the reason, when the engine has died. Raises `AddressError` where the address may not
    be listened on.
    """

    def __init__(
        self,
        engine: WorkerEngine,
        address: Address,
        secret: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        limits: ServerLimits | None = None,
        name: str | None = None,
    ) -> None:
        check_trust(address, secret, tls)
        self.address = address  # with the real port once started
        self.secret = secret or b""
        self.limits = limits or ServerLimits()
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self.assembly = Assembly(self.limits.max_assembly_bytes)
        self.num_running = 0  # jobs in the engine's hands, waiting ones too
        self.num_waiting = 0  # of them, those without a first output
        self.num_late = 0  # outputs for jobs that had already ended: an engine's fault
        self.is_ready = False
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._connections: dict[Connection, None] = {}  # oldest first
        self._idle = asyncio.Event()
        self._idle.set()
        self._stats_task: asyncio.Task[None] | None = None
        self._refusal: str | None = None  # why no new job is taken

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, load the engine, let the gateways in. Gateways that connect early see that it loads."""
        self._server, self.address = await listen(lambda: self.protocol(), self.address, self._tls)
        self._stats_task = asyncio.create_task(self._send_stats())
        events = EngineEvents(step=self._step, closed=self._closed, failed=self._failed, died=self._died)
        try:
            await self._engine.start(events)
        except BaseException:
            await self.stop()
            raise
        self.is_ready = True
        for connection in self._connections:
            connection.welcome()
        logger.info("%s serves %s on %s", self.name, ", ".join(self.info.model_names), self.address)

    def protocol(self) -> asyncio.Protocol:
        """The protocol object for one accepted connection."""
        return GatewayConnection(self)

    async def drain(self, limit_s: float) -> int:
        """Take no more jobs and wait for the running ones; returns how many were left at the limit."""
        self._refusal = "the worker is shutting down and takes no new jobs"
        self._broadcast_stats()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%d jobs were still running after %.0f s of draining", self.num_running, limit_s)
        return self.num_running

    async def stop(self) -> None:
        """End what still runs with a named error, close every connection, stop the engine. Idempotent."""
        self._refusal = "the worker has stopped"
        if (server := self._server) is not None:
            self._server = None
            await stop_listening(server)
            remove_socket(self.address)
        if self._stats_task is not None:
            self._stats_task.cancel()
            await asyncio.gather(self._stats_task, return_exceptions=True)
            self._stats_task = None
        connections = list(self._connections)
        self._end_all("the worker was stopped")
        if connections:
            await asyncio.wait([connection.gone for connection in connections], timeout=self.limits.stop_s)
        for connection in connections:
            connection.abort()
        await self._engine.stop()

    @property
    def is_accepting(self) -> bool:
        """Whether jobs are taken at all: the engine is ready and alive, and nobody has begun to drain."""
        return self.is_ready and not self.died.done() and self._refusal is None

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    # -- what the connections ask --------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def busy(self) -> str | None:
        if self._refusal is None and self.num_waiting >= self.limits.max_waiting:
            return (
                f"{self.num_waiting} jobs wait for their first token; the limit is {self.limits.max_waiting}"
            )
        return self._refusal

    def welcome(self, nonce: bytes) -> link.Welcome:
        info = self.info
        return link.Welcome(
            mac=link.proof(self.secret, nonce, b"worker"),
            worker=self.name,
            model_names=list(info.model_names),
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            default_sampling=dict(info.default_sampling),
            fingerprint=info.fingerprint,
            files=list(info.files),
            versions=dict(info.versions),
            scripted=info.scripted,
            reasoning_parser=info.reasoning_parser,
            max_running=info.max_running,
            engine_path=info.engine_path,
            media=announced(info.media),
        )

    def opened(self, connection: Connection) -> bool:
        """Take a new connection in, if there is room. A silent stranger never takes a gateway's place."""
        if len(self._connections) >= self.limits.max_connections:
            stranger = next((other for other in self._connections if other.phase == "greeting"), None)
            if stranger is not None:
                stranger.end("it has not proven itself, and another connection needs its place")
        if len(self._connections) >= self.limits.max_connections or self.died.done():
            logger.warning("refusing a connection: %d are open", len(self._connections))
            return False
        self._connections[connection] = None
        return True

    def lost(self, connection: Connection, streams: Sequence[Stream]) -> None:
        self._connections.pop(connection, None)
        if streams:
            self._engine.abort(streams)

    def submit(self, stream: Stream, job: Job) -> None:
        self.num_running += 1
        self.num_waiting += 1
        self._idle.clear()
        try:
            self._engine.submit(stream, job)
        except Exception as error:  # one job's trouble must not end the others' connection
            logger.error("the engine raised %s when a job was submitted", type(error).__name__)
            self._failed(stream, "rejected", f"{type(error).__name__}: {error}")

    def abort(self, streams: Sequence[Stream]) -> None:
        self._engine.abort(streams)

    # -- what the engine tells -----------------------------------------------------------------------------

    def _step(self, outputs: Sequence[Output]) -> None:
        """The hot path: sort one engine step's outputs into one frame per connection.

        First tokens stand first in it: a gateway answers those before the tokens of answers that run.
        """
        touched: list[Connection] = []
        has_first = False
        for output in outputs:
            stream: Stream = output.key
            if stream.state is not RUNNING:
                self._late(stream, output)
                continue
            deltas = stream.connection.deltas
            if not deltas:
                touched.append(stream.connection)
            deltas.append(
                Delta(stream.slot, stream.generation, output.ids, output.finish, output.stop, output.extra)
            )
            if not stream.started:
                stream.started = has_first = True
                self.num_waiting -= 1
            if output.finish is not None:
                stream.connection.finished(stream)
                self._done(stream)
        for connection in touched:
            if has_first:
                connection.deltas.sort(key=_is_later)
            try:
                connection.send_step()
            except Exception as error:  # an output that cannot be encoded is one gateway's trouble, not all's
                logger.exception("a step could not be sent")
                connection.end(f"a step could not be sent: {type(error).__name__}")

    def _late(self, stream: Stream, output: Output) -> None:
        """An output that crossed an abort: only its finish matters."""
        if stream.state not in (ABORTING, ORPHAN):
            self.num_late += 1
        elif output.finish is not None:
            self._settle(stream, "finish")

    def _closed(self, keys: Sequence[Key]) -> None:
        for stream in keys:
            if stream.state is RUNNING:
                self._failed(stream, "engine", "the engine aborted this job")
            elif stream.state is not FREE:
                self._settle(stream, "closed")

    def _failed(self, key: Key, kind: str, message: str) -> None:
        stream: Stream = key
        if stream.state is RUNNING:
            error = Error(stream.slot, stream.generation, kind, message)
            stream.connection.free(stream, "fail", error)
            self._done(stream)
        elif stream.state is not FREE:
            self._settle(stream, "fail")

    def _settle(self, stream: Stream, event: str) -> None:
        """The engine has let go of an aborted job: answer the abort, if anybody is left to read it."""
        if stream.state is ORPHAN:
            stream.advance(event)
        else:
            stream.connection.free(stream, event, Closed([(stream.slot, stream.generation)]))
        self._done(stream)

    def _done(self, stream: Stream) -> None:
        self.num_running -= 1
        if not stream.started:
            stream.started = True
            self.num_waiting -= 1
        if self.num_running == 0:
            self._idle.set()

    def _died(self, reason: str) -> None:
        if self.died.done():
            return
        logger.error("the engine died: %s", reason)
        self._refusal = "the engine has died"
        self.died.set_result(reason)
        self._end_all(f"the engine died: {reason}")

    def _end_all(self, reason: str) -> None:
        """Give every slot its last word, then close every connection."""
        self._broadcast_stats()
        for connection in list(self._connections):
            for stream in list(connection.streams.values()):
                if stream.state is RUNNING:
                    self._failed(stream, "engine", reason)
                elif stream.state is ABORTING:
                    self._settle(stream, "closed")
            connection.close()

    # -- heartbeats ----------------------------------------------------------------------------------------

    async def _send_stats(self) -> None:
        while True:
            self._broadcast_stats()
            await asyncio.sleep(self.limits.stats_s)

    def _broadcast_stats(self) -> None:
        stats = self._stats() if self.is_ready else Stats()
        alive = not self.died.done()
        frame = link.encode(msgspec.structs.replace(stats, engine_alive=alive, accepting=self.is_accepting))
        for connection in self._connections:
            connection.send_heartbeat(frame)

    def refresh(self) -> None:
        """Bring the engine's own metrics up to date."""
        if self.is_ready:
            self._stats()

    def _stats(self) -> Stats:
        """The engine's figures; without them the heartbeat still goes out."""
        try:
            return self._engine.stats()
        except Exception:
            logger.exception("the engine gave no figures")
            return Stats()


def _is_later(delta: Delta) -> bool:
    """Whether it is not the first one of its stream."""
    return delta.extra is None or not delta.extra.is_first
