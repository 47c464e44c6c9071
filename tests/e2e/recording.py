"""A gateway in the test's own process that remembers the ids behind every text.

Two runs of an engine may differ where the load does, so a text is compared with the decode of its very own
ids. They are taken where they enter the gateway: between the pool of workers and the answer.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gateway.app import Gateway, build_app
from gateway.http_protocol import HttpConfig
from gateway.listen import bind
from gateway.server import Server
from gateway.settings import General, Http, Link, Settings
from pipeline.errors import HeadraceError
from pipeline.ports import Sink
from pipeline.values import EngineCall, FirstToken, TokenLogprobs
from tests.stack import Worker
from tests.wire import Wire, connect

LIMIT_S: Final = 60.0


@dataclass(slots=True)
class Run:
    """What the engine made of one call, as it came over the link."""

    call: EngineCall
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    first: FirstToken | None = None

    @property
    def prompt_ids(self) -> list[int]:
        return self.call.prompt.ids.cast("B").cast("i").tolist()

    @property
    def shown_ids(self) -> list[int]:
        """Without the token that ended it, which nobody sees."""
        return self.ids[:-1] if self.finish == "stop" else self.ids


class _Recorder:
    """A sink that passes on all that it is told."""

    def __init__(self, run: Run, sink: Sink) -> None:
        self._run = run
        self._sink = sink

    def tokens(
        self,
        ids: list[int],
        finish: str | None,
        stop: int | str | None,
        first: FirstToken | None,
        logprobs: Sequence[TokenLogprobs] | None,
        now_s: float,
    ) -> None:
        run = self._run
        run.ids += ids
        run.finish = finish
        run.first = run.first or first
        self._sink.tokens(ids, finish, stop, first, logprobs, now_s)

    def failed(self, error: HeadraceError) -> None:
        self._sink.failed(error)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of one choice and the run behind it. `pieces` are the texts of a stream's frames."""

    text: str
    pieces: list[str]
    finish: str
    usage: dict[str, Any]
    run: Run


class RecordingGateway:
    """A client of the gateway that runs beside it. One request at a time, so that a run has one answer."""

    def __init__(self, gateway: Gateway, port: int) -> None:
        self.port = port
        self._runs: list[Run] = []
        self._submit = gateway.pool.submit
        gateway.pool.submit = self._record  # type: ignore[method-assign]

    def _record(self, call: EngineCall, sink: Sink) -> Any:
        run = Run(call)
        self._runs.append(run)
        return self._submit(call, _Recorder(run, sink))

    def take_runs(self) -> list[Run]:
        """Those that began since the last call or `ask`, in the order of their choices."""
        runs, self._runs = self._runs, []
        return runs

    async def ask(self, path: str, body: dict[str, Any], *, stream: bool) -> Answer:
        """One request with one choice, to its end."""
        self._runs.clear()
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        async with connect(self.port) as wire:
            head = await wire.post(path, body | options)
            assert head.status == 200, await wire.body()
            documents = await _events(wire) if stream else [await wire.json()]
        choices = [choice for document in documents for choice in document["choices"]]
        pieces = [text for choice in choices if (text := _text(choice))]
        (run,) = self._runs
        finish = choices[-1]["finish_reason"]
        return Answer("".join(pieces), pieces, finish, documents[-1]["usage"], run)


async def _events(wire: Wire) -> list[Any]:
    """The chunks of a whole stream; heartbeats are left out, which come where the engine is busy."""
    *frames, last = [frame for frame in await wire.frames() if not frame.is_comment]
    assert last.is_done, last
    return [frame.data for frame in frames]


def _text(choice: dict[str, Any]) -> str:
    """Of a chat's delta or message, or of a completion."""
    message = choice.get("delta", choice.get("message"))
    return (choice["text"] if message is None else message.get("content")) or ""


@asynccontextmanager
async def recording_gateway(worker: Worker, cache: Path, **groups: Any) -> AsyncIterator[RecordingGateway]:
    """The real app in front of a worker, on a free port of this process.

    `groups`: of `Settings`, for settings that are not the default.
    """
    http = Http(port=0)
    settings = Settings(
        general=General(cache=cache), http=http, link=Link(worker=(worker.address,)), **groups
    )
    thresholds = gc.get_threshold()
    app, sockets, started = build_app(settings), bind(http), asyncio.Event()
    config = HttpConfig(
        app,
        max_header_bytes=http.max_header_bytes,
        header_limit_s=http.header_limit_s,
        lifespan="on",
        log_config=None,
        access_log=False,
    )
    server = Server(config, app.gateway, 0.0, started.set)
    task = asyncio.create_task(server.serve(sockets=sockets))
    try:
        async with asyncio.timeout(LIMIT_S):
            await started.wait()
            while not app.gateway.pool.models():  # noqa: ASYNC110 - it connects in its own time
                await asyncio.sleep(0.02)
        yield RecordingGateway(app.gateway, sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        await task
        gc.unfreeze()  # a gateway tunes the collector for a process of its own
        gc.set_threshold(*thresholds)
