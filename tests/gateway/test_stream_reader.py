"""Readers of a stream: every cut between replay and live, clients that read when they like, and every end."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from gateway.answer import AnswerLimits
from gateway.frames import json_string
from gateway.journal import Journal, JournalLimits
from gateway.journal_writer import DONE_EVENT, failed_event
from gateway.outlet import Outlet
from gateway.stream_reader import RETRY, SLICE_BYTES, StreamReader, failed_frame
from gateway.writers import SSE_HEADERS
from pipeline.errors import Draining, HeadraceError, WorkerLost
from pipeline.stream_errors import StoreUnavailable
from tests.gateway.answering import Client, turns, until
from tests.gateway.asgi import served, slow_client

WIDE = JournalLimits()
LIMITS = AnswerLimits(heartbeat_s=5.0, slow_reader_s=30.0)
NUM = 12  # events of a whole stream here
PING = b": ping\n\n"


class Source:
    """A stream that is written one event at a time, the last one is its end. `journal` is what readers
    follow: the stream's own, one whose events are published later, or a copy."""

    def __init__(self, limits: JournalLimits = WIDE, num_events: int = NUM, kind: str = "own") -> None:
        self.num_events = num_events
        self.kind = kind
        self._own = Journal(limits, (lambda journal: None) if kind == "stored" else None)
        self.journal = Journal(limits) if kind == "copy" else self._own
        self._own.template([b'data: {"text":', b"}\n\n"])
        self.journal.templates = self._own.templates
        self.whole: list[bytes] = []

    def write(self, num_bytes: int = 0) -> None:
        number = self._own.written + 1
        is_end = number == self.num_events
        if is_end:
            frame = DONE_EVENT
            self._own.end(frame)
        elif number % 3:
            text = json_string(f"{number}" + "." * num_bytes)
            frame = b'data: {"text":%b}\n\n' % text
            self._own.text(1, text)
        else:
            frame = b'data: {"n":%d%b}\n\n' % (number, b" " * num_bytes)
            self._own.frame(frame)
        self.whole.append(b"id: %d\n%b" % (number, frame))
        if self.kind == "copy":
            self.journal.restore(number, self._own.entries(number - 1)[0], is_end)

    def to(self, number: int) -> None:
        """Until this event is written, and readers may have it."""
        while len(self.whole) < number:
            self.write()
        if self.kind == "stored":
            self.journal.publish(number)

    def after(self, number: int) -> bytes:
        return b"".join(self.whole[number:])


def opening_of(after: int) -> bytes:
    """The first lines. Without the id, their blank line would make the client forget the one it has."""
    return b"retry: 1000\nid: %d\n\n" % after if after else RETRY


class Read:
    """A client that has connected to follow a journal, and its reader."""

    def __init__(self, journal: Journal, after: int = 0, reads: bool = True, now_s: float = 0.0) -> None:
        self.client = Client()
        self.gone: list[str] = []
        self.after = after
        self.outlet = Outlet(self.client, 1 << 10, self.gone.append)
        self.reader = StreamReader(self.outlet, journal, after, LIMITS, now_s)
        self.outlet.start(200, list(SSE_HEADERS))
        if not reads:
            self.client.stops_reading()
        self.reader.start()

    @property
    def events(self) -> bytes:
        """What has come, without the first line and the heartbeats."""
        body = self.client.body
        opening = opening_of(self.after)
        assert body.startswith(opening) or not body
        return body.removeprefix(opening).replace(PING, b"")

    @property
    def error(self) -> Any:
        """Of the event that no stream has."""
        *_, last = self.client.frames
        fields = last.split(b"\n")
        assert fields[:2] == [b"id: failed", b"event: failed"]
        assert self.client.is_ended
        return json.loads(fields[2].removeprefix(b"data: "))["error"]

    def assert_complete(self, source: Source, after: int = 0) -> None:
        assert self.events == source.after(after)
        assert self.client.is_ended
        assert (self.reader.ended, self.reader.detail) == ("complete", "")
        assert self.reader.num_events == source.num_events - after
        assert self.reader.num_bytes == len(source.after(after))
        assert self.outlet.peak == 0
        assert self.reader not in source.journal.followers


