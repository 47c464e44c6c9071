"""The HTTP client with real sockets, on both loops: connections that are kept, stale, cut, aborted."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backend import http_socket
from backend.http_call import HttpTimeout, head_of
from backend.http_client import HttpClient, HttpLimits
from backend.http_ports import HttpFault, HttpRequest, Origin
from backend.http_socket import Delivery
from tests.backend.http_server import Kept, Peer, on_both_loops, serving
from tests.backend.long_body import LongBody
from tests.components import need

GET = HttpRequest("GET", "/x")
POST = HttpRequest("POST", "/x?y=1", [(b"a", b"b")], b"hello")
LIMIT_S = 60.0  # of what must happen: no test waits for it
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def client_of(**limits: Any) -> AsyncIterator[HttpClient]:
    client = HttpClient(HttpLimits(**{"keep_alive_s": LIMIT_S} | limits))
    try:
        yield client
    finally:
        await client.close()
    assert client.num_connections == 0


async def fetched(client: HttpClient, origin: Origin, request: HttpRequest = GET) -> bytes:
    response = await client.fetch(origin, request, LIMIT_S, 1 << 30)
    return response.body


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def answer_all(peer: Peer, number: int) -> None:
    """The connection's number and what it was asked, again and again."""
    while True:
        line, headers, body = await peer.request()
        await peer.answer(b"%d|%b|%b" % (number, line.encode(), repr(headers).encode() + body))


@on_both_loops
async def test_request_is_written_as_it_should_be() -> None:
    async with serving(answer_all) as served, client_of() as client:
        host = f"127.0.0.1:{served.origin.port}"
        own = [(b"host", b"x"), (b"content-length", b"9"), (b"transfer-encoding", b"chunked"), (b"a", b"b")]
        for request, line, headers, body in (
            (GET, "GET /x", {"host": host}, b""),
            (POST, "POST /x?y=1", {"host": host, "content-length": "5", "a": "b"}, b"hello"),
            (HttpRequest("POST", "/", own), "POST /", {"host": host, "content-length": "0", "a": "b"}, b""),
        ):
            expected = f"0|{line} HTTP/1.1|{headers!r}".encode() + body
            assert await fetched(client, served.origin, request) == expected


@pytest.mark.parametrize(
    "request_",
    [
        HttpRequest("GET", "/x", [(b"a", b"b\r\nc: d")]),
        HttpRequest("GET", "/x", [(b"a\n", b"b")]),
        HttpRequest("GET", "/x", [(b"a", b"b\r")]),
        HttpRequest("GET", "/x y"),
        HttpRequest("GET", "/x\r\n"),
        HttpRequest("GET /y", "/x"),
        HttpRequest("GET", "/\u00e9"),
    ],
)
def test_request_that_would_be_another_one_is_refused(request_: HttpRequest) -> None:
    with pytest.raises(ValueError, match=r"line break|ascii"):
        head_of(Origin("localhost", 80), request_)


def test_host_header_names_ports_and_addresses() -> None:
    for origin, host in (
        (Origin("localhost", 80), b"localhost"),
        (Origin("::1", 8000), b"[::1]:8000"),
        (Origin("localhost", 443, ssl.create_default_context()), b"localhost"),
    ):
        assert head_of(origin, GET) == b"GET /x HTTP/1.1\r\nhost: " + host + b"\r\n\r\n"


@on_both_loops
async def test_connections_are_used_again_and_no_more_of_them_than_needed() -> None:
    async with serving(answer_all) as served, client_of() as client:
        for _ in range(5):
            assert (await fetched(client, served.origin)).startswith(b"0|")
        found = await asyncio.gather(*(fetched(client, served.origin) for _ in range(4)))
        assert {body[:2] for body in found} == {b"0|", b"1|", b"2|", b"3|"}
        assert (client.num_connections, client.num_idle) == (4, 4)
        await asyncio.gather(*(fetched(client, served.origin) for _ in range(4)))
        assert served.num_connections == 4


