"""`GET /v1/streams/ID/events`: what a reader gets, from where, who may read, and its only two statuses."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from gateway import stream_events
from gateway.answer import AnswerLimits
from gateway.exchange import ABORT_EXTENSION
from gateway.journal import JournalLimits
from gateway.outlet import ReaderLimits
from gateway.streams import StreamLimits, Streams
from pipeline.errors import Draining, WorkerLost
from pipeline.stream_errors import StoreUnavailable
from tests.gateway.answering import turns, until
from tests.gateway.asgi import Request
from tests.gateway.serving import CHAT, Service, chat, service
from tests.gateway.streaming import RETRY, STREAMS, Read, SharedStore, Started, frame, read, start
from tests.gateway.test_streams import shared

TEXT = '水不腐 "quoted"\n\ndata: x\r\nid: 7\r\u2028 Été 🌊 '
MARKER = "xylophone"
DONE = b"event: done\ndata: [DONE]\n\n"
ROUTE = "/v1/streams/{id}/events"
LATER = b"retry: 3000\n"


async def finished(made: Service, num_texts: int = 3) -> Started:
    """A stream of the role, so many texts, the finish and the end."""
    stream = await start(made)
    for number in range(num_texts - 1):
        stream.engine.say(f"{number} ")
    await stream.ends()
    return stream


def assert_refused(one: Read, code: str) -> None:
    """Told why, in an event that EventSource shows, whose id stops it."""
    assert one.client.status == 200
    assert one.client.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert one.client.body.startswith(RETRY + b"id: failed\nevent: failed\ndata: {")
    assert one.client.body.count(b"\n\n") == 2
    assert one.error["code"] == code
    assert one.error.keys() == {"message", "type", "param", "code"}


# -- what a reader gets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        {"stream_options": {"include_usage": True}},
        {"logprobs": True, "top_logprobs": 1},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2},
    ],
    ids=["plain", "choices", "usage", "logprobs", "continuous"],
)
async def test_events_are_the_chunks_of_a_chat_byte_by_byte(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("gateway.flow.time", "gateway.stream_start.time"):
        monkeypatch.setattr(module, SimpleNamespace(time=lambda: 1_700_000_000.5))
    rng = random.Random(repr(fields))
    async with service() as made:
        stream = await start(made, chat(**fields), x_request_id="abc")
        reader = await read(made, stream)
        plain = Request(CHAT, chat(stream=True, **fields), headers={"x-request-id": "abc"})
        task = plain.start(made)
        num = len(stream.engines)
        await until(lambda: len(made.engine.streams) == 2 * num)
        by_choice = list(zip(stream.engines, made.engine.streams[num:], strict=True))
        rest = TEXT * 3
        while rest:  # steps of one character to several
            size = rng.randint(1, 5)
            step, rest = rest[:size], rest[size:]
            for one in rng.choice(by_choice):
                one.say(step, logprobs="logprobs" in fields)
        for pair in by_choice:
            for one in pair:
                one.say("", "stop", logprobs="logprobs" in fields)
        await asyncio.wait_for(task, 5)
        await reader.to_end()
        *chunks, done = plain.client.body[:-2].split(b"\n\n")
        assert done == b"data: [DONE]"
        assert len(chunks) > 10
        expected = [b"id: %d\n%b\n\n" % (number, chunk) for number, chunk in enumerate(chunks, 1)]
        expected.append(b"id: %d\n%b" % (len(chunks) + 1, DONE))
        assert reader.client.body == RETRY + b"".join(expected)
        late = await (await read(made, stream)).to_end()
        assert late.client.body == reader.client.body


async def test_each_event_leaves_in_the_call_that_makes_it() -> None:
    async with service() as made:
        stream = await start(made)
        reader = await read(made, stream)
        assert reader.client.body == RETRY
        for number in range(2, 6):
            stream.engine.say("a")
            assert reader.ids == [str(each) for each in range(1, number + 1)]
        stream.engine.say("a", "stop")
        assert reader.client.is_ended
        await reader.to_end()


async def test_the_head_says_that_nothing_may_be_kept_or_held_back() -> None:
    async with service() as made:
        stream = await start(made)
        reader = await read(made, stream, x_request_id="abc")
        assert reader.client.status == 200
        assert reader.client.headers == {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            "x-request-id": "abc",
        }
        await reader.leaves()


async def test_several_readers_get_the_same_and_one_that_leaves_holds_up_nobody() -> None:
    async with service() as made:
        stream = await start(made)
        readers = [await read(made, stream)]
        for step in range(4):
            stream.engine.say(f"{step} ")
            readers.append(await read(made, stream))
        await readers.pop(1).leaves()
        stream.engine.say("x", "stop")
        bodies = {(await one.to_end()).client.body for one in readers}
        assert len(bodies) == 1
        assert not stream.engine.is_aborted


async def test_a_stream_that_fails_has_a_numbered_end() -> None:
    async with service() as made:
        stream = await start(made)
        reader = await read(made, stream)
        stream.engine.say("a")
        stream.engine.fail(WorkerLost("it broke"))
        await reader.to_end()
        assert reader.ids == ["1", "2", "3"]
        assert reader.client.body.endswith(
            b'id: 3\nevent: failed\ndata: {"error":{"message":"it broke","type":"engine_error",'
            b'"param":null,"code":"worker_lost"}}\n\n'
        )
        back = await (await read(made, stream, last_event_id="2")).to_end()
        assert back.ids == ["3"]
        again = await (await read(made, stream, last_event_id="3")).to_end()
        assert (again.client.status, again.client.body) == (204, b"")


# -- from where ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["header", "query"])
async def test_a_reader_goes_on_after_any_event(by: str) -> None:
    async with service() as made:
        stream = await finished(made)
        live = await start(made)
        for _ in range(5):
            live.engine.say("a")
        for after in range(7):
            given = str(after)
            for each in (stream, live):
                one = (
                    await read(made, each, last_event_id=given)
                    if by == "header"
                    else await read(made, each, f"token={each.token}&last_event_id={given}")
                )
                if after == 6 and each is stream:
                    assert (one.client.status, one.client.body) == (204, b"")
                    assert one.client.headers.keys() == {"cache-control", "x-request-id"}
                    assert one.client.headers["cache-control"] == "no-store"
                else:
                    assert one.client.status == 200
                    assert one.ids == [str(number) for number in range(after + 1, 7)]
                    opening = f"retry: 1000\nid: {after}\n\n" if after else "retry: 1000\n\n"
                    assert one.client.body.startswith(opening.encode())
                    assert one.client.is_ended == (each is stream)
                await one.leaves()
        waiting = await read(made, live, last_event_id="6")  # all that there is yet
        live.engine.say("b", "stop")
        assert (await waiting.to_end()).ids == ["7", "8", "9"]


@pytest.mark.parametrize(
    ("header", "query", "first"),
    [
        ("2", "4", 3),
        ("2", "x", 3),
        (None, "2", 3),
        ("", "2", 3),
        (None, "", 1),
        ("0", "3", 1),
        ("0003", None, 4),
        ("000000000000003", None, 4),
        (None, "1&last_event_id=4", 5),
        (None, "%32", 3),
    ],
)
async def test_the_header_beats_the_query(header: str | None, query: str | None, first: int) -> None:
    async with service() as made:
        stream = await finished(made)
        shown = "" if query is None else f"&last_event_id={query}"
        one = await (await read(made, stream, f"token={stream.token}{shown}", last_event_id=header)).to_end()
        assert one.ids == [str(number) for number in range(first, 7)]


BAD_IDS = [
    *("x", "-1", "+1", "1.0", "1e0", "0x1", "1 ", " ", "1,2", "None", "٣", "²", "é\xff", "1\x00", "faileD"),
    *("7", "1000", "9" * 15, "1" + "0" * 15, "9" * 5000, "failed "),
]


async def test_an_id_that_the_stream_never_gave_is_named() -> None:
    async with service() as made:
        stream = await finished(made)
        for bad in BAD_IDS:
            header = bad.encode().decode("latin-1")
            request = Request(f"{stream.path}/events", method="GET", query=f"token={stream.token}".encode())
            request.scope["headers"].append((b"last-event-id", header.encode("latin-1")))
            client = await request.run(made)
            assert client.status == 200, bad
            assert b"id: failed\nevent: failed\n" in client.body, bad
            error = json.loads(client.frames[-1].split(b"data: ")[1])["error"]
            assert (error["code"], error["param"]) == ("invalid_event_id", "last_event_id"), bad
            assert len(error["message"]) < 250
            assert client.is_ended
        for bad in ("x", "-1", "7", "%20", "%ff", "%"):
            one = await (await read(made, stream, f"token={stream.token}&last_event_id={bad}")).to_end()
            assert_refused(one, "invalid_event_id")
        assert all(line["detail"] == "last_event_id" for line in made.reader_lines if line["status"] == 200)


async def test_an_id_of_the_future_is_named_while_the_stream_is_live() -> None:
    async with service() as made:
        stream = await start(made)
        stream.engine.say("a")
        ahead = await (await read(made, stream, last_event_id="3")).to_end()
        assert_refused(ahead, "invalid_event_id")
        assert ahead.error["message"].endswith("its last one is 2.")


async def test_an_id_that_the_store_has_told_others_is_none_of_the_future() -> None:
    """Another process may have it before we know that the store has it, and its reader then comes here."""
    async with shared() as (made, store):
        stream = await start(made)
        store.publishes = False
        stream.engine.say("a")
        one = await read(made, stream, last_event_id="2")
        store.publishes = True
        stream.engine.say("b")
        assert one.ids == ["3"]
        await one.leaves()


async def test_what_is_no_longer_kept_is_named() -> None:
    limits = StreamLimits(journal=JournalLimits(max_events=8))
    async with service(streams=Streams(limits, SharedStore())) as made:
        stream = await finished(made, num_texts=17)
        first = stream.kept.journal.first
        assert first > 5
        for after in (None, "3", str(first - 2)):
            one = await (await read(made, stream, last_event_id=after)).to_end()
            assert (one.client.status, one.ids) == (200, ["failed"])
            assert one.error["code"] == "events_expired"
            assert f"oldest that is kept is {first}" in one.error["message"]
        whole = await (await read(made, stream, last_event_id=str(first - 1))).to_end()
        assert whole.ids == [str(number) for number in range(first, 21)]
        assert [line["ended"] for line in made.reader_lines] == ["events_expired"] * 3 + ["complete"]


# -- who is told no ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["0" * 32, "0" * 31, "G" * 32, "A" * 32, "x", "", "..", "%2e%2e", "ü" * 32])
async def test_an_unknown_stream_is_told_and_then_ends_for_good(path: str) -> None:
    async with service() as made:
        one = await (await read(made, path, "token=x")).to_end()
        assert_refused(one, "stream_not_found")
        again = await (await read(made, path, "token=x", last_event_id="failed")).to_end()
        assert (again.client.status, again.client.body) == (204, b"")
        by_query = await (await read(made, path, "last_event_id=failed")).to_end()
        assert by_query.client.status == 204
        assert [line["stream"] for line in made.reader_lines] == [path if path == "0" * 32 else None] * 3


async def test_forgotten_and_deleted_streams_are_unknown() -> None:
    async with service() as made:
        kept, deleted = await finished(made), await finished(made)
        query = f"token={deleted.token}".encode()
        assert (await Request(deleted.path, method="DELETE", query=query).run(made)).status == 204
        made.streams.look(monotonic() + made.streams.limits.keep_s + 1)
        for stream in (kept, deleted):
            for after in (None, "6"):
                assert_refused(
                    await (await read(made, stream, last_event_id=after)).to_end(), "stream_not_found"
                )


async def test_a_204_for_who_has_failed_waits_for_its_client() -> None:
    """A server takes an app that returns before its response is sent for broken."""
    async with service() as made:
        request = Request(f"{STREAMS}/x/events", method="GET", query=b"last_event_id=failed")
        request.client.stops_reading()
        task = request.start(made)
        await turns(8)
        assert not task.done()
        request.client.reads_again()
        await asyncio.wait_for(task, 5)
        assert (request.client.status, request.client.is_ended) == (204, True)


# -- tokens and keys -----------------------------------------------------------------------------------------


async def test_the_token_opens_its_stream_alone_by_query_or_header() -> None:
    async with service() as made:
        stream, other = await finished(made), await finished(made)
        good: list[tuple[str, dict[str, str]]] = [
            (f"token={stream.token}", {}),
            ("", {"authorization": f"Bearer {stream.token}"}),
            ("", {"authorization": f"bearer  {stream.token} "}),
            (f"token={other.token}&token={stream.token}", {}),
            (f"a=1&b=2&token={stream.token}&c", {}),
            (f"token={other.token}", {"authorization": f"Bearer {stream.token}"}),
            (f"token={stream.token}", {"authorization": "Bearer wrong"}),
            ("token=" + "".join(f"%{ord(char):02x}" for char in stream.token), {}),
        ]
        for query, headers in good:
            one = await (await read(made, stream, query, **headers)).to_end()
            assert one.events.endswith(DONE), (query, headers)
        bad: list[tuple[str, dict[str, str]]] = [
            ("", {}),
            ("token=", {}),
            (f"token={other.token}", {}),
            (f"token={stream.token}&token=x", {}),
            (f"token={stream.token[:-1]}", {}),
            (f"token={stream.token}x", {}),
            (f"token={stream.token.swapcase()}", {}),
            (f"Token={stream.token}", {}),
            (f"token={stream.id}", {}),
            ("", {"authorization": f"Bearer {other.token}"}),
            ("", {"authorization": stream.token}),
            ("", {"authorization": "Bearer"}),
            ("", {"authorization": ""}),
        ]
        for query, headers in bad:
            one = await (await read(made, stream, query, **headers)).to_end()
            assert_refused(one, "invalid_stream_token")
            assert stream.token not in one.client.body.decode()


async def test_queries_of_any_kind_are_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """`hmac.compare_digest` takes no text beyond ASCII, `parse_qs` no more fields than it is told."""
    async with service() as made:
        stream = await finished(made)
        strange = [
            "token=é",
            "token=\xff\xfe",
            "token=%C3%A9%F0%9F%8C%8A",
            "token=%ff%fe%80",
            "token=%ED%A0%80",
            "token=%00",
            "token=%",
            "token=%zz%1",
            "token=+",
            "&&&;=&token",
            "=",
            "token=" + "x" * 100_000,
            "&".join(f"a{number}={number}" for number in range(1000)) + f"&token={stream.token}",
        ]
        for query in strange:
            one = await (await read(made, stream, query)).to_end()
            assert_refused(one, "invalid_stream_token")
        for value in ("Bearer é", "Bearer \xff", "é", "Bearer " + "x" * 100_000, "Bearer \x00"):
            request = Request(f"{stream.path}/events", method="GET")
            request.scope["headers"].append((b"authorization", value.encode("latin-1")))
            client = await request.run(made)
            assert b'"code":"invalid_stream_token"' in client.body
        late = await (await read(made, stream, f"token={stream.token}&x=%&y=%ff&last_event_id=%35")).to_end()
        assert late.ids == ["6"]
    assert "unexpected" not in caplog.text


@pytest.mark.parametrize("keys", [[], ["alice", "bob"]], ids=["no keys", "keys"])
async def test_the_key_that_started_a_stream_opens_it_and_no_other_does(keys: list[str]) -> None:
    async with service(keys=keys) as made:
        alice: dict[str, Any] = {"authorization": "Bearer alice"}
        stream = await start(made, **alice)
        await stream.ends()
        one = await (await read(made, stream, "", **alice)).to_end()
        assert one.events.endswith(DONE) == bool(keys)  # without keys, nobody is known by one
        for headers in ({"authorization": "Bearer bob"}, {"authorization": "Basic alice"}, {}):
            one = await (await read(made, stream, "", **headers)).to_end()
            assert_refused(one, "invalid_stream_token")
        one = await (await read(made, stream, authorization="Bearer bob")).to_end()
        assert one.events.endswith(DONE)  # the token needs no key
        assert "alice" not in made.log


async def test_a_stream_that_nobodys_key_has_started_is_opened_by_none() -> None:
    """As one of a process without keys, in a store that it shares with one that has some."""
    store = SharedStore()
    async with service(keys=["alice"], streams=Streams(StreamLimits(), store)) as made:
        meta = store.has()
        assert_refused(
            await (await read(made, meta.id, "", authorization="Bearer alice")).to_end(),
            "invalid_stream_token",
        )


# -- copies of other processes' streams ----------------------------------------------------------------------


async def test_a_copy_is_read_from_any_place_while_it_is_filled() -> None:
    async with shared() as (made, store):
        meta = store.has()
        query = f"token={meta.token}"
        ahead = await read(made, meta.id, query, last_event_id="3")
        fresh = await read(made, meta.id, query)
        assert ahead.client.messages == []  # until it is known whether that id was given
        store.writes(meta.id, 2)
        await turns()
        assert (ahead.client.messages, fresh.ids) == ([], ["1", "2"])
        store.writes(meta.id, 2)
        await turns()
        assert (ahead.ids, fresh.ids) == (["4"], ["1", "2", "3", "4"])
        store.writes(meta.id, is_end=True)
        for one in (ahead, fresh):
            assert (await one.to_end()).events.endswith(b"id: 4\n" + frame(4) + b"id: 5\n" + DONE)
        again = await (await read(made, meta.id, query, last_event_id="5")).to_end()
        assert again.client.status == 204
        beyond = await (await read(made, meta.id, query, last_event_id="6")).to_end()
        assert_refused(beyond, "invalid_event_id")


async def test_a_copy_that_does_not_get_where_its_reader_was_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_events, "COPY_LIMIT_S", 0.01)
    async with shared() as (made, store):
        meta = store.has()
        query = f"token={meta.token}"
        one = await (await read(made, meta.id, query, last_event_id="3")).to_end()
        assert (one.client.status, one.client.body) == (200, LATER)
        copy = made.streams._streams[meta.id].journal
        assert copy.followers == set()
        store.writes(meta.id, 3)
        assert (await read(made, meta.id, query, last_event_id="3")).client.body == b"retry: 1000\nid: 3\n\n"


async def test_who_leaves_while_a_copy_is_filled_is_no_reader_of_it() -> None:
    async with shared() as (made, store):
        meta = store.has()
        one = await read(made, meta.id, f"token={meta.token}", last_event_id="3")
        await one.leaves()
        assert one.client.messages == []
        copy = made.streams._streams[meta.id]
        assert (copy.readers, copy.journal.followers) == (set(), set())
        (line,) = made.reader_lines
        assert (line["status"], line["ended"]) == (499, "client_closed")


# -- a store that is away, faults, the server's end ----------------------------------------------------------


async def test_a_store_that_is_away_is_asked_again_later_and_no_place_is_lost() -> None:
    """No event, so that the client comes with the id it has; no blank line, which makes it forget that."""
    async with shared() as (made, store):
        meta = store.has()
        store.error = StoreUnavailable()
        query = f"token={meta.token}"
        for after in (None, "3"):
            one = await (await read(made, meta.id, query, last_event_id=after)).to_end()
            assert (one.client.status, one.client.body) == (200, LATER)
            assert one.client.headers["content-type"] == "text/event-stream; charset=utf-8"
        (line, _) = made.reader_lines
        assert (line["status"], line["ended"], line["events"]) == (200, "store_unavailable", 0)
        store.error = None
        back = await read(made, meta.id, query)
        store.writes(meta.id)
        assert back.ids == ["1"]
        await back.leaves()


async def test_a_server_that_stops_sends_who_looks_for_a_stream_elsewhere() -> None:
    async with shared() as (made, store):
        meta = store.has()
        store.gate.clear()
        one = await read(made, meta.id, f"token={meta.token}")
        made.flow.cut(Draining())
        await one.to_end()
        assert one.client.body == LATER
        assert not made.flow.in_progress


@pytest.mark.parametrize("error", [KeyError(MARKER), OSError(MARKER), ValueError(MARKER)], ids=repr)
async def test_an_unexpected_error_fails_its_reader_alone(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with shared() as (made, store):
        stream = await start(made)
        other = await read(made, stream)
        meta = store.has()
        store.error = error
        with caplog.at_level(logging.DEBUG):
            one = await (await read(made, meta.id, f"token={meta.token}", x_request_id="abc")).to_end()
        assert_refused(one, "internal_error")
        assert f"request abc: unexpected {type(error).__name__}" in caplog.text
        assert MARKER not in one.client.body.decode() + made.log + caplog.text
        assert made.reader_lines[0]["ended"] == "internal_error"
        stream.engine.say("a", "stop")
        assert (await other.to_end()).events.endswith(DONE)


async def test_who_leaves_while_its_stream_is_looked_for_is_logged() -> None:
    async with shared() as (made, store):
        meta = store.has()
        store.gate.clear()
        one = await read(made, meta.id, f"token={meta.token}")
        await one.leaves()
        assert one.client.messages == []
        (line,) = made.reader_lines
        assert (line["status"], line["ended"], line["events"]) == (499, "client_closed", 0)
        store.gate.set()
        await turns()
        assert made.streams._streams == {}
        assert not made.flow.in_progress


async def test_a_reader_that_the_server_ends_lets_go_of_its_stream() -> None:
    async with service() as made:
        stream = await start(made)
        reader = await read(made, stream)
        reader.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader.task
        assert stream.kept.readers == set()
        assert stream.kept.journal.followers == set()
        assert stream.kept.unread_since_s is not None
        (line,) = made.reader_lines
        assert line["ended"] == "client_closed"
        assert line["detail"] == "the server has ended the connection"


# -- slow readers and silence --------------------------------------------------------------------------------


async def test_a_reader_that_does_not_read_is_cut_with_a_reason_and_holds_up_nobody() -> None:
    async with service(limits=AnswerLimits(slow_reader_s=30.0)) as made:
        stream = await start(made)
        cut: list[bool] = []
        slow = await read(made, stream, extensions={ABORT_EXTENSION: lambda: cut.append(True)})
        quick = await read(made, stream)
        slow.client.stops_reading()
        for _ in range(50):
            stream.engine.say("abc")
        await turns()
        now_s = monotonic()
        made.stream_edge.look(now_s + 29)
        assert cut == []
        made.stream_edge.look(now_s + 31)
        made.stream_edge.look(now_s + 32)
        assert cut == [True]
        slow.request.disconnect()  # as the server tells it
        await slow.to_end()
        (line,) = made.reader_lines
        assert (line["status"], line["ended"]) == (200, "client_closed")
        assert re.fullmatch(r"has not read for 3[01] s; the limit is 30 s", line["detail"])
        assert line["events"] < 5
        assert line["lag_peak_events"] > 40
        assert line["buffered_peak_bytes"] == 0  # the journal has it
        made.stream_edge.look(now_s + 100)
        assert cut == [True]
        stream.engine.say("d", "stop")
        assert (await quick.to_end()).ids == [str(number + 1) for number in range(54)]
        assert not stream.engine.is_aborted


async def test_a_reader_that_does_not_take_the_end_is_cut_too() -> None:
    async with service(reader=ReaderLimits(1 << 16, 60.0)) as made:
        stream = await start(made)
        cut: list[bool] = []
        one = await read(made, stream, extensions={ABORT_EXTENSION: lambda: cut.append(True)})
        one.client.stops_reading()
        stream.engine.say("a", "stop")
        await turns()
        made.stream_edge.look(monotonic() + 31)
        assert cut == [True]
        one.request.disconnect()
        await one.to_end()
        assert made.reader_lines[0]["ended"] == "client_closed"


async def test_a_lost_connection_is_the_end_of_its_reader_alone() -> None:
    async with service() as made:
        stream = await start(made)
        lost, other = await read(made, stream), await read(made, stream)
        lost.client.error = ConnectionResetError()
        stream.engine.say("a")
        lost.request.disconnect()
        await lost.to_end()
        stream.engine.say("b", "stop")
        assert (await other.to_end()).events.endswith(DONE)
        lines = {line["ended"]: line for line in made.reader_lines}
        assert lines["client_closed"]["detail"] == "send failed: ConnectionResetError"
        assert lines.keys() == {"client_closed", "complete"}


@pytest.mark.parametrize(
    ("header", "after_s"), [({"x_stainless_read_timeout": "3"}, 1.5), ({}, 5.0)], ids=["told", "not"]
)
async def test_silence_is_filled_with_heartbeats(header: dict[str, str], after_s: float) -> None:
    async with service(limits=AnswerLimits(heartbeat_s=5.0)) as made:
        stream = await start(made)
        reader = await read(made, stream, **header)
        now_s = monotonic()
        made.stream_edge.look(now_s + after_s - 0.5)
        assert reader.client.body == RETRY
        made.stream_edge.look(now_s + after_s + 0.1)
        assert reader.client.body == RETRY + b": ping\n\n"
        stream.engine.say("a")
        assert stream.kept.journal.last == 2  # a heartbeat is nobody's event
        assert reader.ids == ["1", "2"]
        await reader.leaves()
        made.stream_edge.look(now_s + 1000)
        assert reader.client.body.count(b": ping") == 1


# -- what is logged and counted ------------------------------------------------------------------------------


async def test_a_reader_leaves_one_line_without_text_or_token() -> None:
    async with service(keys=["secret"]) as made:
        stream = await start(made, chat(MARKER), authorization="Bearer secret")
        reader = await read(made, stream, x_request_id="abc")
        stream.engine.say(MARKER)
        stream.engine.say(MARKER, "stop")
        await reader.to_end()
        back = await (await read(made, stream, last_event_id="2")).to_end()
        over = await (await read(made, stream, last_event_id="5")).to_end()
        assert over.client.status == 204
        first, second, third = made.reader_lines
        assert first.keys() == {
            *("time", "event", "id", "route", "client", "key", "stream", "status", "total_ms"),
            *("events", "bytes", "lag_peak_events", "ended", "detail", "buffered_peak_bytes"),
        }
        assert (first["id"], first["route"], first["stream"]) == ("abc", ROUTE, stream.id)
        assert (first["status"], first["ended"], first["detail"]) == (200, "complete", "")
        assert (first["events"], first["bytes"]) == (5, len(reader.client.body) - len(RETRY))
        assert (second["events"], second["bytes"]) == (3, len(back.events))
        assert (third["status"], third["events"], third["bytes"]) == (204, 0, 0)
        assert third["ended"] == "complete"
        for secret in (MARKER, stream.token, "secret"):
            assert secret not in made.log
        for status, count in (("200", 2), ("204", 1)):
            labels = {"route": ROUTE, "status": status, "ended": "complete"}
            assert made.sample("headrace_requests_total", **labels) == count


async def test_refusals_leave_a_line_without_what_was_sent() -> None:
    async with service() as made:
        stream = await finished(made)
        await (await read(made, stream, last_event_id=MARKER)).to_end()
        await (await read(made, stream, f"token={MARKER}")).to_end()
        await (await read(made, MARKER, f"token={stream.token}&{MARKER}={MARKER}")).to_end()
        ends = [line["ended"] for line in made.reader_lines]
        assert ends == ["invalid_event_id", "invalid_stream_token", "stream_not_found"]
        assert [line["status"] for line in made.reader_lines] == [200] * 3
        assert MARKER not in made.log
        assert stream.token not in made.log
        for ended in ends:
            labels = {"route": ROUTE, "status": "200", "ended": ended}
            assert made.sample("headrace_requests_total", **labels) == 1


async def test_who_leaves_in_the_middle_has_not_got_all() -> None:
    async with service() as made:
        stream = await start(made)
        reader = await read(made, stream)
        stream.engine.say("a")
        await reader.leaves()
        stream.engine.say("b", "stop")
        assert reader.ids == ["1", "2"]
        (line,) = made.reader_lines
        assert (line["status"], line["ended"], line["events"]) == (200, "client_closed", 2)
        assert line["detail"] == "closed the connection"
        labels = {"route": ROUTE, "status": "200", "ended": "client_closed"}
        assert made.sample("headrace_requests_total", **labels) == 1


async def test_readers_are_in_progress_until_their_end() -> None:
    async with service() as made:
        stream = await start(made)
        await turns()
        readers = [await read(made, stream) for _ in range(2)]
        assert len(made.flow.in_progress) == 3
        await readers[0].leaves()
        assert len(made.flow.in_progress) == 2
        await stream.ends()
        await readers[1].to_end()
        assert len(made.flow.in_progress) == 0
        assert made.stream_edge._events._readers == {}


async def test_a_server_that_stops_sends_readers_of_others_streams_away_with_their_place() -> None:
    store = SharedStore()
    async with service(streams=Streams(StreamLimits(), store)) as made:
        meta = store.has()
        reader = await read(made, meta.id, f"token={meta.token}")
        store.writes(meta.id, 2)
        made.stream_edge.cut(Draining())
        await reader.to_end()
        assert reader.client.body.endswith(b"\n\nretry: 3000\n")
        assert reader.ids == ["1", "2"]
        await turns()
        assert made.flow.in_progress == set()
        assert made.reader_lines[0]["ended"] == "draining"


async def test_a_server_that_stops_tells_readers_of_its_own_streams_how_they_have_ended() -> None:
    """The store takes a moment to have the last event."""
    store = SharedStore()
    async with service(streams=Streams(StreamLimits(), store)) as made:
        stream = await start(made)
        reader = await read(made, stream)
        stream.engine.say("a")
        store.publishes = False
        for cut in (made.flow.cut, made.stream_edge.cut):
            cut(Draining())
        await turns()
        assert not reader.client.is_ended
        stream.kept.journal.publish(stream.kept.journal.written)
        await reader.to_end()
        assert (reader.ids, reader.error["code"]) == (["1", "2", "3"], "draining")
