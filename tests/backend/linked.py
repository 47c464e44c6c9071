"""What the link's tests share: a tiny tokenizer, a sink that remembers, workers and links for one test."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from backend import link
from backend.framing import Framer
from backend.link_client import ClientLimits, LinkClient, open_link
from backend.link_server import LinkServer
from backend.scripted import ScriptedOptions, scripted_server
from pipeline.errors import HeadraceError
from pipeline.values import EngineCall, FirstToken, MediaKind, Medium, Prompt, TokenLogprobs

NUM_WORDS = 500
EOS_ID = NUM_WORDS


def make_tokenizer(folder: Path, num_words: int = NUM_WORDS) -> Path:
    """A folder with a word-level tokenizer: ids are w0, w1, …, and the last one, `</s>`, ends a sequence."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {f"w{number}": number for number in range(num_words)} | {"</s>": num_words}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


def ids_of(prompt: Sequence[int]) -> bytes:
    return array("i", prompt).tobytes()


def make_call(
    prompt: Sequence[int], max_tokens: int = 8, model: str = "scripted", affinity: int = 0, **sampling: Any
) -> EngineCall:
    ids = memoryview(ids_of(prompt))
    return EngineCall(model, Prompt(ids, len(prompt), affinity), sampling, max_tokens)


def make_medium(data: bytes, kind: MediaKind = "image") -> Medium:
    return Medium(kind, data, "png", hashlib.sha256(data).hexdigest())


def is_lent(buffer: bytearray) -> bool:
    """Whether some memoryview of the buffer is alive: the pool's own check, a change of its size."""
    try:
        buffer.append(0)
    except BufferError:
        return True
    del buffer[-1]
    return False


class RecordingSink:
    """Remembers all that it is told; `ended` is done with the finish or the error."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.num_calls = 0
        self.first: FirstToken | None = None
        self.stop: int | str | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.ended: asyncio.Future[str | HeadraceError] = asyncio.get_running_loop().create_future()

    def tokens(
        self,
        ids: list[int],
        finish: str | None,
        stop: int | str | None,
        first: FirstToken | None,
        logprobs: Sequence[TokenLogprobs] | None,
        now_s: float,
    ) -> None:
        assert not self.ended.done(), "tokens after the end"
        self.num_calls += 1
        self.ids += ids
        self.logprobs += logprobs or ()
        if first is not None:
            assert self.first is None, "two first tokens"
            self.first = first
        if finish is not None:
            self.stop = stop
            self.ended.set_result(finish)

    def failed(self, error: HeadraceError) -> None:
        assert not self.ended.done(), "failed after the end"
        self.ended.set_result(error)


class HandTransport(asyncio.Transport):
    """Keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.data = bytearray()
        self.framer = Framer()
        self.is_ended = False

    def write(self, data: Any) -> None:
        if not self.is_ended:
            self.data += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def close(self) -> None:
        self.is_ended = True

    abort = close

    def frames(self) -> list[Any]:
        """What was written since the last call, heartbeats left out."""
        data, self.data = bytes(self.data), bytearray()
        return [frame for frame in self.framer.feed(data) if type(frame) is not link.Stats]


async def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """Wait for something to become true; fails the test when it does not."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@asynccontextmanager
async def scripted(folder: Path, **options: Any) -> AsyncIterator[LinkServer]:
    """A scripted worker on a Unix socket in `folder`, unless `listen` says otherwise."""
    tokenizer = options.pop("tokenizer", None) or make_tokenizer(folder / "model")
    options = {"listen": f"unix://{folder}/worker.sock", "step_ms": 1.0, "prefill_ms_per_1k": 0.0} | options
    server = scripted_server(ScriptedOptions(tokenizer=tokenizer, **options))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def linked(
    server: LinkServer, secret: bytes | None = None, limits: ClientLimits | None = None
) -> AsyncIterator[LinkClient]:
    """An open link to a worker."""
    client = await open_link(server.address, secret, limits=limits)
    try:
        await client.welcomed()
        yield client
    finally:
        client.close()
