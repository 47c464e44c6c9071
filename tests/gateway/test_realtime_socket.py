"""The WebSocket route: who is let in, what reaches the talk, and that every end reaches it once."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from time import monotonic
from typing import Any

import pytest

from gateway.keys import ApiKeys
from gateway.outlet import ReaderLimits
from gateway.realtime_admission import Admission
from gateway.realtime_ports import OpenedSocket
from gateway.realtime_socket import RealtimeLimits, RealtimeSocket
from gateway.server import _config
from gateway.settings import Settings
from gateway.settings_realtime import Realtime
from gateway.settings_table import with_values
from pipeline.errors import HeadraceError, UnknownModel
from tests.gateway.talking import EchoService, EchoTalk, served
from tests.websocket_wire import BINARY, TEXT, close_frame, frame, handshake, offer, websocket
from tests.wire import connect

KEY = "sk-a.b_c"


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - of a server's state, which has no event
            await asyncio.sleep(0.005)


# Who is let in


async def denied(
    port: int, headers: dict[str, str | None], path: str = "/v1/realtime"
) -> tuple[int, str, Any]:
    async with connect(port) as wire:
        head = await handshake(wire, path, headers)
        error = (await wire.json())["error"]
        assert await wire.closed_by_peer()
        return head.status, error["code"], head


async def test_a_page_gets_in_with_its_key_as_a_subprotocol_that_is_not_echoed() -> None:
    service = EchoService(keys=(KEY,), origins=("https://a.example",))
    offered = f"realtime, openai-insecure-api-key.{KEY}, openai-beta.realtime-v1"
    headers: dict[str, str | None] = {"origin": "https://a.example", "sec-websocket-protocol": offered}
    async with served(service) as port, websocket(port, "/v1/realtime?model=m", headers) as client:
        assert client.head["sec-websocket-protocol"] == "realtime"
        assert KEY not in repr(client.head)
        await client.send(frame(TEXT, b"hi"))
        assert await client.text() == "hi"
        opened = service.talks[0].socket
        assert opened.query == {"model": "m"}
        assert opened.key_id is not None
        assert KEY not in repr(opened)


async def test_without_the_realtime_subprotocol_none_is_answered() -> None:
    headers: dict[str, str | None] = {"sec-websocket-protocol": f"openai-insecure-api-key.{KEY}"}
    async with served(EchoService(keys=(KEY,))) as port, websocket(port, headers=headers) as client:
        assert client.head.get("sec-websocket-protocol") is None


async def test_a_wrong_key_and_a_foreign_page_are_denied_before_anything_is_opened() -> None:
    service = EchoService(keys=(KEY,))
    async with served(service) as port:
        status, code, head = await denied(port, {"authorization": "Bearer wrong"})
        assert (status, code) == (401, "invalid_api_key")
        assert head["www-authenticate"].startswith("Bearer")
        status, code, _ = await denied(port, {"origin": "https://evil.example"})
        assert (status, code) == (403, "origin_not_allowed")
    assert service.talks == []


async def test_more_conversations_than_allowed_are_told_to_come_again() -> None:
    service = EchoService(max_conversations=2)
    async with served(service) as port:
        async with websocket(port), websocket(port):
            assert service.socket.num_open == 2
            status, code, head = await denied(port, {})
            assert (status, code) == (503, "too_many_conversations")
            assert head["retry-after"] == "1"
        await until(lambda: service.socket.num_open == 0)
        async with websocket(port):
            assert service.socket.num_open == 1


async def test_what_the_factory_raises_is_the_answer() -> None:
    def factory(socket: OpenedSocket) -> EchoTalk:
        if socket.query.get("model") == "broken":
            raise ValueError(KEY)
        raise UnknownModel(socket.query.get("model", ""))

    route = RealtimeSocket(factory, Admission(ApiKeys(())))
    service = EchoService()
    service.socket = route
    async with served(service) as port:
        assert (await denied(port, {}, "/v1/realtime?model=x"))[:2] == (404, "model_not_found")
        assert (await denied(port, {}, "/v1/realtime?model=broken"))[:2] == (500, "internal_error")
    assert route.num_open == 0


async def test_a_plain_request_is_told_to_upgrade() -> None:
    async with served(EchoService()) as port, connect(port) as wire:
        head = await wire.request("GET", "/v1/realtime")
        assert (head.status, head["upgrade"]) == (426, "websocket")
        assert (await wire.json())["error"]["code"] == "websocket_required"


# What is said


async def test_a_binary_message_is_an_error_and_the_talk_goes_on() -> None:
    service = EchoService()
    async with served(service) as port, websocket(port) as client:
        await client.send(frame(BINARY, b"\x00"), frame(TEXT, b"hi"))
        assert await client.text() == "error None"
        assert await client.text() == "hi"
    assert service.talks[0].heard == ["hi"]


async def test_the_talk_may_close_with_a_code_and_a_reason() -> None:
    service = EchoService()
    async with served(service) as port, websocket(port) as client:
        service.talks[0].socket.outlet.push(b"last")
        service.talks[0].socket.outlet.close(4001, "done")
        assert await client.text() == "last"
        received = await client.read()
        assert (received.code, received.reason) == (4001, "done")
        await client.send(close_frame(4001))
        assert await client.wire.closed_by_peer()
    assert service.talks[0].losses == ["closed with 4001"]


async def test_what_came_before_the_close_was_known_is_not_said_any_more() -> None:
    class Curt(EchoTalk):
        def received(self, text: str) -> None:
            self.heard.append(text)
            self.socket.outlet.close(4001, "done")

    service = EchoService(talk=Curt)
    async with served(service) as port, websocket(port) as client:
        await client.send(frame(TEXT, b"1"), frame(TEXT, b"2"), frame(BINARY, b"3"))
        assert (await client.read()).code == 4001
    assert service.talks[0].heard == ["1"]
    assert service.talks[0].refusals == []


class FaultyTalk(EchoTalk):
    """Fails where it is told to."""

    def received(self, text: str) -> None:
        raise ValueError(KEY)


async def test_a_fault_of_the_talk_ends_its_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    service = EchoService()
    async with served(service) as port, websocket(port) as other:
        service.talk = FaultyTalk
        async with websocket(port) as client:
            await client.send(frame(TEXT, b"hi"))
            assert (await client.read()).code == 1011
        await other.send(frame(TEXT, b"hi"))
        assert await other.text() == "hi"
        assert service.talks[1].losses == ["internal_error"]
    assert "unexpected ValueError" in caplog.text
    assert KEY not in caplog.text


# How it ends


async def test_every_end_reaches_the_talk_once() -> None:
    service = EchoService()
    async with served(service) as port:
        async with websocket(port) as client:
            await client.send(close_frame(4000, KEY.encode()))
            assert await client.closed() == 4000
        async with websocket(port) as client:
            client.wire.reset()
        async with websocket(port) as client:
            await client.send(frame(3))
            assert await client.closed() == 1002
        async with websocket(port):
            pass
        await until(lambda: service.socket.num_open == 0)
    losses = [talk.losses for talk in service.talks]
    assert [len(each) for each in losses] == [1, 1, 1, 1]
    assert losses[0] == ["closed with 4000"]
    assert losses[2] == ["closed with 1002"]
    assert KEY not in repr(losses)


@pytest.mark.parametrize("end", ["close", "reset", "cut", "in the middle of a message"])
async def test_nothing_of_a_connection_waits_for_the_garbage_collector(end: str) -> None:
    """Whose full collection may never come: each would keep its conversation."""
    service = EchoService()
    gc.collect()
    gc.disable()
    try:
        async with served(service) as port:
            async with websocket(port) as client:
                send: Any = service.talks[0].socket.outlet._send
                watched = service.talks.pop(), send.__self__, send.__self__.conn
                kept = [weakref.ref(each) for each in watched]
                del send, watched
                await client.send(frame(TEXT, b"hi"))
                assert await client.text() == "hi"
                if end == "reset":
                    client.wire.reset()
                elif end == "cut":
                    service.cut()
                    assert await client.text() == "error None"
                    assert (await client.read()).code == 1012
                elif end == "close":
                    await client.send(close_frame(1000))
                    assert await client.closed() == 1000
                else:
                    await client.send(frame(TEXT, b"x", fin=False), frame(0, b"x" * 1000)[:-1])
            await until(lambda: all(each() is None for each in kept))
    finally:
        gc.enable()


async def test_an_idle_conversation_is_told_and_closed_and_one_with_a_response_is_not() -> None:
    service = EchoService(idle_s=60.0)
    async with served(service) as port, websocket(port) as idle, websocket(port) as busy:
        service.talks[1].is_idle = False
        service.socket.check(monotonic() + 50)
        service.socket.check(monotonic() + 70)
        service.socket.check(monotonic() + 70)  # tells it once
        assert await idle.text() == "error session_idle"
        received = await idle.read()
        assert (received.code, received.reason) == (1000, "session_idle")
        await busy.send(frame(TEXT, b"hi"))
        assert await busy.text() == "hi"
    assert [len(talk.refusals) for talk in service.talks] == [1, 0]
    assert [(record.ended, record.status) for record in service.records] == [
        ("session_idle", 101),
        ("closed", 101),
    ]


@pytest.mark.parametrize("sign", ["a message", "an answer"])
async def test_a_sign_of_life_makes_the_idle_time_start_anew(sign: str) -> None:
    service = EchoService(idle_s=60.0)
    async with served(service) as port, websocket(port) as client:
        (connection,) = service.socket._connections
        now_s = connection.heard_s = service.talks[0].last_active_s = monotonic() - 50
        if sign == "a message":
            await client.send(frame(TEXT, b"hi"))
            assert await client.text() == "hi"
        else:
            service.talks[0].last_active_s = monotonic()
        service.socket.check(now_s + 70)
        assert not service.talks[0].refusals
        service.socket.check(monotonic() + 70)
        assert await client.text() == "error session_idle"


async def test_a_conversation_does_not_live_for_ever() -> None:
    service = EchoService(idle_s=1e9, limit_s=3600.0)
    async with served(service) as port, websocket(port) as client:
        service.talks[0].is_idle = False
        service.socket.check(monotonic() + 3700)
        service.talks[0].is_idle = True
        service.socket.check(monotonic() + 3500)
        assert not service.talks[0].refusals
        service.socket.check(monotonic() + 3700)
        assert await client.text() == "error session_expired"
        assert (await client.read()).code == 1000


async def test_a_drain_ends_idle_conversations_lets_responses_end_and_takes_no_new_ones() -> None:
    service = EchoService()
    async with served(service) as port, websocket(port) as idle, websocket(port) as busy:
        service.talks[1].is_idle = False
        service.socket.drain()
        assert await idle.text() == "error draining"
        assert (await idle.read()).code == 1001
        assert (await denied(port, {}))[:2] == (503, "draining")
        service.talks[1].socket.outlet.push(b"still answering")
        assert await busy.text() == "still answering"
        service.socket.check(monotonic())
        assert service.socket.num_open == 1
        service.talks[1].is_idle = True
        service.socket.check(monotonic())
        assert await busy.text() == "error draining"
        assert (await busy.read()).code == 1001
        await until(lambda: service.socket.num_open == 0)


async def test_a_cut_ends_all_with_a_named_error() -> None:
    service = EchoService()
    async with served(service) as port, websocket(port) as client:
        service.talks[0].is_idle = False
        error = HeadraceError("cut")
        error.code = "cut"
        service.socket.cut(error)
        service.socket.cut(error)
        assert await client.text() == "error cut"
        assert (await client.read()).code == 1012
    assert len(service.talks[0].losses) == 1


async def test_a_fault_of_one_talk_does_not_stop_the_looks_at_the_others() -> None:
    class Broken(EchoTalk):
        def refused(self, error: HeadraceError) -> None:
            raise ValueError(KEY)

    service = EchoService(idle_s=60.0)
    async with served(service) as port, websocket(port) as first, websocket(port) as second:
        del service.talks[0].is_idle  # now it raises
        service.socket.check(monotonic() + 70)
        assert await first.wire.closed_by_peer()
        assert await second.text() == "error session_idle"
        await until(lambda: service.talks[0].losses == ["internal_error"])


# A client that does not read


def deaf_client(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(10)
    client.connect(("127.0.0.1", port))
    client.sendall(offer("/v1/realtime"))
    return client


@pytest.mark.parametrize("limit", ["bytes", "time"])
async def test_a_client_that_does_not_read_is_cut_in_bounded_memory(limit: str) -> None:
    service = EchoService()
    max_bytes = 100_000 if limit == "bytes" else 10_000_000
    service.socket._reader = ReaderLimits(max_bytes, 30.0)
    async with served(service) as port:
        with deaf_client(port) as client:
            await until(lambda: service.talks and service.talks[0].is_opened)
            talk = service.talks[0]
            for _ in range(200):
                talk.socket.outlet.push(b"x" * 10_000)
                await asyncio.sleep(0)
            if limit == "time":
                assert talk.socket.outlet.num_buffered > 0
                service.socket.check(monotonic() + 20)
                assert not talk.losses
                service.socket.check(monotonic() + 31)
            assert len(talk.losses) == 1
            assert ("limit is 100000" if limit == "bytes" else "has not read for 31 s") in talk.losses[0]
            assert talk.socket.outlet.peak <= max_bytes + 10_000
            await until(lambda: service.socket.num_open == 0)
            assert talk.socket.outlet.num_buffered == 0
            client.setblocking(False)
            num_bytes = 0
            while data := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1 << 16), 10):
                num_bytes += len(data)
            assert num_bytes < 1_000_000  # half of it: what waited here is forgotten, not sent on


async def test_a_client_that_asks_for_more_than_it_has_read_is_not_heard_until_it_has() -> None:
    """One that restores a long history at once, on a slow line, must not be cut for what it is sent back."""
    service = EchoService()
    service.socket._reader = ReaderLimits(100_000, 30.0)
    asked = [b"%03d" % number + b"x" * (60_000 if number % 20 else 300_000) for number in range(100)]
    async with served(service) as port, websocket(port) as client:
        sending = asyncio.create_task(client.send(*(frame(TEXT, text) for text in asked)))
        await until(lambda: service.talks[0].socket.outlet.num_buffered > 50_000)
        for _ in range(20):
            await asyncio.sleep(0)
        (talk,) = service.talks
        assert len(talk.heard) < len(asked)
        assert [(await client.text()).encode() for _ in asked] == asked
        await sending
        assert not talk.losses
        assert talk.socket.outlet.peak < 500_000


async def test_a_client_that_reads_late_gets_everything_in_order() -> None:
    service = EchoService()
    service.socket._reader = ReaderLimits(10_000_000, 30.0)
    texts = [f"{number}" * 1000 for number in range(500)]
    async with served(service) as port, websocket(port) as client:
        for text in texts:
            service.talks[0].socket.outlet.push(text.encode())
        assert [await client.text() for _ in texts] == texts


# Settings


def test_the_settings_reach_the_server() -> None:
    settings = with_values(
        Settings(), websocket_max_bytes=2048, websocket_ping_s=7.0, websocket_ping_limit_s=3.0
    )
    config = _config(EchoService(), settings)
    assert (config.ws_max_size, config.ws_ping_interval, config.ws_ping_timeout) == (2048, 7.0, 3.0)


def test_the_defaults_are_those_of_the_settings() -> None:
    settings, limits = Realtime(), RealtimeLimits()
    assert limits == RealtimeLimits(
        settings.max_conversations, settings.realtime_idle_s, settings.realtime_limit_s
    )