@on_both_loops
async def test_a_request_from_ended_takes_the_same_connection() -> None:
    async with serving(answer_all) as served, client_of() as client:
        first, second = Kept(), Kept()
        end = first.ended

        def ended() -> None:
            end()
            client.send(served.origin, POST, second)

        first.ended = ended  # type: ignore[method-assign]
        client.send(served.origin, GET, first)
        await second.over.wait()
        assert second.body.startswith(b"0|POST")


@on_both_loops
async def test_idle_connections_are_bounded_in_number_and_age() -> None:
    async with serving(answer_all) as served:
        async with client_of(max_idle=2) as client:
            await asyncio.gather(*(fetched(client, served.origin) for _ in range(5)))
            assert client.num_idle == 2
            await until(lambda: client.num_connections == 2)
        async with client_of(keep_alive_s=0.01) as client:
            await fetched(client, served.origin)
            await until(lambda: client.num_connections == 0)
        async with client_of(keep_alive_s=0.0) as client:  # too old before anybody has swept
            await fetched(client, served.origin)
            before = served.num_connections
            await fetched(client, served.origin)
            assert served.num_connections == before + 1


@on_both_loops
async def test_a_connection_that_the_server_closes_while_idle_is_not_used() -> None:
    async def once(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.answer(b"%d" % number)

    async with serving(once) as served, client_of() as client:
        assert await fetched(client, served.origin) == b"0"
        await until(lambda: client.num_connections == 0)
        assert client.num_idle == 0
        assert await fetched(client, served.origin) == b"1"


@asynccontextmanager
async def closing_on_the_second(answer: bytes, then: bytes) -> AsyncIterator[tuple[Any, list[bytes]]]:
    """A server whose connections answer one request each, and break off at their second one, after `answer`.

    `then`: what a connection after the first says to its first request.
    """
    bodies: list[bytes] = []

    async def script(peer: Peer, number: int) -> None:
        _, _, body = await peer.request()
        bodies.append(body)
        if number == 0:
            await peer.answer(b"first")
            _, _, body = await peer.request()
            bodies.append(body)
            await peer.say(answer)
        elif then:
            await peer.answer(then)

    async with serving(script) as served:
        yield served, bodies


class ByHand:
    """A server whose sockets do nothing by themselves, whatever the event loop does."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.origin = Origin("127.0.0.1", self.listener.getsockname()[1])
        self.connections: list[socket.socket] = []

    async def accept(self) -> None:
        connection, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        connection.setblocking(False)
        self.connections.append(connection)

    async def asked(self) -> bytes:
        """The body of the newest connection's next request."""
        loop, data = asyncio.get_running_loop(), b""
        while not data.endswith(b"hello"):
            got = await loop.sock_recv(self.connections[-1], 1 << 16)
            assert got, "the client has left"
            data += got
        return data.partition(b"\r\n\r\n")[2]

    def answer(self, body: bytes) -> None:
        self.connections[-1].send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async def served(self, client: HttpClient, body: bytes) -> None:
        """A connection that is idle after one response."""
        receiver = Kept()
        client.send(self.origin, POST, receiver)
        await self.accept()
        await self.asked()
        self.answer(body)
        await receiver.over.wait()
        assert (receiver.body, client.num_idle) == (body, 1)


@asynccontextmanager
async def by_hand() -> AsyncIterator[ByHand]:
    server = ByHand()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield server
    finally:
        for each in (server.listener, *server.connections):
            each.close()


@pytest.mark.parametrize("left", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecret", b"\r\n"])
@on_both_loops
async def test_a_connection_on_which_something_waits_is_not_used_again(left: bytes) -> None:
    """The event loop has not read it yet: an end, or bytes that nobody has asked for."""
    async with by_hand() as server, client_of() as client:
        await server.served(client, b"first")
        server.connections[0].send(left) if left else server.connections[0].close()
        receiver = Kept()
        client.send(server.origin, POST, receiver)
        await server.accept()
        assert await server.asked() == b"hello"
        server.answer(b"second")
        await receiver.over.wait()
        assert receiver.body == b"second"


@pytest.mark.parametrize("request_", [POST, HttpRequest("PUT", "/x", (), bytes(3 << 20) + b"hello")])
@on_both_loops
async def test_a_request_that_a_closed_server_cannot_have_read_is_sent_once_more(
    monkeypatch: pytest.MonkeyPatch, request_: HttpRequest
) -> None:
    """The server closes while the request is on its way: what a look at the socket cannot show."""
    async with by_hand() as server, client_of() as client:
        await server.served(client, b"first")
        server.connections[0].close()
        monkeypatch.setattr(Delivery, "has_input", lambda self: False)
        receiver = Kept()
        client.send(server.origin, request_, receiver)
        await server.accept()
        assert await server.asked() == request_.body
        server.answer(b"second")
        await receiver.over.wait()
        assert (receiver.body, len(server.connections)) == (b"second", 2)


@on_both_loops
async def test_a_request_that_is_sent_once_more_is_not_sent_a_third_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with by_hand() as server, client_of() as client:
        await server.served(client, b"first")
        server.connections[0].close()
        monkeypatch.setattr(Delivery, "has_input", lambda self: False)
        receiver = Kept()
        client.send(server.origin, POST, receiver)
        await server.accept()
        await server.asked()
        server.connections[1].close()
        await receiver.over.wait()
        assert receiver.fault is not None
        assert (receiver.fault.began, receiver.fault.is_unreachable) == (False, False)
        with pytest.raises(BlockingIOError):
            server.listener.accept()


@on_both_loops
async def test_a_request_that_the_server_has_read_is_not_sent_again() -> None:
    """It may be what the server broke off for."""
    async with closing_on_the_second(b"", b"again") as (served, bodies), client_of() as client:
        await fetched(client, served.origin)
        with pytest.raises(HttpFault, match="closed the connection before its response") as caught:
            await fetched(client, served.origin, POST)
        assert (caught.value.began, caught.value.is_unreachable) == (False, False)
        assert bodies == [b"", b"hello"]


@on_both_loops
async def test_a_safe_request_is_sent_once_more_also_if_it_was_read() -> None:
    for then, num_requests in ((b"again", 3), (b"", 3)):
        async with closing_on_the_second(b"", then) as (served, bodies), client_of() as client:
            await fetched(client, served.origin)
            if then:
                assert await fetched(client, served.origin) == then
            else:
                with pytest.raises(HttpFault, match="before its response"):
                    await fetched(client, served.origin)
            assert len(bodies) == num_requests


@on_both_loops
async def test_what_a_server_says_before_the_request_has_reached_it_is_no_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second response to the request before, which is on its way while the next one is sent."""
    async with by_hand() as server, client_of() as client:
        monkeypatch.setattr(http_socket, "_num_acked", lambda sock: 100)
        await server.served(client, b"first")
        monkeypatch.setattr(Delivery, "has_input", lambda self: False)
        server.answer(b"secret")
        receiver = Kept()
        client.send(server.origin, POST, receiver)
        await server.accept()
        assert await server.asked() == b"hello"
        server.answer(b"second")
        await receiver.over.wait()
        assert receiver.body == b"second"


@pytest.mark.parametrize("callback", ["begun", "data", "ended", "failed"])
@pytest.mark.parametrize("error", [RecursionError("a user's text"), ValueError("a user's text")])
@on_both_loops
async def test_a_receiver_that_raises_fails_its_call_alone(
    caplog: pytest.LogCaptureFixture, callback: str, error: Exception
) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(CHUNKED + b"2\r\nhi\r\n")
        if callback in ("begun", "data"):
            await peer.gone()
        elif callback == "ended":
            await peer.say(b"0\r\n\r\n")
            await answer_all(peer, number)

    async with serving(script) as served, client_of() as client:
        receiver = Kept()
        was_told = asyncio.Event()

        def raises(*_: object) -> None:
            was_told.set()
            raise error

        setattr(receiver, callback, raises)
        client.send(served.origin, GET, receiver)
        await was_told.wait()
        if callback != "failed":
            await receiver.over.wait()
            assert type(error).__name__ in str(receiver.fault)
            assert "user" not in str(receiver.fault)
        await until(lambda: client.num_connections == client.num_idle)
        assert client.num_idle == (callback == "ended")  # there the response was whole
    assert caplog.text.count(f"unexpected {type(error).__name__}") == 1
    assert "a user's text" not in caplog.text
    caplog.clear()


@on_both_loops
async def test_a_request_is_not_sent_again_after_the_first_byte() -> None:
    async with closing_on_the_second(b"H", b"again") as (served, bodies), client_of() as client:
        await fetched(client, served.origin)
        with pytest.raises(HttpFault, match="in the middle of its response") as caught:
            await fetched(client, served.origin, POST)
        assert caught.value.began
        assert bodies == [b"", b"hello"]


@on_both_loops
async def test_a_request_on_a_fresh_connection_is_not_sent_again() -> None:
    async def leave(peer: Peer, number: int) -> None:
        await peer.request()

    async with serving(leave) as served, client_of() as client:
        with pytest.raises(HttpFault, match="before its response"):
            await fetched(client, served.origin)
        assert served.num_connections == 1


@on_both_loops
async def test_a_request_that_is_sent_again_takes_no_second_stale_connection() -> None:
    """All of a restarted server's connections are stale at once."""

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.answer(b"%d" % number)
        if number < 3:
            await peer.request()

    async with serving(script) as served, client_of() as client:
        await asyncio.gather(*(fetched(client, served.origin) for _ in range(3)))
        assert client.num_idle == 3
        assert await fetched(client, served.origin) == b"3"


@on_both_loops
async def test_an_abort_while_connecting_leaves_no_connection() -> None:
    num_gone = 0

    async def script(peer: Peer, number: int) -> None:
        nonlocal num_gone
        await peer.gone()
        num_gone += 1

    async with serving(script) as served, client_of() as client:
        for num_turns in range(12):
            receiver = Kept()
            call = client.send(served.origin, GET, receiver)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            call.abort()
            call.abort()
            call.pause()
            call.resume()
            await until(lambda: not client.num_connections)
            assert not receiver.end
        await until(lambda: num_gone == served.num_connections > 0)


@pytest.mark.parametrize("phase", ["sent", "head", "body"])
@on_both_loops
async def test_an_abort_closes_the_connection_and_nothing_more_is_told(phase: str) -> None:
    gone = asyncio.Event()
    asked = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        asked.set()
        if phase != "sent":
            await peer.say(CHUNKED)
        if phase == "body":
            await peer.say(b"2\r\nhi\r\n")
        await peer.gone()
        gone.set()

    async with serving(script) as served, client_of() as client:
        receiver = Kept()
        call = client.send(served.origin, POST, receiver)
        await {"sent": asked, "head": receiver.has_begun, "body": receiver.has_data}[phase].wait()
        call.abort()
        call.abort()
        async with asyncio.timeout(LIMIT_S):
            await gone.wait()
        await until(lambda: client.num_connections == 0)
        assert not receiver.end


@on_both_loops
async def test_an_abort_from_the_receiver_is_as_good() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(CHUNKED + b"2\r\nhi\r\n0\r\n\r\n")
        await peer.gone()

    async with serving(script) as served, client_of() as client:
        receiver = Kept()
        receiver.on_data = lambda _: call.abort()
        call = client.send(served.origin, POST, receiver)
        await receiver.has_data.wait()
        await until(lambda: client.num_connections == 0)
        assert not receiver.end


@on_both_loops
async def test_a_cancelled_fetch_closes_its_connection() -> None:
    gone = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        task.cancel()
        await peer.gone()
        gone.set()

    async with serving(script) as served, client_of() as client:
        task = asyncio.create_task(fetched(client, served.origin))
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone.wait()


@on_both_loops
async def test_a_paused_call_reads_no_more_than_the_sockets_hold_and_loses_nothing() -> None:
    long = LongBody(32 << 20)
    async with serving(long) as served, client_of() as client:
        receiver = Kept()
        receiver.on_data = lambda _: call.pause()
        call = client.send(served.origin, GET, receiver)
        await receiver.has_data.wait()
        async with asyncio.timeout(LIMIT_S):
            await served.peers[0].stuck()
        assert len(receiver.body) <= 1 << 19
        assert long.num_sent < len(long.body)
        receiver.on_data = None
        call.resume()
        await receiver.over.wait()
        assert receiver.body == long.body
        assert client.num_idle == 1


@on_both_loops
async def test_a_call_that_is_paused_before_its_connection_is_there_stays_paused() -> None:
    has_answered = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.answer(b"")
        has_answered.set()
        await peer.gone()

    async with serving(script) as served, client_of() as client:
        receiver = Kept()
        call = client.send(served.origin, GET, receiver)
        call.pause()
        await until(has_answered.is_set)
        for _ in range(20):  # the answer is in the socket
            await asyncio.sleep(0)
        assert not receiver.status
        call.resume()
        await receiver.over.wait()
        assert receiver.end == "ended"


@on_both_loops
async def test_a_long_request_arrives_whole_at_a_slow_server() -> None:
    body = random.Random(4).randbytes(8 << 20)

    async def script(peer: Peer, number: int) -> None:
        for _ in range(2):
            await peer.reader.readuntil(b"\r\n\r\n")
            parts = []
            while sum(map(len, parts)) < len(body):
                parts.append(await peer.reader.read(100_000))
                await asyncio.sleep(0)
            assert b"".join(parts) == body
            await peer.answer(b"%d" % number)
        await peer.gone()

    async with serving(script) as served, client_of() as client:
        for _ in range(2):
            assert await fetched(client, served.origin, HttpRequest("POST", "/", (), body)) == b"0"


@on_both_loops
async def test_a_response_before_the_request_is_out_is_told_and_ends_the_connection() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.answer(b"too large", b"HTTP/1.1 413 Content Too Large")
        await peer.gone()

    async with serving(script) as served, client_of() as client:
        response = await client.fetch(
            served.origin, HttpRequest("POST", "/", (), bytes(64 << 20)), LIMIT_S, 100
        )
        assert (response.status, response.body) == (413, b"too large")
        await until(lambda: client.num_connections == 0)


@pytest.mark.parametrize(
    ("response", "began", "said"),
    [
        (b"", False, "closed the connection before its response"),
        (b"SSH-2.0-x\r\n", True, "is no HTTP response"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell", True, "in the middle of its response"),
        (CHUNKED + b"2\r\nhi\r\n", True, "in the middle of its response"),
        (CHUNKED + b"2\r\nhiyou\r\n", True, "is no HTTP response"),
        (b"HTTP/1.1 200 OK\r\na: " + b"a" * 70_000, True, "max_head_bytes is 65536"),
        (b"HTTP/1.1 000 X\r\n\r\n" + CHUNKED + b"2\r\nhi\r\n0\r\n\r\n", True, "the status 000"),
        (b"HTTP/1.1 600 X\r\ncontent-length: 2\r\n\r\nhi", True, "the status 600"),
        (
            CHUNKED.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: gzip\r\n\r\n"),
            True,
            "the transfer coding b'gzip'",
        ),
        (
            CHUNKED.replace(b"OK\r\n", b"OK\r\ntransfer-encoding: gzip\r\n") + b"0\r\n\r\n",
            True,
            "the transfer coding b'gzip'",
        ),
    ],
)
@on_both_loops
async def test_a_broken_response_is_a_fault_that_says_what_the_server_did(
    response: bytes, began: bool, said: str
) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(response)

    async with serving(script) as served, client_of() as client:
        receiver = Kept()
        client.send(served.origin, GET, receiver)
        await receiver.over.wait()
        assert receiver.fault is not None
        assert (receiver.fault.began, type(receiver.fault)) == (began, HttpFault)
        assert f"127.0.0.1:{served.origin.port} " in str(receiver.fault)
        assert said in str(receiver.fault)


@on_both_loops
async def test_what_comes_until_the_connections_end_is_a_whole_body() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.0 200 OK\r\n\r\nhello")

    async with serving(script) as served, client_of() as client:
        assert await fetched(client, served.origin) == b"hello"


@on_both_loops
async def test_no_server_is_a_fault_without_a_response(unused_tcp_port: int, tmp_path: Path) -> None:
    async with client_of() as client:
        for origin, name in (
            (Origin("127.0.0.1", unused_tcp_port), f"127.0.0.1:{unused_tcp_port}"),
            (Origin("localhost", 80, None, str(tmp_path / "none")), str(tmp_path / "none")),
            (Origin("x" * 64, 80), "x" * 64),
        ):
            with pytest.raises(HttpFault, match="no connection to " + name) as caught:
                await fetched(client, origin)
            assert (caught.value.began, caught.value.is_unreachable) == (False, True)


@on_both_loops
async def test_a_receiver_is_never_called_from_inside_send(unused_tcp_port: int) -> None:
    async with serving(answer_all) as served, client_of() as client:
        for origin in (served.origin, served.origin, Origin("127.0.0.1", unused_tcp_port)):
            receiver = Kept()
            client.send(origin, GET, receiver)
            assert not receiver.status
            assert not receiver.end
            await receiver.over.wait()


@on_both_loops
async def test_time_limits_are_faults_that_name_them() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\n" if number == 1 else b"")
        await peer.gone()

    async with serving(script) as served:
        async with client_of() as client:
            for began in (False, True):
                receiver = Kept()
                client.send(served.origin, GET, receiver, 0.05)
                if began:
                    await until(lambda: served.num_connections == 2)
                await receiver.over.wait()
                assert isinstance(receiver.fault, HttpTimeout)
                assert "not answered within 0.05 s" in str(receiver.fault)
        async with client_of() as client:
            with pytest.raises(HttpTimeout, match=r"within 0.05 s"):
                await client.fetch(served.origin, GET, 0.05, 100)
        async with client_of(connect_s=0.0) as client:
            with pytest.raises(HttpTimeout, match=r"within connect_s, 0 s") as caught:
                await fetched(client, served.origin)
            assert caught.value.is_unreachable


@on_both_loops
async def test_the_heads_limit_is_not_the_streams() -> None:
    waits_on: list[asyncio.Event] = []

    async def script(peer: Peer, number: int) -> None:
        waits_on.append(asyncio.Event())
        await peer.request()
        await peer.say(CHUNKED)
        await waits_on[number].wait()
        await peer.say(b"2\r\nhi\r\n0\r\n\r\n")

    async with serving(script) as served, client_of() as client:
        receiver, head_s = Kept(), 0.02
        while not receiver.status:  # a busy machine needs longer
            receiver, head_s = Kept(), head_s * 2
            client.send(served.origin, GET, receiver, head_s)
            await until(lambda told=receiver: told.status or told.end)
        await asyncio.sleep(head_s * 1.5)  # of the loop whose timer would be due before
        waits_on[-1].set()
        await receiver.over.wait()
        assert receiver.end == "ended"


@on_both_loops
async def test_a_body_over_the_limit_of_fetch_is_a_fault() -> None:
    async with serving(answer_all) as served, client_of() as client:
        with pytest.raises(HttpFault, match="bytes or more; the limit is 10"):
            await client.fetch(served.origin, GET, LIMIT_S, 10)


@on_both_loops
async def test_close_fails_what_is_under_way_and_what_comes_later() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(CHUNKED if number else b"")
        await peer.gone()

    async with serving(script) as served:
        client = HttpClient()
        connected, begun, opening, later = Kept(), Kept(), Kept(), Kept()
        client.send(served.origin, GET, connected)
        await until(lambda: served.num_connections == 1)
        client.send(served.origin, GET, begun)
        await begun.has_begun.wait()
        client.send(served.origin, GET, opening)
        await client.close()
        client.send(served.origin, GET, later)
        await later.over.wait()
        await client.close()
        for receiver in (connected, begun, opening, later):
            assert "client is closed" in str(receiver.fault)
        assert client.num_connections == 0


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a certificate for `localhost`, and a client's that trusts it."""
    folder = tmp_path_factory.mktemp("tls")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-x509", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    command = [need("openssl"), "req", *kind, *names, *files]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return server, ssl.create_default_context(cafile=str(folder / "cert.pem"))


@on_both_loops
async def test_tls_connections_are_kept_aborted_and_paused_like_others(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async def script(peer: Peer, number: int) -> None:
        while True:
            line, _, body = await peer.request()
            if "/stop" in line:
                await peer.say(CHUNKED + b"2\r\nhi\r\n")
                await peer.gone()
                return
            await peer.answer(body * 100 + b"%d" % number)

    async with serving(script, tls) as served, client_of() as client:
        body = random.Random(5).randbytes(1 << 16)
        for _ in range(2):
            assert (
                await fetched(client, served.origin, HttpRequest("POST", "/", (), body)) == body * 100 + b"0"
            )
        receiver = Kept()
        receiver.on_data = lambda _: call.pause()
        call = client.send(served.origin, HttpRequest("POST", "/", (), body), receiver)
        while not receiver.end:
            receiver.has_data.clear()
            call.resume()
            await asyncio.wait(
                [
                    asyncio.ensure_future(receiver.has_data.wait()),
                    asyncio.ensure_future(receiver.over.wait()),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        assert receiver.body == body * 100 + b"0"
        stopped = Kept()
        call = client.send(served.origin, HttpRequest("GET", "/stop"), stopped)
        await stopped.has_data.wait()
        call.abort()
        await until(lambda: client.num_connections == 0)
        gc.collect()


@on_both_loops
async def test_tls_with_a_certificate_that_nobody_trusts_is_a_fault(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async with serving(answer_all, tls) as served, client_of() as client:
        for origin in (
            Origin("localhost", served.origin.port, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)),
            Origin("127.0.0.1", served.origin.port, tls[1]),  # a name that the certificate does not have
        ):
            with pytest.raises(HttpFault, match=r"no connection to .*certificate verify failed"):
                await fetched(client, origin)
        assert (await fetched(client, served.origin)).startswith(b"0|")


@on_both_loops
async def test_unix_sockets_are_servers_too(tmp_path: Path) -> None:
    async with serving(answer_all, uds=tmp_path / "s") as served, client_of() as client:
        for _ in range(2):
            assert await fetched(client, served.origin) == b"0|GET /x HTTP/1.1|{'host': 'localhost'}"


@on_both_loops
async def test_calls_leave_nothing_for_the_collector() -> None:
    """Else a thousand streams' ends come as one long stop."""
    async with serving(answer_all) as served, client_of(max_idle=0) as client:
        await asyncio.gather(*(fetched(client, served.origin) for _ in range(20)))
        await until(lambda: client.num_connections == 0)
        await asyncio.sleep(0.05)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                receiver = Kept()
                client.send(served.origin, GET, receiver)
                await receiver.over.wait()
                await until(lambda: client.num_connections == 0)
            gc.collect()
            left = [thing for thing in gc.garbage if type(thing).__module__.startswith("backend.http")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        assert not left


@on_both_loops
async def test_a_storm_of_calls_ends_each_as_its_server_meant() -> None:
    """But those whose server had left by the time that they came: a POST is not sent twice."""
    chance = random.Random(11)
    num_leaving = num_late = 0

    async def script(peer: Peer, number: int) -> None:
        while True:
            _, _, body = await peer.request()
            kind = body[:1]
            if kind == b"c":  # cut
                await peer.say(CHUNKED + b"4\r\nbody\r\n")
                return
            data = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            for at in range(0, len(data), 40):
                await peer.say(data[at : at + 40])
                await asyncio.sleep(0)
            if kind == b"l":  # leaves after it, without a word
                return

    async with serving(script) as served, client_of(max_idle=5) as client:

        async def one(number: int) -> None:
            nonlocal num_leaving, num_late
            kind = chance.choice("okkkkkcla")
            num_leaving += kind == "l"
            body = f"{kind}{number}".encode() * chance.randrange(1, 20)
            receiver = Kept()
            call = client.send(served.origin, HttpRequest("POST", "/", (), body), receiver)
            if kind == "a":
                await asyncio.sleep(chance.random() / 200)
                call.abort()
                before = receiver.end
                await asyncio.sleep(0.01)
                assert receiver.end == before
                return
            await receiver.over.wait()
            if receiver.end == "failed" and not receiver.body:
                num_late += 1
                return
            assert receiver.end == ("failed" if kind == "c" else "ended")
            assert receiver.body == (b"body" if kind == "c" else body)

        at_once = asyncio.Semaphore(20)

        async def limited(number: int) -> None:
            async with at_once:
                await one(number)

        await asyncio.gather(*(limited(number) for number in range(400)))
        assert num_late <= num_leaving
        assert client.num_idle <= 5
