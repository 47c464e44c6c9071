"""What a request costs in the gateway's own code: the whole app, driven by ASGI, one request after the other.

No sockets, no server, no other process: the engine answers from within the same thread, and the CPU's caches
are as warm as they get. So it is the figure that compares two versions of the code, also on a machine where
others work, and not what a request costs where requests come a hundred times a second
(`bench_request_path.py`: two to four times as much, since the caches then are cold).
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TextIO

import uvloop

from backend.model_files import read_model_files
from gateway.app import App, build_app
from gateway.settings_load import load
from pipeline.errors import HeadraceError
from pipeline.ports import Sink
from pipeline.values import EngineCall, FirstToken, ModelInfo, TextCall

MODEL: Final = "hot"
MAX_MODEL_LEN: Final = 32768


class _Engine:
    """`pipeline.ports.Engine` that is driven by hand."""

    def __init__(self) -> None:
        self._sinks: asyncio.Queue[Sink] = asyncio.Queue()

    async def next_sink(self) -> Sink:
        """The sink of the next call, once it is there."""
        return await self._sinks.get()

    def models(self) -> Sequence[ModelInfo]:
        return []

    def check_room(self, model: str) -> None:
        pass

    def max_model_len(self, model: str) -> int:
        return MAX_MODEL_LEN

    def media(self, model: str) -> Mapping[Any, Any]:
        return {}

    def submit(self, call: EngineCall, sink: Sink) -> Any:
        self._sinks.put_nowait(sink)
        return SimpleNamespace(worker="hot", abort=lambda: None)

    def submit_text(self, call: TextCall, sink: Any) -> Any:
        raise HeadraceError("no text")


class Hot:
    """The app of one process with one model."""

    def __init__(self, app: App, engine: _Engine, token_ids: Sequence[int]) -> None:
        self._app = app
        self._engine = engine
        self._token_ids = token_ids

    async def request(self, body: bytes) -> int:
        """One chat, to its end; how many bytes it was answered with."""
        client = _Client(body)
        answering = asyncio.ensure_future(self._app(_scope(len(body)), client.receive, client.send))
        sink, now_s = await self._engine.next_sink(), time.monotonic()
        last = len(self._token_ids) - 1
        for number, token_id in enumerate(self._token_ids):
            first = FirstToken(0, 0.0, 1.0, None) if number == 0 else None
            sink.tokens([token_id], "length" if number == last else None, None, first, None, now_s)
        await answering
        return client.num_bytes


class _Client:
    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._over = asyncio.Event()
        self.num_bytes = 0

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            self.num_bytes += len(message["body"])
            if not message.get("more_body", False):
                self._over.set()


def _scope(num_bytes: int) -> dict[str, Any]:
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % num_bytes),
    ]
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "http_version": "1.1",
        "headers": headers,
        "client": ("127.0.0.1", 1),
    }


def hot_us(
    folder: Path, rules: Path, bodies: Sequence[bytes], answer: str, num_tokens: int, num_each: int
) -> list[float]:
    """CPU microseconds per request, of each `num_each` in turn. Their model is `MODEL`, of this folder.

    The first quarter of the bodies only warms up. What takes longer than the quickest tenth was disturbed by
    others on the machine.
    """
    files = read_model_files(folder)
    contents = {each.name: Path(files.paths[each.sha256]).read_bytes() for each in files.files}
    info = ModelInfo(MODEL, MAX_MODEL_LEN, 16, {}, files.fingerprint)
    with open(os.devnull, "w") as quiet:
        return uvloop.run(_hot_us(_Setup(rules, info, contents, quiet), bodies, answer, num_tokens, num_each))


@dataclass(frozen=True, slots=True)
class _Setup:
    rules: Path
    info: ModelInfo
    files: Mapping[str, bytes]
    log: TextIO


async def _hot_us(
    setup: _Setup, bodies: Sequence[bytes], answer: str, num_tokens: int, num_each: int
) -> list[float]:
    app, engine = (
        build_app(load({"rules": str(setup.rules), "worker": ["unix:///nobody"]}).settings),
        _Engine(),
    )
    gateway: Any = app.gateway
    gateway.flow._engine = engine
    gateway.request_log._stream = setup.log
    await gateway.models.load(setup.info, setup.files)
    encoder = gateway.models.get(MODEL).text.encoder
    ids = memoryview(encoder.encode(answer, add_special_tokens=False)).cast("i")[:num_tokens].tolist()
    hot, times_us = Hot(app, engine, ids), []
    num_warm = len(bodies) // 4
    for body in bodies[:num_warm]:
        await hot.request(body)
    gc.collect()
    gc.freeze()
    for start in range(num_warm, len(bodies) - num_each + 1, num_each):
        before_ns = time.process_time_ns()
        for body in bodies[start : start + num_each]:
            await hot.request(body)
        times_us.append((time.process_time_ns() - before_ns) / num_each / 1e3)
    await gateway.next_turns.stop()
    await gateway.tokens.close()
    return times_us
