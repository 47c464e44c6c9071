"""Text messages past `send`: the frames that clients can read, and only while the connection is open."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader

from gateway.direct_body import DIRECT_EXTENSION
from gateway.direct_text import DirectText, text_frame
from gateway.outlet import nothing
from gateway.websocket_outlet import WebSocketOutlet
from tests.gateway.answering import Client, turns
from tests.gateway.test_direct_body import Transport
from tests.gateway.test_websocket_protocol import Played
from tests.websocket_wire import CLOSE, PING, TEXT, close_frame, frame


class Direct:
    """An outlet whose server lets it pass `send` by."""

    def __init__(self) -> None:
        self.transport, self.client, self.gone = Transport(), Client(), list[str]()
        self.direct = DirectText()
        self.direct.allow(cast(Any, self.transport))
        self.outlet = WebSocketOutlet(self.client, 100, self.gone.append, self.direct.begin)
        self.outlet.go_direct()


class Counting:
    """The outlet of a played connection, and how many messages went through `send`."""

    def __init__(self, played: Played) -> None:
        self.num_sent = 0
        self.gone: list[str] = []
        begin = played.scope["extensions"][DIRECT_EXTENSION]
        self.outlet = WebSocketOutlet(self.send, 10_000, self.gone.append, begin)
        self._played = played
        self.outlet.go_direct()

    async def send(self, message: Any) -> None:
        self.num_sent += 1
        await self._played.send(message)


def parsed(data: bytes) -> Frame:
    reader = StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    parsing = Frame.parse(reader.read_exact, mask=False, max_size=None)
    while True:
        try:
            next(parsing)
        except StopIteration as end:
            assert reader.at_eof is not None
            return cast(Frame, end.value)


@pytest.mark.parametrize("num_bytes", [0, 1, 125, 126, 127, 511, 512, 513, 65_535, 65_536, 70_000])
def test_a_frame_is_one_whole_text_message_in_its_shortest_form(num_bytes: int) -> None:
    text = b"x" * num_bytes
    data = text_frame(text)
    found = parsed(data)
    assert (found.opcode, found.fin, bytes(found.data)) == (Opcode.TEXT, True, text)
    assert data == Frame(Opcode.TEXT, text).serialize(mask=False)


async def test_messages_pass_send_by_and_the_close_does_not() -> None:
    direct = Direct()
    direct.outlet.push("ä".encode())
    direct.outlet.push(b"")  # a message without text is one
    direct.outlet.close(1000, "bye")
    direct.outlet.push(b"late")
    assert direct.transport.written == [b"\x81\x02\xc3\xa4", b"\x81\x00"]
    assert direct.client.messages == [{"type": "websocket.close", "code": 1000, "reason": "bye"}]


async def test_a_client_that_reads_slowly_is_sent_to_until_all_has_been_read() -> None:
    direct = Direct()
    direct.outlet.push(b"a")
    direct.direct.stop()
    direct.client.stops_reading()
    direct.outlet.push(b"b")
    direct.outlet.push(b"c")
    direct.direct.allow(cast(Any, direct.transport))
    direct.outlet.push(b"d")
    assert direct.outlet.num_buffered == 2  # the first one is under way
    direct.client.reads_again()
    await asyncio.wait_for(direct.outlet.flushed(), 5)
    direct.outlet.push(b"e")
    assert direct.transport.written == [b"\x81\x01a", b"\x81\x01e"]
    assert [each["text"] for each in direct.client.messages] == ["b", "c", "d"]


async def test_nothing_is_offered_after_a_stop() -> None:
    direct = DirectText()
    assert direct.begin(nothing) is None
    direct.allow(cast(Any, Transport()))
    told: list[int] = []
    assert direct.begin(lambda: told.append(1)) is not None
    direct.stop()
    direct.stop()
    assert told == [1]
    assert direct.begin(nothing) is None


async def test_a_dropped_client_is_not_written_to() -> None:
    direct = Direct()
    direct.outlet.drop()
    direct.outlet.push(b"a")
    assert (direct.transport.written, direct.client.messages) == ([], [])


async def test_a_write_that_raises_is_a_lost_client() -> None:
    direct = Direct()
    direct.transport.error = RuntimeError("the handler is closed")
    direct.outlet.push(b"a")
    direct.outlet.push(b"b")
    assert direct.gone == ["send failed: RuntimeError"]


# -- the server's protocol -----------------------------------------------------------------------------------


async def test_a_connection_offers_it_from_its_acceptance_on() -> None:
    played = await Played().open(accepts=False)
    early = Counting(played)
    await played.accept()
    late = Counting(played)
    early.outlet.push(b"one")
    late.outlet.push(b"two")
    assert (early.num_sent, late.num_sent) == (1, 0)
    assert [each.payload for each in played.sent] == [b"one", b"two"]
    played.lose()


async def test_a_connection_that_cannot_be_written_to_takes_nothing_past_send() -> None:
    played = await Played().open()
    counting = Counting(played)
    played.protocol.pause_writing()
    counting.outlet.push(b"waits")
    await turns()
    assert played.sent == []
    assert counting.outlet.blocked_since_s is not None
    played.protocol.resume_writing()
    await asyncio.wait_for(counting.outlet.flushed(), 5)
    counting.outlet.push(b"again")
    assert [each.payload for each in played.sent] == [b"waits", b"again"]
    assert counting.num_sent == 1
    played.lose()


async def test_a_connection_that_begins_behind_what_nobody_reads_waits_for_it() -> None:
    """The transport has told the protocol before, and says it once."""
    played = await Played().open(accepts=False, is_paused=True)
    accepting = asyncio.create_task(played.accept())
    await turns()
    assert not accepting.done()
    played.protocol.resume_writing()
    await asyncio.wait_for(accepting, 5)
    counting = Counting(played)
    counting.outlet.push(b"direct")
    assert counting.num_sent == 0
    assert [each.payload for each in played.sent] == [b"direct"]
    played.lose()


async def test_a_pause_in_which_nothing_was_pushed_is_over_with_the_next_push() -> None:
    played = await Played().open()
    counting = Counting(played)
    played.protocol.pause_writing()
    played.protocol.resume_writing()
    for text in (b"a", b"b", b"c"):
        counting.outlet.push(text)
    assert [each.payload for each in played.sent] == [b"a", b"b", b"c"]
    assert counting.num_sent == 1
    played.lose()


def _close(played: Played) -> None:
    played.feed(close_frame(1000))


def _break_the_rules(played: Played) -> None:
    played.feed(frame(0x3, b""))


def _end_the_input(played: Played) -> None:
    played.protocol.eof_received()


def _shut_down(played: Played) -> None:
    played.protocol.shutdown()


def _lose(played: Played) -> None:
    played.lose()


@pytest.mark.parametrize("end", [_close, _break_the_rules, _end_the_input, _shut_down, _lose])
async def test_after_an_end_no_text_leaves(end: Any) -> None:
    played = await Played().open()
    counting = Counting(played)
    counting.outlet.push(b"before")
    end(played)
    counting.outlet.push(b"after")
    await turns()
    texts = [each.payload for each in played.sent if each.opcode == TEXT]
    assert texts == [b"before"]
    assert counting.gone == ["send failed: ClientDisconnected"]
    if end is not _lose:
        played.lose()


async def test_pings_and_closes_stand_between_messages() -> None:
    played = await Played().open()
    counting = Counting(played)
    counting.outlet.push(b"a")
    played.feed(frame(PING, b"?"))
    counting.outlet.push(b"b")
    counting.outlet.close(1000)
    await turns()
    assert [each.payload for each in played.sent[:3]] == [b"a", b"?", b"b"]
    assert played.sent[3].opcode == CLOSE
    played.lose()
