"""How the engine core's batches reach `vllm_steps`: off a socket of ours, or by the core client's queue.

vLLM's client reads its ZeroMQ socket in a task of its own, with `zmq.asyncio`, and passes each batch on by a
queue to a second task: two switches of task and a dozen calls per engine step, more than the step's tokens
cost. ZeroMQ itself has a thread read the bytes, which then wakes the loop: 45 us more per step where few
streams run. `SocketOutputs` listens in the place of the client's socket, and the loop reads the bytes itself.
What a batch means is none of this module's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from backend.zmtp import HELLO, ZmtpReader

logger = logging.getLogger(__name__)

CONNECT_LIMIT_S: Final = 10.0  # ZeroMQ comes back within 0.2 s
GONE_S: Final = 1.0  # by then whoever watches the engine core's process has told better what is wrong
READ_BYTES: Final = 256 << 10  # per turn of the loop: others want their turn too
NO_FIGURES: Final = msgspec.Raw(b"\xc0")  # msgpack's null
_LOCAL: Final = "ipc://"

Take = Callable[[Any], None]  # an EngineCoreOutputs
Fail = Callable[[Exception], None]  # once: nothing comes after it


class Outputs(Protocol):
    async def start(self) -> None:
        """Batches of what is submitted from now on are read.

        Raises `TimeoutError`, `OSError`, or the client's own error where the engine has died.
        """

    async def close(self) -> None:
        """Stop reading, and let the client read by itself. Idempotent."""


async def open_outputs(core: Any, take: Take, fail: Fail) -> Outputs:
    """The quicker way that this core client allows, started."""
    fault = socket_fault(core)
    if fault is None:
        direct = SocketOutputs(core, take, fail)
        try:
            await direct.start()
            return direct
        except (TimeoutError, OSError) as error:
            await direct.close()
            fault = str(error)
        except BaseException:  # a stop, or an engine that has died
            await direct.close()
            raise
    logger.info("batches come by the core client's queue, not off a socket of ours: %s", fault)
    queued = QueuedOutputs(core, take, fail)
    await queued.start()
    return queued


def socket_fault(core: Any) -> str | None:
    """Why this client's socket is not to be replaced, or None."""
    import zmq.asyncio
    from vllm.v1.engine.core_client import AsyncMPClient

    if type(core) is not AsyncMPClient:  # others look at each batch themselves
        return f"the client is a {type(core).__name__}"
    if core.resources.output_queue_task is not None:
        return "the client reads already"
    if not isinstance(core.resources.output_socket, zmq.asyncio.Socket):
        return "the socket is not asyncio's"
    if not _address(core).startswith(_LOCAL):
        return "the engine core need not be on this machine"
    parallel = core.vllm_config.parallel_config
    for name in ("enable_elastic_ep", "enable_fault_tolerance"):  # they have messages of their own
        if getattr(parallel, name, False):
            return f"{name} is set"
    return None


def _address(core: Any) -> str:
    import zmq

    endpoint: bytes = core.resources.output_socket.getsockopt(zmq.LAST_ENDPOINT)
    return endpoint.decode()


