"""The benchmark of /v1/realtime: its client that counts, and its arithmetic."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import pairwise
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.bench_websocket import KINDS, Window, Windows
from benchmarks.websocket_load import WebSocketClient, handshake, masked_frame, open_conversation, text_frame
from benchmarks.websocket_turns import of_gateway, text_of

HEAD = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n\r\n"


def frame(payload: bytes, head: int = 0x81) -> bytes:
    """Of a server."""
    size = len(payload)
    if size < 126:
        return bytes((head, size)) + payload
    length = b"\x7e" + size.to_bytes(2) if size < 1 << 16 else b"\x7f" + size.to_bytes(8)
    return bytes((head,)) + length + payload


def event(kind: str, **fields: Any) -> bytes:
    return frame(json.dumps({"type": kind, "event_id": "event_1", **fields}, separators=(",", ":")).encode())


TURN = [
    event("session.created"),
    event("response.created", response={"note": '"response.output_text.delta"' * 20}),
    *(event("response.output_text.delta", delta=text) for text in ("a", "b" * 200, "c" * 70_000)),
    frame(b"", 0x89),
    event("response.output_text.done", text="d" * 70_000),
    event("response.done", response={"status": "completed", "usage": {"output_tokens": 3}}),
]


class Sent(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""
        self.is_aborted = False

    def write(self, data: Any) -> None:
        self.data += data

    def abort(self) -> None:
        self.is_aborted = True


async def client_of(pieces: list[bytes]) -> tuple[WebSocketClient, Sent]:
    """A client in its first turn that has got these bytes, piece by piece."""
    client, sent = WebSocketClient("localhost", "m"), Sent()
    client.connection_made(sent)
    client.data_received(HEAD)
    client.turn("hello")
    for piece in pieces:
        client.data_received(piece)
    return client, sent


@pytest.mark.parametrize("seed", range(5))
async def test_every_delta_is_counted_however_the_bytes_come(seed: int) -> None:
    data, rng = b"".join(TURN), random.Random(seed)
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(200)), *range(400)})
    pieces = [data[start:end] for start, end in pairwise(cuts)]
    client, sent = await client_of(pieces if seed else [data])
    result = await client.ended
    assert (result.num_deltas, client.error) == (3, "")
    assert result.kinds == [
        "session.created",
        "response.created",
        "response.output_text.done",
        "response.done",
    ]
    assert result.response["usage"] == {"output_tokens": 3}
    assert sent.data.endswith(b"\x8a\x80\0\0\0\0"), "a ping has no pong"
    assert len(client.gaps_s) == 2


@pytest.mark.parametrize(
    "data",
    [
        event("error", error={"code": "bad", "message": "no"}),
        frame(b"\x03\xe8bye", 0x88),
        frame(b"x", 0xC1),  # compressed, though nobody has offered it
        frame(b"x", 0x82),
    ],
)
async def test_anything_else_is_no_measurement(data: bytes) -> None:
    client, sent = await client_of([*TURN[:2], data])
    assert client.error
    assert sent.is_aborted
    with pytest.raises(RuntimeError):
        await client.ended


async def test_a_refusal_is_told() -> None:
    client, sent = WebSocketClient("localhost", "m"), Sent()
    client.connection_made(sent)
    client.data_received(b"HTTP/1.1 403 Forbidden\r\n\r\n")
    with pytest.raises(RuntimeError, match="403"):
        await client.opened


@pytest.mark.parametrize("num_bytes", [0, 125, 126, 65_535, 65_536])
async def test_another_implementation_reads_what_is_sent(num_bytes: int) -> None:
    got: asyncio.Queue[Any] = asyncio.Queue()

    async def served(connection: ServerConnection) -> None:
        assert connection.request is not None
        got.put_nowait(connection.request.path)
        await connection.send(json.dumps({"type": "session.created"}))
        async for message in connection:
            got.put_nowait(message)

    async with serve(served, "127.0.0.1", 0, compression=None, max_size=None) as server:
        client = await open_conversation("127.0.0.1", server.sockets[0].getsockname()[1], "a-model")
        client.send({"type": "x", "text": "y" * num_bytes})
        assert await got.get() == "/v1/realtime?model=a-model"
        assert json.loads(await got.get()) == {"type": "x", "text": "y" * num_bytes}
        client.close()


def test_a_handshake_offers_no_compression_and_frames_are_masked() -> None:
    assert b"extensions" not in handshake("localhost", "m").lower()
    assert text_frame(b"ab") == b"\x81\x82\0\0\0\0ab"
    assert masked_frame(0x8A, b"") == b"\x8a\x80\0\0\0\0"


def test_gateways_stages_are_told_from_waits() -> None:
    timings = {"parse_ms": 1.0, "tokenize_ms": 2.0, "queue_ms": 50.0, "ttft_ms": 60.0, "cached_tokens": 9}
    assert of_gateway(timings) == 3
    with pytest.raises(RuntimeError):
        of_gateway({"ttft_ms": 1.0})


def test_the_text_of_a_response_is_that_of_its_message() -> None:
    assert text_of({"output": [{"content": [{"text": "s\0aid"}]}]}) == "said"


def test_windows_are_one_after_the_other() -> None:
    windows = Windows([Window(1.0, [20, 21, 40]), Window(3.0, [20, 20, 20])])
    assert windows.us == [1, 3]
    assert windows.gaps_ms(0.5) == [21, 20]
    assert KINDS[-1] == "response.done"
