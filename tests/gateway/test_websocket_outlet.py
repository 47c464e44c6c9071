"""The sending side of a WebSocket: what `tests/gateway/test_outlet.py` says of a body, as messages."""

from __future__ import annotations

import asyncio

from gateway.outlet import why_too_slow
from gateway.websocket_outlet import MAX_REASON_BYTES, WebSocketOutlet
from tests.gateway.answering import Client, turns


class Pair:
    """A client and the outlet to it."""

    def __init__(self, max_bytes: int = 100) -> None:
        self.client = Client()
        self.gone: list[str] = []
        self.outlet = WebSocketOutlet(self.client, max_bytes, self.gone.append)

    @property
    def texts(self) -> list[str]:
        return [each["text"] for each in self.client.messages if each["type"] == "websocket.send"]


async def test_what_is_pushed_leaves_in_the_same_call() -> None:
    pair = Pair()
    pair.outlet.push(b"a")
    pair.outlet.push(b"b")
    pair.outlet.close(1000, "bye")
    assert pair.client.messages == [
        {"type": "websocket.send", "text": "a"},
        {"type": "websocket.send", "text": "b"},
        {"type": "websocket.close", "code": 1000, "reason": "bye"},
    ]
    assert pair.outlet.closed


async def test_nothing_follows_a_close() -> None:
    pair = Pair()
    pair.outlet.close()
    pair.outlet.push(b"late")
    pair.outlet.close(4000)
    assert pair.client.messages == [{"type": "websocket.close", "code": 1000, "reason": ""}]


async def test_a_slow_client_gets_each_message_by_itself_and_then_the_close() -> None:
    pair = Pair()
    pair.client.stops_reading()
    for text in ("0", "ü", "two"):
        pair.outlet.push(text.encode())
    pair.outlet.close(1001)
    await turns()
    assert pair.client.messages == []
    assert (pair.outlet.num_buffered, pair.outlet.peak) == (5, 5)  # bytes; the first one is under way
    assert pair.outlet.blocked_since_s is not None
    assert why_too_slow(pair.outlet.blocked_since_s, pair.outlet.blocked_since_s + 40, 30.0)
    pair.client.reads_again()
    await asyncio.wait_for(pair.outlet.flushed(), 5)
    assert pair.texts == ["0", "ü", "two"]
    assert pair.client.messages[-1]["code"] == 1001
    assert pair.outlet.num_buffered == 0
    assert not pair.outlet.blocked_since_s
    assert pair.gone == []


async def test_past_the_bound_the_client_is_given_up_once() -> None:
    pair = Pair(max_bytes=80)
    pair.client.stops_reading()
    pair.outlet.push(b"first")
    await turns()
    for _ in range(12):
        pair.outlet.push(b"1234567890")
    await turns()
    assert pair.gone == ["reads too slowly: 90 bytes wait, the limit is 80"]
    assert pair.outlet.closed
    assert pair.outlet.num_buffered == 0
    assert pair.client.cancelled == 1


async def test_large_messages_count_less_than_they_are_but_not_for_nothing() -> None:
    """A client that is sent its own large item has not read slowly."""
    pair = Pair(max_bytes=80)
    pair.client.stops_reading()
    pair.outlet.push(b"first")
    assert not pair.outlet.is_behind
    for _ in range(8):
        pair.outlet.push(b"x" * 1000)
    assert (pair.gone, pair.outlet.is_behind) == ([], True)
    pair.outlet.push(b"x")
    assert pair.gone == ["reads too slowly: 8001 bytes wait, the limit is 80"]
    assert not pair.outlet.is_behind


async def test_a_send_that_fails_is_a_client_that_has_gone() -> None:
    pair = Pair()
    pair.client.error = OSError()
    pair.outlet.push(b"a")
    pair.outlet.push(b"b")
    assert pair.gone == ["send failed: OSError"]


async def test_a_drop_forgets_what_waits_and_tells_nobody() -> None:
    pair = Pair()
    pair.client.stops_reading()
    pair.outlet.push(b"a")
    pair.outlet.push(b"b")
    pair.outlet.drop()
    pair.client.reads_again()
    await turns()
    assert (pair.client.messages, pair.gone) == ([], [])


async def test_a_reason_is_cut_at_a_character_to_what_a_close_can_hold() -> None:
    pair = Pair()
    pair.outlet.close(1000, "é" * 100)
    reason = pair.client.messages[0]["reason"]
    assert reason == "é" * (MAX_REASON_BYTES // 2)
