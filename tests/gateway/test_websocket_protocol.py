"""What a client can make a WebSocket hold or do, how the ends reach it, and what is logged."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.server import ServerState

from gateway import websocket_protocol
from gateway.exchange import ABORT_EXTENSION
from gateway.http_protocol import HttpConfig, HttpProtocol
from gateway.websocket_protocol import MAX_CONTROL_FRAMES, PIECE_BYTES, WebSocketProtocol
from tests.gateway.answering import turns
from tests.gateway.talking import EchoService, served
from tests.gateway.tiny_app import TinyApp
from tests.websocket_wire import (
    BINARY,
    CLOSE,
    CONT,
    PING,
    PONG,
    TEXT,
    Received,
    close_frame,
    frame,
    handshake,
    offer,
    websocket,
)
from tests.wire import connect

SECRET = "sk-do-not-log-me"
HEAD = offer("/v1/realtime")
MOST_PER_PIECE = PIECE_BYTES // 6 + 1  # the smallest frames


class Transport(asyncio.Transport):
    """Remembers what is done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_paused = False
        self.ends: list[str] = []
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return "close" in self.ends or "abort" in self.ends

    def close(self) -> None:
        self.ends.append("close")

    def abort(self) -> None:
        self.ends.append("abort")

    def write_eof(self) -> None:
        self.ends.append("eof")

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol


class Played:
    """A WebSocket without a socket. The app takes what comes when the test lets it."""

    def __init__(self) -> None:
        self.transport = Transport()
        self.scope: Any = None
        self.receive: Any = None
        self.send: Any = None
        self._over = asyncio.Event()

    async def open(self, accepts: bool = True, behind: bytes = b"", is_paused: bool = False) -> Played:
        config = HttpConfig(self, max_header_bytes=1 << 16, header_limit_s=20, log_config=None)
        config.load()
        self.state = ServerState()
        http = HttpProtocol(config, server_state=self.state, app_state={}, _loop=asyncio.get_running_loop())
        http.connection_made(self.transport)
        if is_paused:
            http.pause_writing()
        http.data_received(HEAD + behind)
        await turns()
        assert (await self.receive())["type"] == "websocket.connect"
        if accepts:
            await self.accept()
        return self

    async def accept(self) -> None:
        await self.send({"type": "websocket.accept"})
        assert self.transport.written.startswith(b"HTTP/1.1 101 ")
        del self.transport.written[: self.transport.written.index(b"\r\n\r\n") + 4]

    @property
    def protocol(self) -> WebSocketProtocol:
        assert isinstance(self.transport.protocol, WebSocketProtocol)
        return self.transport.protocol

    def feed(self, *frames: bytes) -> None:
        self.protocol.data_received(b"".join(frames))

    def lose(self) -> None:
        self.protocol.connection_lost(None)
        self._over.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        await self._over.wait()

    @property
    def sent(self) -> list[Received]:
        """The server's frames so far; short ones only."""
        data, found = bytes(self.transport.written), []
        while data:
            end = 2 + data[1]
            assert data[1] < 126
            found.append(Received(data[0] & 0x0F, data[2:end], bool(data[0] & 0x80)))
            data = data[end:]
        return found


@pytest.fixture
async def played() -> Any:
    made = await Played().open()
    yield made
    if made.protocol in made.state.connections:
        made.lose()
    await turns()


# What a client can make it hold


async def test_of_many_messages_in_one_read_few_are_held_and_all_arrive(played: Played) -> None:
    texts = [f"{number}" for number in range(20_000)]
    played.feed(*(frame(TEXT, text.encode()) for text in texts))
    assert played.transport.is_paused
    for text in texts:
        assert played.protocol.queue.qsize() <= MOST_PER_PIECE
        assert (await played.receive())["text"] == text
    await turns()
    assert not played.transport.is_paused
    played.feed(frame(TEXT, b"more"))
    assert (await played.receive())["text"] == "more"