def _decoder() -> Any:
    """The client's, but that the scheduler's figures stay packed: most of a small batch, and nobody waits."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder

    fields: list[tuple[str, Any, Any]] = []
    for each in msgspec.structs.fields(EngineCoreOutputs):
        if each.name == "scheduler_stats":
            fields.append((each.name, msgspec.Raw, NO_FIGURES))
        else:
            made: Any = msgspec.field(default=each.default, default_factory=each.default_factory)  # type: ignore[call-overload]
            fields.append((each.name, each.type, made))
    return MsgpackDecoder(msgspec.defstruct("Batch", fields, array_like=True, gc=False))


class QueuedOutputs:
    """By `get_output_async`, which every client has."""

    def __init__(self, core: Any, take: Take, fail: Fail) -> None:
        self._core = core
        self._take = take
        self._fail = fail
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._read())

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                self._take(await self._core.get_output_async())
        except Exception as error:
            self._fail(error)


class SocketOutputs:
    """Off a socket at the address of the client's own.

    The engine core's socket connects by itself to whoever listens there, and it has nothing to say before the
    first request. The client's own task is not started: a future stands in its place. The client cancels it
    when it closes its sockets.
    """

    def __init__(self, core: Any, take: Take, fail: Fail) -> None:
        from vllm.v1.engine.core import EngineCoreProc
        from vllm.v1.engine.core_client import _process_utility_output
        from vllm.v1.engine.exceptions import EngineDeadError

        self._core = core
        self._take = take
        self._fail = fail
        self._utility = _process_utility_output
        self._resources = core.resources
        self._address = _address(core)
        self._last_words: bytes = EngineCoreProc.ENGINE_CORE_DEAD
        self._dead_error: type[Exception] = EngineDeadError
        self._loop = asyncio.get_running_loop()
        self._decoder = _decoder()
        self._reader = ZmtpReader()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._socket: socket.socket | None = None  # first the one that listens, then the engine core's
        self._timer: asyncio.TimerHandle | None = None
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self._place: asyncio.Future[None] = self._loop.create_future()
        self._is_open = False

    async def start(self) -> None:
        self._is_open = True
        self._place.add_done_callback(self._cancelled)
        self._resources.output_queue_task = self._place
        self._listen()
        self._resources.output_socket.close(linger=0)  # so that the engine core connects anew
        try:
            await asyncio.wait_for(self._connected, CONNECT_LIMIT_S)
        except TimeoutError:
            raise TimeoutError(f"the engine core did not connect within {CONNECT_LIMIT_S:g} s") from None

    async def close(self) -> None:
        self._stop()
        if getattr(self._resources, "output_queue_task", None) is self._place:
            self._resources.output_queue_task = None
            self._give_back()

    def _give_back(self) -> None:
        """Have a socket of the client's listen again."""
        import zmq
        from vllm.utils.network_utils import make_zmq_socket

        if not self._resources.engine_dead:
            self._resources.output_socket.close(linger=0)  # open still, where we could not listen
            self._resources.output_socket = make_zmq_socket(self._core.ctx, self._address, zmq.PULL)

    # -- the connection ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._remove_path()
        self._socket.bind(self._address.removeprefix(_LOCAL))
        self._socket.listen()
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """The engine core's one connection: nobody comes after it."""
        assert self._socket is not None
        accepted, _ = self._socket.accept()
        self._leave()
        self._remove_path()
        self._socket = accepted
        accepted.setblocking(False)
        accepted.send(HELLO)
        self._loop.add_reader(accepted, self._readable)
        self._connected.set_result(None)

    def _remove_path(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._address.removeprefix(_LOCAL))

    def _leave(self) -> None:
        """Let go of the socket, and of what is to happen to it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        left, self._socket = self._socket, None
        if left is not None:
            self._loop.remove_reader(left)
            left.close()

    # -- the end -------------------------------------------------------------------------------------------

    def _cancelled(self, _: asyncio.Future[None]) -> None:
        """The client closes its sockets: it has found the engine dead, or is shut down."""
        self._end(self._dead_error())

    def _end(self, error: Exception) -> None:
        if not self._is_open:
            return
        self._stop()
        if self._connected.done():
            self._fail(self._core._format_exception(error))
        else:
            self._connected.set_exception(error)

    def _stop(self) -> None:
        self._is_open = False
        self._leave()

    # -- what comes ----------------------------------------------------------------------------------------

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            num_bytes = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            num_bytes = 0
        if not num_bytes:
            self._leave()
            self._timer = self._loop.call_later(GONE_S, self._end, self._dead_error())
            return
        try:
            for frames in self._reader.feed(bytes(self._buffer[:num_bytes])):
                if self._is_open:
                    self._received(frames)
        except Exception as error:
            self._end(error)

    def _received(self, frames: list[bytes]) -> None:
        if frames[0] == self._last_words:
            self._resources.engine_dead = True
            raise self._dead_error()
        batch = self._decoder.decode(frames)
        if batch.utility_output:
            self._utility(batch.utility_output, self._core.utility_results)
        elif batch.outputs or batch.scheduler_stats != NO_FIGURES:
            self._take(batch)