def test_eventsource_is_told_when_to_come_back() -> None:
    one, back = Read(Journal(WIDE)), Read(Journal(WIDE), after=7)
    assert one.client.bodies == [b"retry: 1000\n\n"]
    assert back.client.bodies == [b"retry: 1000\nid: 7\n\n"]
    assert one.client.messages[0]["headers"] == list(SSE_HEADERS)


# -- replay and live -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize("kind", ["own", "stored", "copy"])
async def test_every_cut_between_replay_and_live_gives_the_same(kind: str, num_readers: int) -> None:
    for attached in range(NUM + 1):
        for after in range(attached + 1):
            source = Source(kind=kind)
            source.to(attached)
            reads = [Read(source.journal, after) for _ in range(num_readers)]
            for number in range(attached, NUM + 1):
                source.to(number)
                for one in reads:
                    assert one.events == source.after(after)  # each event in the call that publishes it
            for one in reads:
                one.assert_complete(source, after)


@pytest.mark.parametrize("kind", ["own", "copy"])
async def test_readers_that_come_at_any_time_have_the_same_stream(kind: str) -> None:
    source = Source(kind=kind)
    reads = [Read(source.journal)]
    for number in range(1, NUM + 1):
        source.to(number)
        reads += [Read(source.journal, after) for after in (0, number - 1, number)]
    for after, one in zip([0, *(n for k in range(1, NUM + 1) for n in (0, k - 1, k))], reads, strict=True):
        one.assert_complete(source, after)


async def test_several_events_of_one_step_leave_as_one() -> None:
    source = Source(kind="stored")
    one = Read(source.journal)
    for number in (3, 4, 4, 9, NUM):
        source.to(number)
    assert [body.count(b"id: ") for body in one.client.bodies] == [0, 3, 1, 5, 3]
    one.assert_complete(source)


async def test_what_is_not_public_yet_is_not_sent() -> None:
    source = Source(kind="stored")
    one = Read(source.journal)
    for _ in range(NUM):
        source.write()
    assert one.events == b""
    source.journal.publish(NUM - 1)
    assert one.events == b"".join(source.whole[:-1])
    assert not one.client.is_ended
    source.journal.publish(NUM)
    one.assert_complete(source)


async def test_a_copy_that_is_behind_its_client_is_waited_for() -> None:
    source = Source(kind="copy")
    one = Read(source.journal, after=5)
    for number in range(1, NUM + 1):
        source.to(number)
        assert one.events == source.after(5)
    one.assert_complete(source, 5)


@pytest.mark.parametrize("seed", range(60))
async def test_clients_that_read_when_they_like_lose_and_double_nothing(seed: int) -> None:
    """Blocked at random moments, attached at random ones; texts from a byte to more than a slice."""
    rng = random.Random(seed)
    source = Source(num_events=rng.randint(2, 60), kind=rng.choice(("own", "stored", "copy")))
    large = rng.choice((0, 100, 20_000, SLICE_BYTES * 2))
    reads: list[tuple[Read, int]] = []
    while len(source.whole) < source.num_events:
        for _ in range(rng.randint(0, 4)):
            if len(source.whole) < source.num_events:
                source.write(rng.choice((0, 0, 10, rng.randint(0, large))))
        if source.kind == "stored" and rng.random() < 0.6:
            source.journal.publish(rng.randint(source.journal.last, source.journal.written))
        if rng.random() < 0.3:
            after = rng.randint(0, source.journal.last)
            reads.append((Read(source.journal, after, rng.random() < 0.7), after))
        for one, _ in reads:
            if rng.random() < 0.3:
                rng.choice((one.client.stops_reading, one.client.reads_again))()
        await turns(rng.choice((0, 0, 1, 3)))
        for one, after in reads:
            assert source.after(after).startswith(one.events)
            assert one.outlet.num_buffered == 0
            assert one.reader.look(0.0) is None
    source.journal.publish(source.num_events)
    for one, after in reads:
        one.client.reads_again()
        await until(lambda one=one: one.client.is_ended)  # type: ignore[misc]
        one.assert_complete(source, after)
    assert not source.journal.followers


# -- clients that are slow -----------------------------------------------------------------------------------