async def test_nothing_more_is_read_until_the_app_takes_it(played: Played) -> None:
    played.feed(frame(TEXT, b"1"))
    await turns()
    assert played.transport.is_paused
    played.feed(frame(TEXT, b"2"))  # what the transport had read already
    assert played.protocol.queue.qsize() == 1
    assert [(await played.receive())["text"] for _ in range(2)] == ["1", "2"]
    assert not played.transport.is_paused


async def test_a_flood_of_frames_leaves_others_their_turn(played: Played) -> None:
    num_frames = 20_000
    num_turns = 0
    played.feed(frame(TEXT, b"", fin=False), frame(CONT, b"", fin=False) * num_frames, frame(CONT, b"end"))
    assert played.transport.is_paused
    while played.protocol.queue.empty():
        await asyncio.sleep(0)
        num_turns += 1
    limit = websocket_protocol.MAX_FRAMES_PER_TURN + MOST_PER_PIECE
    assert num_turns >= num_frames // limit
    assert (await played.receive())["text"] == "end"


async def test_a_message_in_many_fragments_is_held_as_one(played: Played) -> None:
    played.feed(frame(TEXT, b"a", fin=False), frame(CONT, b"b", fin=False) * 200)
    assert [len(each) for each in played.protocol.frames] == [201]
    played.feed(frame(CONT, b"c"))
    assert (await played.receive())["text"] == "a" + "b" * 200 + "c"


async def test_what_follows_an_error_is_not_looked_at(played: Played) -> None:
    played.feed(frame(TEXT, b"\xff"), frame(TEXT, b"a"), frame(CLOSE, b""), frame(TEXT, b"b"))
    assert (await played.receive())["type"] == "websocket.disconnect"
    assert played.protocol.queue.empty()
    assert played.transport.ends == ["eof"]


async def test_too_many_fragments_end_the_connection(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_protocol, "MAX_FRAGMENTS", 100)
    played.feed(frame(TEXT, b"", fin=False), frame(CONT, b"", fin=False) * 99, frame(CONT, b"a"))
    assert (await played.receive())["text"] == "a"
    played.feed(frame(BINARY, b"", fin=False), frame(CONT, b"", fin=False) * 101)
    assert played.sent[-1].code == 1008
    assert (await played.receive())["code"] == 1008


@pytest.mark.parametrize("opcode", [PING, PONG])
async def test_too_many_control_frames_without_a_message_end_the_connection(
    played: Played, opcode: int
) -> None:
    for _ in range(2):
        played.feed(frame(opcode) * MAX_CONTROL_FRAMES)
        await turns(20)
        played.feed(frame(TEXT, b"a"))
        assert (await played.receive())["text"] == "a"
    played.feed(frame(opcode) * (MAX_CONTROL_FRAMES + 1))
    await turns(20)
    assert played.sent[-1].code == 1008


async def test_a_client_that_answers_our_pings_may_send_its_own_for_ever(played: Played) -> None:
    for _ in range(3):
        played.feed(frame(PING) * (MAX_CONTROL_FRAMES - 1))
        await turns(20)
        played.protocol.send_keepalive_ping()
        ping = played.sent[-1]
        assert ping.opcode == PING
        played.feed(frame(PONG, ping.payload))
    assert CLOSE not in [each.opcode for each in played.sent]


async def test_a_client_that_does_not_read_gets_one_pong_later(played: Played) -> None:
    played.protocol.pause_writing()
    played.feed(*(frame(PING, b"%d" % number) for number in range(500)))
    await turns(10)
    assert played.sent == []
    played.protocol.resume_writing()
    assert played.sent == [Received(PONG, b"499")]


async def test_a_client_that_does_not_read_is_still_heard_and_told_of_its_error(played: Played) -> None:
    played.protocol.pause_writing()
    played.feed(frame(PING, b"p"), frame(TEXT, b"cancel"))
    assert (await played.receive())["text"] == "cancel"
    played.feed(frame(3))
    assert [each.opcode for each in played.sent] == [CLOSE]


