"""A worker process from start to end: engine, link server, its HTTP port, signals, exit code.

0   ended by SIGTERM or SIGINT: running jobs finished, or were cut at the limit
1   could not start; the reason is in the log
3   the engine died: every slot was told; a supervisor should start the worker again
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import uvloop

from backend.address import AddressError, parse_address
from backend.embedded import MODEL_NAME, ensure_embedded_model
from backend.embedded_fetch import EmbeddedModelError
from backend.link_server import LinkServer, ServerLimits
from backend.model_files import ModelFilesError
from backend.progress import Progress, StreamProgress
from backend.scripted import ScriptedOptions, scripted_server
from backend.vllm_config import EnginePath, VllmConfigError, VllmOptions
from backend.vllm_engine import VllmEngine
from backend.worker_http import WorkerHttp

logger = logging.getLogger(__name__)

EXIT_STOPPED: Final = 0
EXIT_NOT_STARTED: Final = 1
EXIT_ENGINE_DIED: Final = 3
# Faults of what the worker was given, each with a message that says what to do: no traceback is needed.
_PLAIN_FAULTS: Final = (
    AddressError,
    EmbeddedModelError,
    ModelFilesError,
    VllmConfigError,
    OSError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """All of a worker. Without `model` and `scripted` it serves the embedded model out of `cache_dir`."""

    listen: str  # tcp://HOST:PORT or unix:///PATH
    cache_dir: Path
    model: str | None = None  # a folder, or a name that vLLM can resolve
    served_model_names: Sequence[str] = ()
    max_model_len: int | None = None
    engine_args: Sequence[str] = ()  # vLLM's own
    engine_path: EnginePath = "auto"
    reasoning_parser: str | None = None  # the engine's, unless its arguments name one
    scripted: ScriptedOptions | None = None  # its address, secret, TLS, name and parser are taken from here
    secret: bytes | None = None
    tls: ssl.SSLContext | None = None
    name: str | None = None
    max_waiting: int = 1024  # jobs without a first token
    max_image_pixels: int = 32 << 20  # width times height
    http_host: str = "127.0.0.1"
    http_port: int = 0  # 0: any free one
    drain_s: float = 30.0


def run_worker(options: WorkerOptions, on_ready: Callable[[], None] | None = None) -> int:
    """Serve until a signal, or until the engine dies; the exit code. Call it in the main thread.

    `on_ready` is called once jobs are taken; at the same time a line `ready: …` goes to standard error.
    """
    progress = StreamProgress()
    try:
        if options.model is None and options.scripted is None:
            options = _with_embedded_model(options, progress)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(options, progress, on_ready))
    except KeyboardInterrupt:
        return EXIT_STOPPED
    except _PLAIN_FAULTS as error:
        logger.error("the worker cannot start: %s", error)
    except Exception:
        logger.exception("the worker cannot start")
    finally:
        progress.close()
    return EXIT_NOT_STARTED


def build_server(options: WorkerOptions, progress: Progress) -> LinkServer:
    """The link server with its engine, not yet started. Call it inside the running loop."""
    if options.scripted is not None:
        return scripted_server(
            replace(
                options.scripted,
                listen=options.listen,
                secret=options.secret,
                tls=options.tls,
                name=options.name,
                reasoning_parser=options.reasoning_parser,
            )
        )
    assert options.model is not None
    engine = VllmEngine(
        VllmOptions(
            model=options.model,
            served_model_names=options.served_model_names,
            engine_args=(*_named_arguments(options), *options.engine_args),
            path=options.engine_path,
            max_waiting=options.max_waiting,
            max_image_pixels=options.max_image_pixels,
        ),
        progress,
    )
    limits = ServerLimits(max_waiting=options.max_waiting)
    address = parse_address(options.listen)
    return LinkServer(engine, address, options.secret, options.tls, limits, options.name)


def _named_arguments(options: WorkerOptions) -> list[str]:
    """Our settings that are vLLM's arguments. They stand before the user's own, which beat them."""
    given = {"--max-model-len": options.max_model_len, "--reasoning-parser": options.reasoning_parser}
    return [word for name, value in given.items() if value is not None for word in (name, str(value))]


def _with_embedded_model(options: WorkerOptions, progress: Progress) -> WorkerOptions:
    with _sigterm_interrupts():
        folder = ensure_embedded_model(options.cache_dir, progress)
    return replace(
        options, model=str(folder), served_model_names=tuple(options.served_model_names) or (MODEL_NAME,)
    )


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises `KeyboardInterrupt`: a fetch or conversion under way must not live on without us."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def _serve(
    options: WorkerOptions, progress: Progress, on_ready: Callable[[], None] | None = None
) -> int:
    server = build_server(options, progress)
    http = WorkerHttp(server, options.http_host, options.http_port)
    with _signals() as (stop, hurry):
        await http.start()
        try:
            if not await _until(server.start(), stop):
                return EXIT_STOPPED
            progress.stage(f"ready: {server.info.model_names[0]} on {server.address}; metrics on {http.url}")
            if on_ready is not None:
                on_ready()
            if not await _until(_ended(server), stop):
                await _until(server.drain(options.drain_s), hurry)
            return EXIT_ENGINE_DIED if server.died.done() else EXIT_STOPPED
        finally:
            await server.stop()
            await http.stop()


async def _ended(server: LinkServer) -> None:
    await asyncio.shield(server.died)


async def _until(work: Awaitable[object], event: asyncio.Event) -> bool:
    """Whether the work was done before the event came; if not, it is cancelled. Raises what it raises."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        for each in (task, waiting):
            each.cancel()
        await asyncio.wait((task, waiting))


@contextlib.contextmanager
def _signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Two events: set by the first SIGTERM or SIGINT, and by the second, whose sender wants no draining."""
    first, second = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def received() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received)
    try:
        yield first, second
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