async def test_for_a_client_that_does_not_read_nothing_waits_but_what_is_under_way() -> None:
    source = Source(num_events=1000)
    one, quick = Read(source.journal), Read(source.journal)
    source.to(10)
    one.client.stops_reading()
    source.to(1000)
    assert one.events == b"".join(source.whole[:10])
    assert (one.outlet.num_buffered, one.reader.position, one.reader.peak_lag) == (0, 11, 989)
    quick.assert_complete(source)
    assert quick.reader.peak_lag == 0
    one.client.reads_again()
    await until(lambda: one.client.is_ended)
    one.assert_complete(source)
    assert len(one.client.bodies) < 20


async def test_a_client_that_is_blocked_from_the_head_on_gets_all() -> None:
    source = Source()
    client = Client()
    client.stops_reading()
    outlet = Outlet(client, 1 << 10, pytest.fail)
    outlet.start(200, [])
    StreamReader(outlet, source.journal, 0, LIMITS, 0.0).start()
    source.to(NUM)
    await turns()
    assert client.messages == []
    client.reads_again()
    await until(lambda: client.is_ended)
    assert client.body == RETRY + source.after(0)


async def test_a_long_replay_lets_others_in_between() -> None:
    source = Source(num_events=41)
    for _ in range(41):
        source.write(SLICE_BYTES // 2)
    one = Read(source.journal)
    seen = []
    while not one.client.is_ended:
        seen.append(one.reader.position)
        await turns(1)
    assert seen[:3] == [2, 4, 6]
    assert len(seen) == 20
    one.assert_complete(source)


async def test_what_comes_in_a_long_replay_keeps_its_place() -> None:
    source = Source(num_events=60)
    for _ in range(40):
        source.write(SLICE_BYTES // 2)
    one = Read(source.journal)
    for _ in range(20):
        source.write(SLICE_BYTES)
        await turns(1)
    await until(lambda: one.client.is_ended)
    one.assert_complete(source)


async def test_a_reader_without_progress_is_told_of_and_one_with_progress_is_not() -> None:
    source = Source(num_events=1000)
    one = Read(source.journal)
    one.client.stops_reading()
    source.to(3)
    since_s = one.outlet.blocked_since_s
    assert since_s is not None
    assert one.reader.look(since_s + 29.9) is None
    assert one.reader.look(since_s + 30.1) == "has not read for 30 s; the limit is 30 s"
    one.client.reads_again()
    await turns(5)
    assert one.reader.look(since_s + 30.1) is None


async def test_a_client_that_does_not_take_the_end_is_told_of_too() -> None:
    source = Source()
    one = Read(source.journal)
    source.to(NUM - 1)
    one.client.stops_reading()
    source.to(NUM)
    assert one.reader.ended == "complete"
    since_s = one.outlet.blocked_since_s
    assert since_s is not None
    assert one.reader.look(since_s + 30.1) is not None
    one.outlet.drop()


async def test_one_byte_at_a_time_is_no_progress() -> None:
    """A real server and sockets: the client takes what the kernel has, and the gateway sees it as blocked."""
    journal = Journal(WIDE)
    for number in range(400):
        journal.frame(b'data: "%d%b"\n\n' % (number, b"x" * 8000))
    outlets: list[Outlet] = []
    readers: list[StreamReader] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        outlets.append(Outlet(send, 1 << 18, lambda reason: None))
        readers.append(StreamReader(outlets[0], journal, 0, LIMITS, 0.0))
        outlets[0].start(200, list(SSE_HEADERS))
        readers[0].start()
        while (await receive())["type"] != "http.disconnect":
            pass

    loop = asyncio.get_running_loop()
    async with served(app) as port:
        with await asyncio.to_thread(slow_client, port, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n") as client:
            client.setblocking(False)
            await until(lambda: outlets and outlets[0].blocked_since_s is not None)
            await asyncio.sleep(0.05)  # what is still on its way into the client's kernel
            since_s, position = outlets[0].blocked_since_s, readers[0].position
            assert since_s is not None
            for _ in range(500):
                assert len(await loop.sock_recv(client, 1)) == 1
            assert (outlets[0].blocked_since_s, readers[0].position) == (since_s, position)
            assert readers[0].look(since_s + 31.0) == "has not read for 31 s; the limit is 30 s"
            assert outlets[0].num_buffered == 0
            received = 0
            while received < SLICE_BYTES * 3:
                received += len(await loop.sock_recv(client, 1 << 16))
            await until(lambda: readers[0].position > position)
            assert outlets[0].blocked_since_s != since_s


# -- heartbeats ----------------------------------------------------------------------------------------------


async def test_a_heartbeat_comes_after_silence_and_none_while_events_flow() -> None:
    source = Source(num_events=100)
    one = Read(source.journal, now_s=0.0)
    for now_s, num_events, pings in (
        (4.5, 0, 0),
        (5.0, 0, 1),
        (9.5, 0, 1),
        (10.0, 0, 2),
        (14.5, 1, 2),
        (19.0, 1, 2),
        (19.5, 1, 3),
        (24.0, 2, 3),
        (28.5, 3, 3),
        (33.0, 4, 3),
    ):
        source.to(num_events)
        assert one.reader.look(now_s) is None
        assert one.client.bodies.count(PING) == pings, now_s


async def test_no_heartbeat_waits_for_a_client_that_does_not_read_or_follows_the_end() -> None:
    source = Source()
    one = Read(source.journal)
    one.client.stops_reading()
    source.to(5)
    for now_s in (5.0, 10.0, 15.0):
        one.reader.look(now_s)
    assert one.outlet.num_buffered == 0
    one.client.reads_again()
    await turns()
    source.to(NUM)
    one.reader.look(1000.0)
    assert PING not in one.client.body
    one.assert_complete(source)


# -- ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 3, NUM - 1])
async def test_a_stream_that_is_over_is_replayed_and_ended(after: int) -> None:
    source = Source()
    source.to(NUM)
    Read(source.journal, after).assert_complete(source, after)


async def test_a_failure_of_the_stream_is_one_of_its_events() -> None:
    journal = Journal(WIDE)
    one = Read(journal)
    journal.frame(b"data: {}\n\n")
    journal.end(failed_event(WorkerLost("gone")))
    assert one.events == b"id: 1\ndata: {}\n\nid: 2\n" + failed_event(WorkerLost("gone"))
    assert one.client.is_ended
    assert one.reader.ended == "complete"  # all of it was sent


@pytest.mark.parametrize("after", [0, 5])
async def test_events_that_are_no_longer_kept_are_named(after: int) -> None:
    source = Source(JournalLimits(max_events=8), num_events=40)
    source.to(20)
    first = source.journal.first
    one = Read(source.journal, after)
    assert one.client.body == opening_of(after) + failed_frame(OSError()).split(b"data: ")[0] + (
        b'data: {"error":{"message":"The events after %d are no longer kept; the oldest that is kept is %d.",'
        b'"type":"invalid_request_error","param":"last_event_id","code":"events_expired"}}\n\n'
        % (after, first)
    )
    assert one.client.is_ended
    assert (one.reader.ended, one.reader in source.journal.followers) == ("events_expired", False)
    source.to(21)
    assert one.client.frames[-1].startswith(b"id: failed")


@pytest.mark.parametrize("kind", ["own", "copy"])
async def test_every_place_that_is_still_kept_can_be_read_from(kind: str) -> None:
    for num_before in range(1, 30):
        source = Source(JournalLimits(max_events=8), 30, kind)
        source.to(num_before)
        first = source.journal.first
        for after in range(num_before + 1):
            one = Read(source.journal, after)
            assert one.reader.ended == ("events_expired" if after < first - 1 else "")
            if not one.reader.ended:
                assert one.events == source.after(after)
                one.reader.close("enough")


async def test_a_client_that_reads_too_late_is_told_so() -> None:
    source = Source(JournalLimits(max_events=8), num_events=100)
    one, quick = Read(source.journal), Read(source.journal)
    one.client.stops_reading()
    source.to(100)
    one.client.reads_again()
    await until(lambda: one.client.is_ended)
    assert one.error["code"] == "events_expired"
    assert "after 1 " in one.error["message"]
    assert one.client.body.startswith(RETRY + source.whole[0])
    quick.assert_complete(source)


async def test_a_copy_that_begins_too_late_is_told_of() -> None:
    source = Source(kind="own", num_events=20)
    source.to(10)
    copy = Journal(WIDE)
    one, other = Read(copy, after=3), Read(copy, after=5)
    copy.templates = source.journal.templates
    copy.restore(6, source.journal.entries(5)[0], False)
    assert one.error["code"] == "events_expired"
    assert other.events == source.whole[5]


@pytest.mark.parametrize("reads", [True, False])
async def test_a_failure_of_one_reader_has_no_number_and_is_told_once(reads: bool) -> None:
    source = Source()
    one, other = Read(source.journal), Read(source.journal)
    source.to(3)
    if not reads:
        one.client.stops_reading()
    source.to(4)
    one.reader.fail(StoreUnavailable(), is_final=True)
    one.reader.fail(WorkerLost("again"))
    source.to(NUM)
    one.client.reads_again()
    await until(lambda: one.client.is_ended)
    assert one.events == b"".join(source.whole[:4]) + failed_frame(StoreUnavailable())
    assert one.error["code"] == one.reader.ended == "store_unavailable"
    assert one.reader.detail == StoreUnavailable().message
    other.assert_complete(source)


@pytest.mark.parametrize("error", [StoreUnavailable(), Draining()])
async def test_a_reader_that_may_come_back_is_sent_away_without_an_event(error: HeadraceError) -> None:
    """And without a blank line, which would make it forget its place."""
    source = Source()
    one = Read(source.journal)
    source.to(3)
    source.journal.fail(error)
    await until(lambda: one.client.is_ended)
    assert one.events == b"".join(source.whole[:3]) + b"retry: 3000\n"
    assert one.reader.ended == error.code
    assert not source.journal.followers


async def test_an_unknown_fault_tells_the_client_nothing_and_the_publisher_not_even_that() -> None:
    """Here: a copy without the templates that its entries need."""
    copy = Journal(WIDE)
    one, other = Read(copy), Read(copy, after=1)
    copy.restore(1, b'\1"user text"', False)
    copy.restore(2, b"\0data: {}\n\n", True)
    assert one.error["code"] == one.reader.ended == "internal_error"
    assert b"user text" not in one.client.body
    assert other.events == b"id: 2\ndata: {}\n\n"
    assert not copy.followers


async def test_a_client_that_is_lost_stops_its_reader_alone() -> None:
    source = Source()
    one, other = Read(source.journal), Read(source.journal)
    source.to(3)
    one.client.error = ConnectionResetError()
    source.to(5)
    assert one.gone == ["send failed: ConnectionResetError"]
    one.reader.close(one.gone[0])
    assert (one.reader.ended, one.reader.detail) == ("client_closed", "send failed: ConnectionResetError")
    source.to(NUM)
    other.assert_complete(source)
    assert one.reader.num_events == 4


async def test_a_reader_that_is_closed_sends_nothing_more() -> None:
    source = Source(num_events=20)
    for _ in range(10):
        source.write(SLICE_BYTES)
    one, blocked = Read(source.journal), Read(source.journal)
    blocked.client.stops_reading()
    await turns(1)
    for _ in range(2):
        source.write(SLICE_BYTES)  # in the middle of the replay
    for each in (one, blocked):
        each.reader.close("the page was closed")
    blocked.client.reads_again()
    sent = one.client.body
    source.to(20)
    await turns(10)
    assert one.client.body == sent
    assert blocked.reader.position == 2
    assert not source.journal.followers
    assert (one.reader.ended, one.reader.detail) == ("client_closed", "the page was closed")


async def test_a_client_that_leaves_before_the_last_bytes_has_not_got_all() -> None:
    source = Source()
    one = Read(source.journal)
    source.to(NUM - 1)
    one.client.stops_reading()
    source.to(NUM)
    assert one.reader.ended == "complete"
    one.outlet.drop()
    one.reader.close("closed the connection")
    assert (one.reader.ended, one.reader.detail) == ("client_closed", "closed the connection")


async def test_why_a_reader_has_failed_is_not_forgotten_when_its_client_leaves() -> None:
    one = Read(Journal(WIDE))
    one.reader.fail(StoreUnavailable())
    one.reader.close("closed the connection")
    assert (one.reader.ended, one.reader.detail) == ("store_unavailable", StoreUnavailable().message)