# What goes out


async def test_nothing_goes_out_before_the_app_has_accepted() -> None:
    played = await Played().open(accepts=False, behind=frame(PING, b"early") + frame(TEXT, b"a"))
    assert played.transport.is_paused
    assert played.transport.written == b""
    await played.accept()
    await turns()
    assert played.sent == [Received(PONG, b"early")]
    assert (await played.receive())["text"] == "a"
    played.lose()


async def test_text_waits_for_a_client_that_does_not_read(played: Played) -> None:
    played.protocol.pause_writing()
    sending = asyncio.create_task(played.send({"type": "websocket.send", "text": "é"}))
    await turns()
    assert not sending.done()
    played.protocol.resume_writing()
    await sending
    assert played.sent == [Received(TEXT, "é".encode())]


async def test_binary_messages_go_the_general_way(played: Played) -> None:
    await played.send({"type": "websocket.send", "bytes": b"\x00"})
    assert played.sent == [Received(BINARY, b"\x00")]


ENDS: dict[str, Callable[[Played], Any]] = {
    "a close": lambda played: played.feed(close_frame(1000)),
    "an error": lambda played: played.feed(frame(3)),
    "the end of the input": lambda played: played.protocol.eof_received(),
    "a lost connection": lambda played: played.protocol.connection_lost(OSError()),
    "a shutdown": lambda played: played.protocol.shutdown(),
    "no answer to a ping": lambda played: played.protocol.keepalive_timeout(),
}


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("name", ENDS)
async def test_sending_after_an_end_says_that_the_client_has_gone(
    played: Played, name: str, blocked: bool
) -> None:
    message = {"type": "websocket.send", "text": "a"}
    if blocked:
        played.protocol.pause_writing()
        sending = asyncio.create_task(played.send(message))
        await turns()
        ENDS[name](played)
        played.protocol.resume_writing()
    else:
        ENDS[name](played)
        sending = asyncio.create_task(played.send(message))
    with pytest.raises(ClientDisconnected):
        await sending
    assert TEXT not in [each.opcode for each in played.sent]


@pytest.mark.parametrize("first", ENDS)
@pytest.mark.parametrize("second", [name for name in ENDS if name != "a lost connection"])
async def test_ends_may_follow_each_other(played: Played, first: str, second: str) -> None:
    """At most one close goes out, and nothing is raised to the server."""
    ENDS[first](played)
    ENDS[second](played)
    assert [each.opcode for each in played.sent].count(CLOSE) <= 1
    assert played.sent[-1:] == [each for each in played.sent if each.opcode == CLOSE]


async def test_a_message_after_the_apps_close_is_not_kept(played: Played) -> None:
    await played.send({"type": "websocket.close", "code": 4000, "reason": "enough"})
    played.feed(frame(TEXT, b"late") * 5000)
    assert (await played.receive()) == {"type": "websocket.disconnect", "code": 4000, "reason": "enough"}
    await turns(30)
    assert played.protocol.queue.empty()
    assert not played.transport.is_paused
    assert not played.transport.is_closing()
    played.feed(close_frame(4000))
    assert played.transport.ends == ["close"]


@pytest.mark.parametrize("name", [name for name in ENDS if name != "a lost connection"])
async def test_a_client_that_neither_reads_nor_answers_is_cut(
    played: Played, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket_protocol, "CLOSE_LIMIT_S", 0.0)
    ENDS[name](played)
    await asyncio.sleep(0.01)
    assert played.transport.ends[-1] == "abort"


async def test_a_close_that_is_not_answered_is_cut(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_protocol, "CLOSE_LIMIT_S", 0.0)
    await played.send({"type": "websocket.close"})
    await asyncio.sleep(0.01)
    assert played.transport.ends == ["abort"]


async def test_the_app_may_cut_the_connection(played: Played) -> None:
    played.scope["extensions"][ABORT_EXTENSION]()
    assert played.transport.ends == ["abort"]


