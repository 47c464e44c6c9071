"""How the engine core's batches reach `vllm_steps`: off the socket at once, or by the core client's queue.

vLLM's client reads its ZeroMQ socket in a task of its own, with `zmq.asyncio`, and passes each batch on by a
queue to a second task: two switches of task and a dozen calls per engine step, more than the step's tokens
cost. `SocketOutputs` reads the same socket in the event loop's callback. What a batch means is none of this
module's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

logger = logging.getLogger(__name__)

MAX_BATCHES: Final = 16  # per turn of the loop: others want their turn too
_POLLIN: Final = 1

Take = Callable[[Any], None]  # an EngineCoreOutputs
Fail = Callable[[Exception], None]  # once: nothing comes after it


class Outputs(Protocol):
    def start(self) -> None: ...
    async def close(self) -> None:
        """Stop reading, and leave the socket as it was found. Idempotent."""


def outputs_of(core: Any, take: Take, fail: Fail) -> Outputs:
    """The quicker way that this core client allows. Build it inside the running loop."""
    fault = socket_fault(core)
    if fault is None:
        return SocketOutputs(core, take, fail)
    logger.info("batches come by the core client's queue, not off its socket: %s", fault)
    return QueuedOutputs(core, take, fail)


def socket_fault(core: Any) -> str | None:
    """Why this client's socket is not to be read directly, or None."""
    import zmq.asyncio
    from vllm.v1.engine.core_client import AsyncMPClient

    if type(core) is not AsyncMPClient:  # others look at each batch themselves
        return f"the client is a {type(core).__name__}"
    if core.resources.output_queue_task is not None:
        return "the client reads already"
    if not isinstance(core.resources.output_socket, zmq.asyncio.Socket):
        return "the socket is not asyncio's"
    parallel = core.vllm_config.parallel_config
    for name in ("enable_elastic_ep", "enable_fault_tolerance"):  # they have messages of their own
        if getattr(parallel, name, False):
            return f"{name} is set"
    return None


class QueuedOutputs:
    """By `get_output_async`, which every client has."""

    def __init__(self, core: Any, take: Take, fail: Fail) -> None:
        self._core = core
        self._take = take
        self._fail = fail
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
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
    """By a plain view of the client's own socket, with its decoder and its tests for a dead engine.

    The client's own task is not started: a future stands in its place. The client cancels it when it closes
    its sockets.
    """

    def __init__(self, core: Any, take: Take, fail: Fail) -> None:
        import zmq
        from vllm.v1.engine.core_client import _process_utility_output
        from vllm.v1.engine.exceptions import EngineDeadError

        self._core = core
        self._take = take
        self._fail = fail
        self._utility = _process_utility_output
        self._resources = core.resources
        self._socket: Any = zmq.Socket.shadow(core.resources.output_socket)
        self._dead_error: type[Exception] = EngineDeadError
        self._again: type[Exception] = zmq.Again
        self._events, self._dont_wait = int(zmq.EVENTS), int(zmq.DONTWAIT)
        self._loop = asyncio.get_running_loop()
        self._fd: int | None = None
        self._place: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._readable)
        self._place.add_done_callback(self._cancelled)
        self._resources.output_queue_task = self._place
        self._loop.call_soon(self._readable)  # what came before may have been announced to nobody

    async def close(self) -> None:
        self._stop()
        if getattr(self._resources, "output_queue_task", None) is self._place:
            self._resources.output_queue_task = None

    def _cancelled(self, _: asyncio.Future[None]) -> None:
        """The client closes its sockets: it has found the engine dead, or is shut down."""
        self._end(self._dead_error())

    def _end(self, error: Exception) -> None:
        if self._fd is not None:
            self._stop()
            self._fail(self._core._format_exception(error))

    def _stop(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._loop.remove_reader(fd)

    def _readable(self) -> None:
        """The descriptor tells of changes only: read until nothing is left, or come back soon."""
        try:
            for _ in range(MAX_BATCHES):
                if self._fd is None:
                    return
                self._receive()
                if not self._socket.get(self._events) & _POLLIN:
                    return
            self._loop.call_soon(self._readable)
        except self._again:
            pass
        except Exception as error:
            self._end(error)

    def _receive(self) -> None:
        frame = self._socket.recv(self._dont_wait, copy=False)
        frames = [frame]
        while frame.more:
            frame = self._socket.recv(self._dont_wait, copy=False)
            frames.append(frame)
        self._resources.validate_alive(frames)
        batch = self._core.decoder.decode(frames)
        if batch.utility_output:
            self._utility(batch.utility_output, self._core.utility_results)
        elif batch.outputs or batch.scheduler_stats:
            self._take(batch)
