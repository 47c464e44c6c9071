"""The response body: in one call while the client reads, in order and within bounds while it does not."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any

import pytest

from gateway.outlet import Outlet, why_too_slow
from tests.gateway.answering import Client, turns
from tests.gateway.asgi import served, slow_client

HEADERS = [(b"content-type", b"text/plain")]


class Pair:
    """A client and the outlet to it."""

    def __init__(self, max_bytes: int = 100) -> None:
        self.client = Client()
        self.gone: list[str] = []
        self.outlet = Outlet(self.client, max_bytes, self.gone.append)


async def test_what_is_pushed_leaves_in_the_same_call() -> None:
    pair = Pair()
    pair.outlet.start(200, HEADERS)
    pair.outlet.push(b"a")
    pair.outlet.push(b"b")
    pair.outlet.end(b"c")
    assert pair.client.messages == [
        {"type": "http.response.start", "status": 200, "headers": HEADERS},
        {"type": "http.response.body", "body": b"a", "more_body": True},
        {"type": "http.response.body", "body": b"b", "more_body": True},
        {"type": "http.response.body", "body": b"c", "more_body": False},
    ]
    assert (pair.outlet.closed, pair.outlet.peak, pair.outlet.blocked_since_s) == (True, 0, None)


async def test_nothing_follows_the_end() -> None:
    pair = Pair()
    pair.outlet.end(b"a")
    pair.outlet.push(b"b")
    pair.outlet.end(b"c")
    assert pair.client.body == b"a"


async def test_a_slow_client_gets_what_it_missed_joined_and_in_order() -> None:
    pair = Pair()
    pair.outlet.push(b"0")
    pair.client.stops_reading()
    for number in range(1, 5):
        pair.outlet.push(b"%d" % number)
    assert pair.client.body == b"0"
    assert pair.outlet.blocked_since_s is not None
    assert (pair.outlet.num_buffered, pair.outlet.peak) == (3, 3)
    pair.client.reads_again()
    await asyncio.wait_for(pair.outlet.flushed(), 5)
    assert pair.client.bodies == [b"0", b"1", b"234"]
    assert pair.outlet.num_buffered == 0
    assert not pair.outlet.blocked_since_s
    pair.outlet.push(b"5")
    assert pair.client.bodies[-1] == b"5"
    assert pair.gone == []


@pytest.mark.parametrize("ended", [False, True], ids=["open", "ended"])
async def test_head_and_body_keep_their_order_while_blocked(ended: bool) -> None:
    pair = Pair()
    pair.client.stops_reading()
    pair.outlet.start(200, HEADERS)
    pair.outlet.push(b"a")
    (pair.outlet.end if ended else pair.outlet.push)(b"b")
    await turns()
    assert pair.client.messages == []
    pair.client.reads_again()
    await asyncio.wait_for(pair.outlet.flushed(), 5)
    assert [message["type"] for message in pair.client.messages] == [
        "http.response.start",
        "http.response.body",
    ]
    assert pair.client.bodies == [b"ab"]
    assert pair.client.is_ended == ended


async def test_pushes_during_the_flush_join_it() -> None:
    """Each send of the flush suspends, and more is pushed meanwhile."""
    taken: list[bytes] = []

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        taken.append(message["body"])

    outlet = Outlet(send, 1000, pytest.fail)
    rng = random.Random(5)
    sent = b""
    for number in range(200):
        piece = b"%d," % number
        outlet.push(piece)
        sent += piece
        await turns(rng.randint(0, 3))
    await asyncio.wait_for(outlet.flushed(), 5)
    assert b"".join(taken) == sent
    assert len(taken) < 200


async def test_who_asked_is_told_when_a_slow_client_has_read_everything() -> None:
    """And may push at once, also what blocks again."""
    pair = Pair()
    told: list[bytes] = []

    def push_more() -> None:
        assert (pair.outlet.num_buffered, pair.outlet.blocked_since_s) == (0, None)
        told.append(pair.client.bodies[-1])
        if len(told) < 3:
            pair.client.stops_reading()
            pair.outlet.push(b"again %d" % len(told))

    pair.outlet.on_flushed = push_more
    pair.outlet.push(b"quick")
    assert told == []
    pair.client.stops_reading()
    pair.outlet.push(b"a")
    pair.outlet.push(b"b")
    for expected in ([b"b"], [b"b", b"again 1"], [b"b", b"again 1", b"again 2"]):
        pair.client.reads_again()
        await turns()
        assert told == expected
    assert pair.client.bodies == [b"quick", b"a", b"b", b"again 1", b"again 2"]


async def test_who_asked_is_not_told_of_a_client_that_was_dropped() -> None:
    pair = Pair()
    pair.outlet.on_flushed = pytest.fail  # type: ignore[assignment]
    pair.client.stops_reading()
    pair.outlet.push(b"a")
    pair.outlet.drop()
    pair.client.reads_again()
    await turns()


def test_a_client_is_too_slow_after_the_limit_alone() -> None:
    assert why_too_slow(None, 1e9, 30.0) is None
    assert why_too_slow(100.0, 129.9, 30.0) is None
    assert why_too_slow(100.0, 130.0, 30.0) == "has not read for 30 s; the limit is 30 s"


async def test_the_bound_is_the_end_and_told_once() -> None:
    pair = Pair(max_bytes=10)
    pair.client.stops_reading()
    pair.outlet.push(b"in the send itself, not counted")
    pair.outlet.push(b"x" * 10)
    assert pair.gone == []
    pair.outlet.push(b"y")
    assert len(pair.gone) == 1
    assert "11 bytes wait, the limit is 10" in pair.gone[0]
    pair.outlet.push(b"z" * 100)
    pair.outlet.end()
    await asyncio.wait_for(pair.outlet.flushed(), 5)
    assert len(pair.gone) == 1
    assert (pair.outlet.closed, pair.outlet.num_buffered, pair.outlet.peak) == (True, 0, 11)
    assert pair.client.messages == []


async def test_the_last_message_counts_too() -> None:
    pair = Pair(max_bytes=10)
    pair.client.stops_reading()
    pair.outlet.start(200, HEADERS)
    pair.outlet.end(b"x" * 11)
    assert len(pair.gone) == 1
    await asyncio.wait_for(pair.outlet.flushed(), 5)


async def test_a_send_that_raises_at_once_is_a_lost_client() -> None:
    pair = Pair()
    pair.client.error = ConnectionResetError("text that must not be told")
    pair.outlet.push(b"a")
    pair.outlet.push(b"b")
    assert pair.gone == ["send failed: ConnectionResetError"]
    assert pair.outlet.closed


async def test_a_send_that_raises_after_it_waited_is_a_lost_client() -> None:
    pair = Pair()
    pair.client.stops_reading()
    pair.outlet.push(b"a")
    pair.outlet.push(b"b")
    await turns()
    pair.client.error = OSError("gone")
    pair.client.reads_again()
    await turns()
    assert pair.gone == ["send failed: OSError"]
    assert (pair.outlet.closed, pair.outlet.num_buffered) == (True, 0)
    await asyncio.wait_for(pair.outlet.flushed(), 5)


@pytest.mark.parametrize("num_turns", [0, 1, 3])
async def test_drop_cancels_a_send_that_waits(num_turns: int) -> None:
    """With 0 turns the task has not had its first step: it runs nothing, and must be forgotten too."""
    pair = Pair()
    pair.client.stops_reading()
    pair.outlet.push(b"a")
    pair.outlet.push(b"b")
    await turns(num_turns)
    pair.outlet.drop()
    assert (pair.outlet.closed, pair.outlet.num_buffered, pair.outlet.blocked_since_s) == (True, 0, None)
    await asyncio.wait_for(pair.outlet.flushed(), 5)
    await turns()
    assert pair.client.cancelled == (1 if num_turns else 0)
    pair.client.reads_again()
    await turns()
    assert pair.client.messages == []
    assert pair.gone == []
    assert len(asyncio.all_tasks()) == 1


async def test_a_send_that_catches_the_cancel_may_still_wait() -> None:
    cleaned: list[str] = []

    async def send(message: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append("yes")

    outlet = Outlet(send, 100, pytest.fail)
    outlet.push(b"a")
    await turns()
    outlet.drop()
    await turns()
    assert cleaned == ["yes"]


# -- a real server and a client that does not read -----------------------------------------------------------


async def read_chunked(client: socket.socket) -> bytes:
    """A whole chunked response body, read slowly enough to block the server again and again."""
    loop = asyncio.get_running_loop()
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        part = await loop.run_in_executor(None, client.recv, 65536)
        assert part, "the connection ended early"
        data += part
    _, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        num_bytes = int(size, 16)
        body, rest = body + rest[:num_bytes], rest[num_bytes + 2 :]
    return body


async def test_a_client_that_reads_late_gets_every_byte_in_order() -> None:
    pieces = [b"%06d|" % number * 40 for number in range(4_000)]  # 1.1 MB: more than the kernel takes
    outlets: list[Outlet] = []
    blocked = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        outlet = Outlet(send, 8 << 20, pytest.fail)
        outlets.append(outlet)
        outlet.start(200, HEADERS)
        for number, piece in enumerate(pieces):
            outlet.push(piece)
            if number % 100 == 0:
                await asyncio.sleep(0)
            if outlet.blocked_since_s is not None:
                blocked.set()
        outlet.end()
        while (await receive())["type"] != "http.disconnect":
            pass

    async with served(app) as port:
        client = slow_client(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        try:
            await asyncio.wait_for(blocked.wait(), 10)
            assert await asyncio.wait_for(read_chunked(client), 20) == b"".join(pieces)
            assert outlets[0].peak > 0
            await asyncio.wait_for(outlets[0].flushed(), 5)
        finally:
            client.close()


async def test_a_client_that_never_reads_is_dropped_at_the_bound() -> None:
    gone: asyncio.Queue[str] = asyncio.Queue()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        outlet = Outlet(send, 100_000, gone.put_nowait)
        outlet.start(200, HEADERS)
        for _ in range(100):
            outlet.push(b"x" * 100_000)
            await asyncio.sleep(0)
        assert outlet.closed
        assert outlet.peak <= 200_000
        while (await receive())["type"] != "http.disconnect":
            pass

    async with served(app) as port:
        client = slow_client(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        try:
            assert "the limit is 100000" in await asyncio.wait_for(gone.get(), 10)
        finally:
            client.close()
    assert gone.empty()