async def test_an_answer_to_a_ping_that_nobody_has_read_yet_is_waited_for(played: Played) -> None:
    played.feed(frame(TEXT, b"a"), frame(TEXT, b"b"))
    assert played.transport.is_paused
    played.protocol.keepalive_timeout()
    assert played.sent == []
    await played.receive()
    await turns()
    await played.receive()
    assert not played.transport.is_paused
    played.protocol.keepalive_timeout()
    assert played.sent[0].code == 1011


# On a real server


async def test_a_client_that_does_not_answer_pings_is_told_and_let_go() -> None:
    options: dict[str, Any] = {"ws_ping_interval": 0.01, "ws_ping_timeout": 0.05}
    async with served(EchoService(), **options) as port, websocket(port) as socket:
        assert (await socket.read()).opcode == PING
        assert await socket.closed() == 1011


async def test_a_client_that_answers_pings_stays() -> None:
    options: dict[str, Any] = {"ws_ping_interval": 0.01, "ws_ping_timeout": 30.0}
    async with served(EchoService(), **options) as port, websocket(port) as socket:
        for _ in range(5):
            ping = await socket.read()
            assert ping.opcode == PING
            await socket.send(frame(PONG, ping.payload))


async def test_a_server_that_ends_says_so() -> None:
    async with AsyncExitStack() as serving:
        port = await serving.enter_async_context(served(TinyApp()))
        async with websocket(port) as socket:
            ending = asyncio.create_task(serving.aclose())
            assert await socket.closed() == 1012
        await ending


async def test_no_line_holds_the_query_or_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    service = EchoService(origins=("https://a.example",))
    async with served(service) as port:
        async with websocket(port, f"/v1/realtime?key={SECRET}") as socket:
            await socket.send(frame(TEXT, SECRET.encode()))
            assert await socket.text() == SECRET
            await socket.send(frame(TEXT, SECRET.encode() + b"\xff"))
            assert await socket.closed() == 1007
        async with connect(port) as wire:
            path, origin = f"/v1/realtime?key={SECRET}", {"origin": f"https://{SECRET}.example"}
            assert (await handshake(wire, path, origin)).status == 403
    assert SECRET not in caplog.text
    assert "/v1/realtime" not in caplog.text


async def test_a_fault_of_the_app_is_logged_by_its_place(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(TinyApp):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "websocket":
                raise ValueError(SECRET)

    async with served(Faulty()) as port, connect(port) as wire:
        assert (await handshake(wire, "/")).status == 500
    assert "unexpected ValueError" in caplog.text
    assert __file__ in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_a_head_over_the_limit_is_431_and_nothing_follows(in_pieces: bool) -> None:
    options = {"max_header_bytes": 4096}
    service = EchoService()
    async with served(service, **options) as port, connect(port) as wire:
        head = HEAD[:-2] + b"cookie: " + b"c" * 5000 + b"\r\n\r\n"
        for start in range(0, len(head), 1500) if in_pieces else (0,):
            await wire.send(head[start : start + 1500] if in_pieces else head)
            await asyncio.sleep(0.001)
        assert (await wire.head()).status == 431
        assert json.loads(await wire.body())["error"]["code"] == "headers_too_large"
        assert await wire.closed_by_peer()
    assert service.talks == []


async def test_an_offer_behind_a_request_that_runs_is_ignored() -> None:
    """A WebSocket's answer would come into the midst of the other one."""
    async with served(TinyApp()) as port, connect(port) as wire:
        await wire.send(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi" + HEAD)
        assert await wire.head()
        assert await wire.body() == b"2"
        assert (await wire.head()).status == 200


async def test_an_offer_behind_a_request_that_was_answered_is_taken() -> None:
    async with served(TinyApp()) as port, connect(port) as wire:
        await wire.request("GET", "/")
        assert await wire.body() == b"ok"
        assert (await handshake(wire, "/")).status == 101
