"""A server that speaks OpenAI's API in vLLM's words at next to no cost, for gateways to stand in front of.

One clock for all streams, as an engine's steps are: at each step every stream gets one frame, in one write; a
new stream's first one with the others, last. All say the same prose, over and over. Chat and completions; a
completion that asks for token ids gets them. `POST /pace?step_ms=20` sets the step, `POST /end` makes the
next token of every stream its last, and `GET /times` tells when each request came and when its first token
left, by the word `probe-…` in its prompt. `python -m benchmarks.scripted_upstream PORT STEP_MS
TOKENIZER_FOLDER` serves until it is stopped. Not here: a model, admission, limits of any kind.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Final, cast

import uvloop

MODEL: Final = "scripted"
PROSE: Final = (
    " The river carries water to a wheel, and every stone in its bed knows how long that takes. When the"
    " rain comes, the gate opens a little more: what is too much goes around the mill, past the old bridge"
    " and down to the sea. Nobody has to wait, and nothing is lost on the way; that is what it was built for."
)
WORDS: Final = tuple(re.findall(r" \w+|[.,:;]", PROSE))  # one token each
_PROBE: Final = re.compile(rb"probe-\d+")
_STREAM: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_METRICS: Final = b'vllm:num_requests_running{model_name="scripted"} 0.0\n'


@dataclass(frozen=True, slots=True)
class Shape:
    """The text around a token in one stream's frames, in vLLM's order of fields."""

    head: bytes
    before: bytes
    after: bytes
    last: bytes
    ids: Sequence[int] = ()  # of the words, if the stream is to have them

    def frame(self, index: int, is_last: bool = False) -> bytes:
        """The frame of the token with this index."""
        index %= len(WORDS)
        word = WORDS[index].encode()
        tail = self.last if is_last else self.after
        if self.ids:
            tail = tail.replace(b"@", b"%d" % self.ids[index], 1)
        return b'data: {%s"choices":[{"index":0,%s%s%s}]}\n\n' % (self.head, self.before, word, tail)


@dataclass(slots=True)
class Upstream:
    """All streams, and their clock."""

    step_s: float
    ids: Sequence[int]
    streams: dict[Connection, None] = field(default_factory=dict)
    times: dict[str, tuple[float, float]] = field(default_factory=dict)
    num_requests: int = 0

    async def run(self) -> None:
        """The clock: steps that cannot be kept are dropped, not made up for."""
        next_s = monotonic()
        while True:
            next_s = max(next_s + self.step_s, monotonic())
            await asyncio.sleep(next_s - monotonic())
            for stream in list(self.streams):
                stream.step()


class Connection(asyncio.Protocol):
    """A client's connection: one request after the other."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._received = b""
        self._write = cast(Any, None)
        self._shape: Shape | None = None
        self._frames: list[bytes] = []  # ready-made, one for each word
        self._num_sent = self._num_tokens = 0
        self._num_prompt = 0
        self._probe: tuple[str, float] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast(asyncio.Transport, transport).write  # uvloop's transports only behave like one

    def connection_lost(self, exc: Exception | None) -> None:
        self._upstream.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        size = int(length[1]) if length else 0
        if len(body) >= size:
            self._received = body[size:]
            method, target, _ = head.split(b" ", 2)
            self._answer(method + b" " + target, body[:size])

    def step(self) -> None:
        """The next token, and the end after the last one."""
        assert self._shape is not None
        if self._probe is not None:
            (name, arrived_s), self._probe = self._probe, None
            self._upstream.times[name] = (arrived_s, monotonic())
        index, self._num_sent = self._num_sent, self._num_sent + 1
        if self._num_sent < self._num_tokens:
            self._write(self._frames[index % len(WORDS)])
            return
        self._upstream.streams.pop(self, None)
        self._write(chunk(self._shape.frame(index, is_last=True)))
        last = usage(self._shape, self._num_prompt, self._num_sent)
        self._write(chunk(last + b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def end(self) -> None:
        """The next token is the last one."""
        self._num_tokens = self._num_sent + 1

    def _answer(self, request: bytes, body: bytes) -> None:
        if request == b"POST /v1/chat/completions":
            self._open(body, is_chat=True)
        elif request == b"POST /v1/completions":
            self._open(body, is_chat=False)
        elif request == b"GET /v1/models":
            self._whole({"object": "list", "data": [_MODEL]})
        elif request == b"GET /times":
            self._whole(self._upstream.times)
            self._upstream.times = {}
        elif request.startswith(b"POST /pace?step_ms="):
            self._upstream.step_s = float(request.partition(b"=")[2]) / 1e3
            self._whole({"step_s": self._upstream.step_s})
        elif request == b"POST /end":
            for stream in self._upstream.streams:
                stream.end()
            self._whole({})
        elif request in (b"GET /health", b"GET /version"):
            self._whole({"version": "scripted"})
        elif request == b"GET /metrics":
            self._send(200, b"text/plain", _METRICS)
        else:
            self._send(404, b"application/json", b'{"error":{"message":"no such route","code":404}}')

    def _whole(self, value: Any) -> None:
        self._send(200, b"application/json", json.dumps(value).encode())

    def _send(self, status: int, content_type: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %d -\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
        self._write(head % (status, content_type, len(body)) + body)

    def _open(self, body: bytes, is_chat: bool) -> None:
        upstream = self._upstream
        fields = json.loads(body)
        upstream.num_requests += 1
        self._num_tokens = fields.get("max_tokens") or fields.get("max_completion_tokens") or 16
        self._num_sent = 0
        ids = upstream.ids if fields.get("return_token_ids") else ()
        self._shape = shape(upstream.num_requests, is_chat, ids)
        self._frames = [chunk(self._shape.frame(index)) for index in range(len(WORDS))]
        prompt = fields.get("prompt", "")
        self._num_prompt = len(prompt) if isinstance(prompt, list) else len(body) // 5
        role = role_frame(self._shape) if is_chat else b""
        self._write(_STREAM + chunk(role) if role else _STREAM)
        upstream.streams[self] = None
        if probe := _PROBE.search(body):
            self._probe = (probe[0].decode(), monotonic())


_MODEL: Final = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm", "max_model_len": 1 << 20}


def shape(number: int, is_chat: bool, ids: Sequence[int] = ()) -> Shape:
    """What the frames of the stream with this number look like."""
    kind = b"chat.completion.chunk" if is_chat else b"text_completion"
    name = b"chatcmpl" if is_chat else b"cmpl"
    head = b'"id":"%s-%032x","object":"%s","created":1700000000,"model":"scripted",' % (name, number, kind)
    before = b'"delta":{"content":"' if is_chat else b'"text":"'
    closing = b'"}' if is_chat else b'"'
    tokens = b',"token_ids":[@]' if ids else b',"token_ids":null'
    after = closing + b',"logprobs":null,"finish_reason":null' + tokens
    last = closing + b',"logprobs":null,"finish_reason":"length","stop_reason":null' + tokens
    return Shape(head, before, after, last, ids)


def role_frame(shape: Shape) -> bytes:
    choice = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
    tail = b',"prompt_token_ids":null,"prompt_text":null'
    return b'data: {%s"choices":[%s]%s}\n\n' % (shape.head, choice, tail)


def usage(shape: Shape, num_prompt: int, num_tokens: int) -> bytes:
    """The frame after the last token."""
    counts = (num_prompt, num_prompt + num_tokens, num_tokens)
    fields = b'"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % counts
    return b'data: {%s"choices":[],"usage":{%s}}\n\n' % (shape.head, fields)


def chunk(data: bytes) -> bytes:
    """Of HTTP's chunked coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def word_ids(folder: Path) -> list[int]:
    """The id of each of `WORDS`, which are one token each in the embedded model's vocabulary."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = [tokenizer.encode(word, add_special_tokens=False).ids for word in WORDS]
    assert all(len(ids) == 1 for ids in encoded), encoded
    ids = [ids[0] for ids in encoded]
    assert tokenizer.encode(PROSE, add_special_tokens=False).ids == ids, "its tokens are not its words"
    return ids


async def serve(port: int, step_ms: float, ids: Sequence[int]) -> None:
    upstream = Upstream(step_ms / 1e3, ids)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(upstream), "127.0.0.1", port, backlog=4096
    )
    async with server:
        await upstream.run()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]), word_ids(Path(sys.argv[3]))))
