"""The registry of streams: grace, keeping, memory, copies of others' streams, and what the store tells."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from gateway.own_store import OwnStore
from gateway.stream_meta import StreamMeta
from gateway.streams import COPY_KEPT_S, ELSEWHERE_S, RESERVED_BYTES, StreamLimits, Streams
from pipeline.errors import WorkerLost
from pipeline.stream_errors import (
    JournalFull,
    NoSharedStore,
    StoreUnavailable,
    StreamCancelled,
    UnknownStream,
)
from tests.gateway.answering import turns, until
from tests.gateway.serving import Service, chat, service
from tests.gateway.streaming import SharedStore, Started, post, read, start

GRACE_S, KEEP_S = 30.0, 120.0


@asynccontextmanager
async def shared(**limits: Any) -> AsyncIterator[tuple[Service, SharedStore]]:
    """A service whose streams are in a store with those of others."""
    store = SharedStore()
    async with service(streams=Streams(StreamLimits(**limits), store)) as made:
        yield made, store


async def look(made: Service, now_s: float) -> None:
    made.streams.look(now_s)
    await turns()


def code_of(stream: Started) -> str | None:
    """Why it has failed, by its journal."""
    journal = stream.kept.journal
    if not journal.is_over:
        return None
    event = journal.wire(journal.last - 1, 1)[0].decode()
    return event.split('"code":"')[1].split('"')[0] if "event: failed" in event else "done"


# -- grace ---------------------------------------------------------------------------------------------------


async def test_a_stream_that_nobody_reads_is_abandoned() -> None:
    async with service() as made:
        stream = await start(made)
        now_s = monotonic()
        stream.engine.say("a")
        await look(made, now_s + GRACE_S - 0.5)
        assert code_of(stream) is None
        await look(made, now_s + GRACE_S + 0.1)
        assert code_of(stream) == "abandoned"
        assert stream.engine.num_aborts == 1
        assert made.streams.num_live == 0
        assert [line["ended"] for line in made.lines] == ["abandoned"]
        back = await (await read(made, stream)).to_end()  # for as long as it is kept
        assert back.error["message"] == "Nobody has read this stream for 30 s."
        assert back.ids == ["1", "2", "3"]


async def test_a_stream_that_is_read_goes_on_and_its_grace_begins_when_the_last_reader_leaves() -> None:
    async with service() as made:
        stream = await start(made)
        first, second = await read(made, stream), await read(made, stream)
        for ahead_s in (29, 31, 1e6):
            await look(made, monotonic() + ahead_s)
        await first.leaves()
        await look(made, monotonic() + 1e6)
        assert code_of(stream) is None
        stream.kept.unread_since_s = None  # whatever came before
        await second.leaves()
        left_s = monotonic()
        await look(made, left_s + GRACE_S - 0.5)
        assert code_of(stream) is None
        await look(made, left_s + GRACE_S + 0.1)
        assert code_of(stream) == "abandoned"


async def test_a_reader_that_comes_back_in_time_keeps_it() -> None:
    async with service() as made:
        stream = await start(made)
        now_s = monotonic()
        stream.engine.say("a")
        first = await read(made, stream)
        await first.leaves()
        await look(made, now_s + GRACE_S - 1)
        second = await read(made, stream, last_event_id=first.ids[-1])
        await look(made, now_s + GRACE_S + 60)
        stream.engine.say("b", "stop")
        await second.to_end()
        assert first.ids + second.ids == ["1", "2", "3", "4", "5"]
        assert code_of(stream) == "done"


async def test_an_answer_that_ends_within_the_grace_period_is_whole() -> None:
    async with service() as made:
        stream = await start(made)
        await stream.ends()
        await look(made, monotonic() + GRACE_S + 1)
        assert code_of(stream) == "done"
        assert b"event: done" in (await (await read(made, stream)).to_end()).events


async def test_abandoned_ones_end_and_others_go_on() -> None:
    async with service() as made:
        streams = [await start(made) for _ in range(6)]
        readers = [await read(made, stream) for stream in streams[::2]]
        await look(made, monotonic() + GRACE_S + 1)
        assert [code_of(stream) for stream in streams] == [None, "abandoned"] * 3
        for reader in readers:
            await reader.leaves()


async def test_a_reader_who_came_and_left_while_the_store_was_asked_begins_the_grace_anew() -> None:
    async with shared() as (made, store):
        stream = await start(made)
        store.gate.clear()
        await look(made, monotonic() + GRACE_S + 1)
        reader = await read(made, stream)
        await reader.leaves()
        store.gate.set()
        await turns()
        assert code_of(stream) is None
        await look(made, monotonic() + GRACE_S + 1)
        assert code_of(stream) == "abandoned"


# -- keeping -------------------------------------------------------------------------------------------------


async def test_a_finished_stream_is_kept_and_then_forgotten() -> None:
    async with shared() as (made, store):
        stream = await start(made)
        await stream.ends()
        ended_s = stream.kept.ended_s
        assert stream.kept.state == "finished"
        await look(made, ended_s + KEEP_S - 0.1)
        assert store.count("delete", stream.id) == 0
        assert made.streams.open(stream.kept.meta) is stream.kept
        await look(made, ended_s + KEEP_S + 0.1)
        assert store.count("delete", stream.id) == 1
        assert await made.streams.known(stream.id) is None
        assert made.streams.num_bytes == 0


async def test_a_finished_stream_is_not_forgotten_while_a_slow_reader_has_not_all() -> None:
    async with service() as made:
        stream = await start(made)
        reader = await read(made, stream)
        reader.client.stops_reading()
        stream.engine.say("a")
        await stream.ends()
        await look(made, monotonic() + KEEP_S + 1)
        assert stream.id in made.streams._streams
        reader.client.reads_again()
        await reader.to_end()
        assert reader.ids == [str(number + 1) for number in range(5)]
        await look(made, monotonic() + KEEP_S + 1)
        assert made.streams._streams == {}


# -- memory --------------------------------------------------------------------------------------------------


def bytes_of(*streams: Started) -> int:
    return sum(stream.kept.journal.num_bytes for stream in streams)


async def test_room_for_a_new_stream_is_made_by_the_oldest_finished_ones() -> None:
    async with shared(max_bytes=4 * RESERVED_BYTES) as (made, store):
        done = [await start(made) for _ in range(3)]
        for stream in (done[1], done[0], done[2]):  # the order of their ends counts
            stream.engine.say("x" * 50_000)
            await stream.ends()
        live = [await start(made) for _ in range(2)]
        assert len(made.streams._streams) == 5
        made.streams.limits = StreamLimits(max_bytes=3 * RESERVED_BYTES + bytes_of(done[0], done[2]) + 1)
        made.streams.check_room()
        assert all(stream.id in made.streams._streams for stream in done)  # nothing is sure yet
        await made.streams.discard(await made.streams.create(store.has(7), None))
        assert [stream.id in made.streams._streams for stream in done] == [True, False, True]
        made.streams.limits = StreamLimits(max_bytes=3 * RESERVED_BYTES)
        await made.streams.discard(await made.streams.create(store.has(7), None))
        await turns()
        assert [stream.id in made.streams._streams for stream in [*done, *live]] == [False] * 3 + [True] * 2
        assert all(store.count("delete", stream.id) == 1 for stream in done)
        made.streams.limits = StreamLimits(max_bytes=3 * RESERVED_BYTES - 1)
        with pytest.raises(JournalFull, match=f"have {2 * RESERVED_BYTES} bytes; the limit is 393215"):
            made.streams.check_room()
        with pytest.raises(JournalFull):
            await made.streams.create(store.has(7), None)
        assert made.streams.num_live == 2


async def test_many_that_come_at_once_share_the_room_there_is() -> None:
    """Each has looked for room before any of them has taken it."""
    async with shared(max_bytes=3 * RESERVED_BYTES) as (made, store):
        store.gate.clear()
        posts = [asyncio.create_task(post(made, chat())) for _ in range(5)]
        await until(lambda: len([call for call in store.calls if call[0] == "create"]) == 3)
        store.gate.set()
        clients = await asyncio.gather(*posts)
        assert sorted(client.status for client in clients) == [201] * 3 + [503] * 2
        assert made.streams.num_live == 3


async def test_a_live_stream_takes_what_it_may_come_to_or_what_it_has() -> None:
    async with service() as made:
        stream = await start(made)
        made.streams.limits = StreamLimits(max_bytes=2 * RESERVED_BYTES)
        made.streams.check_room()
        stream.engine.say("x" * (RESERVED_BYTES + 10))
        with pytest.raises(JournalFull):
            made.streams.check_room()
        await stream.ends()
        stream.kept.journal.num_bytes = 10
        made.streams.check_room()
        assert stream.id in made.streams._streams


async def test_several_processes_without_a_store_have_no_room_at_all() -> None:
    with pytest.raises(NoSharedStore):
        Streams(StreamLimits(), OwnStore(), is_shared=True).check_room()


async def test_past_the_total_finished_ones_go_first_and_then_the_largest_live_one_ends() -> None:
    async with service() as made:
        done, small, large = [await start(made) for _ in range(3)]
        done.engine.say("d" * 1000)
        slow = await read(made, done)
        slow.client.stops_reading()
        await done.ends()
        small.engine.say("s" * 100)
        large.engine.say("l" * 300)
        await read(made, small)
        reader = await read(made, large)
        made.streams.limits = StreamLimits(max_bytes=made.streams.num_bytes)
        await look(made, monotonic())
        assert len(made.streams._streams) == 3
        made.streams.limits = StreamLimits(max_bytes=made.streams.num_bytes - 1)
        await look(made, monotonic())
        assert done.id not in made.streams._streams
        assert (code_of(small), code_of(large)) == (None, None)
        slow.client.reads_again()
        await slow.to_end()  # who read it has all
        assert b"event: done" in slow.events
        num_bytes = made.streams.num_bytes
        made.streams.limits = StreamLimits(max_bytes=num_bytes - 1)
        await look(made, monotonic())
        assert (code_of(small), code_of(large)) == (None, "journal_full")
        assert large.engine.is_aborted
        assert not small.engine.is_aborted
        await reader.to_end()
        assert f"have {num_bytes} bytes; the limit is {num_bytes - 1}" in reader.error["message"]
        await look(made, monotonic())  # it is finished now, and makes way
        assert large.id not in made.streams._streams
        assert code_of(small) is None


async def test_a_copy_that_is_the_largest_ends_here_alone() -> None:
    async with shared() as (made, store):
        own = await start(made)
        own.engine.say("a")
        own_reader = await read(made, own)
        meta = store.has()
        reader = await read(made, meta.id, f"token={meta.token}")
        store.writes(meta.id, 20)
        copy = made.streams._streams[meta.id]
        made.streams.limits = StreamLimits(max_bytes=made.streams.num_bytes - 1)
        await look(made, monotonic())
        assert store.count("unfollow", meta.id) == 1
        assert not copy.journal.has_end  # elsewhere it goes on
        assert list(made.streams._streams) == [own.id]
        await reader.to_end()
        assert (reader.ids[-1], reader.error["code"]) == ("failed", "journal_full")
        assert reader.ids[:20] == [str(number + 1) for number in range(20)]
        assert code_of(own) is None
        assert store.count("cancel", meta.id, "other") == store.count("delete", meta.id) == 0
        await own.ends()
        await own_reader.to_end()


async def test_what_is_known_is_counted() -> None:
    async with shared() as (made, store):
        streams = made.streams
        assert (streams.num_live, streams.num_readers, streams.num_bytes) == (0, 0, 0)
        one, other = await start(made), await start(made)
        meta = store.has()
        readers = [await read(made, one), await read(made, one)]
        readers.append(await read(made, meta.id, f"token={meta.token}"))
        assert (streams.num_live, streams.num_readers) == (2, 3)
        one.engine.say("a")
        store.writes(meta.id)
        copied = streams._streams[meta.id].journal.num_bytes
        assert streams.num_bytes == bytes_of(one) + copied > copied > 0
        await one.ends()
        assert (streams.num_live, streams.num_readers) == (1, 1)
        await readers[2].leaves()
        assert streams.num_readers == 0
        await other.ends()
        assert streams.num_live == 0


# -- copies --------------------------------------------------------------------------------------------------


async def test_two_that_look_for_a_stream_at_once_share_one_copy() -> None:
    async with shared() as (made, store):
        meta = store.has()
        store.gate.clear()
        query = f"token={meta.token}"
        reads = [asyncio.create_task(read(made, meta.id, query)) for _ in range(3)]
        await turns()
        store.gate.set()
        await asyncio.gather(*reads)
        await turns()
        assert made.streams.open(meta).state == "copy"
        assert len(made.streams.open(meta).readers) == 3
        assert store.count("follow", meta.id) == 1
        assert store.count("meta", meta.id) == 3


async def test_own_streams_are_known_without_the_store_and_unknown_ones_not_at_all() -> None:
    async with shared() as (made, store):
        stream = await start(made)
        store.error = StoreUnavailable()
        assert await made.streams.known(stream.id) is stream.kept.meta
        with pytest.raises(StoreUnavailable):
            await made.streams.known("0" * 32)
        store.error = None
        for _ in range(2):
            assert await made.streams.known("0" * 32) is None
        assert store.count("meta", "0" * 32) == 3
        assert store.copies == {}


async def test_who_guesses_a_token_does_not_keep_a_stream_of_others_alive() -> None:
    async with shared() as (made, store):
        meta = store.has()
        reader = await (await read(made, meta.id, "token=wrong")).to_end()
        assert reader.error["code"] == "invalid_stream_token"
        assert store.copies == {}
        assert made.streams._streams == {}


async def test_a_copy_that_is_lost_sends_its_readers_away_or_tells_them_why() -> None:
    async with shared() as (made, store):
        for error, said in ((StoreUnavailable(), b"retry: 3000\n"), (UnknownStream(), b"id: failed\n")):
            meta = store.has()
            reader = await read(made, meta.id, f"token={meta.token}")
            store.writes(meta.id, 2)
            waiting = await read(made, meta.id, f"token={meta.token}", last_event_id="9")
            assert store.events is not None
            store.events.copy_lost(meta.id, error)
            for each in (reader, waiting):
                await each.to_end()
                assert said in each.client.body
                assert (b"event: failed" in each.client.body) == (said == b"id: failed\n")
            assert (made.streams._streams, store.copies) == ({}, {})


async def test_a_copy_without_readers_is_forgotten_and_made_anew() -> None:
    async with shared() as (made, store):
        meta = store.has()
        query = f"token={meta.token}"
        first, second = [await read(made, meta.id, query) for _ in range(2)]
        store.writes(meta.id, 2)
        await first.leaves()
        await look(made, monotonic() + 1e6)
        assert meta.id in store.copies
        await second.leaves()
        left_s = monotonic()
        await look(made, left_s + COPY_KEPT_S - 0.5)
        assert meta.id in store.copies
        await look(made, left_s + COPY_KEPT_S + 0.1)
        assert (made.streams._streams, store.copies) == ({}, {})
        assert store.metas == {meta.id: meta}  # its owner's to delete
        third = await read(made, meta.id, query)
        assert store.count("follow", meta.id) == 2
        store.writes(meta.id, 3)
        assert third.ids == ["1", "2", "3"]


async def test_a_copy_that_somebody_has_found_waits_for_its_reader() -> None:
    """It was nearly forgotten: its reader must not follow what is not filled any more."""
    async with shared() as (made, store):
        meta = store.has()
        copy = made.streams.open(meta)
        now_s = monotonic()
        copy.unread_since_s = now_s - COPY_KEPT_S + 0.01
        reader = await read(made, meta.id, f"token={meta.token}", last_event_id="1")
        await look(made, now_s + 1)
        store.writes(meta.id, 2)
        await turns()
        assert reader.ids == ["2"]
        assert store.count("follow", meta.id) == 1
        await reader.leaves()


async def test_finding_a_stream_does_not_make_its_grace_longer() -> None:
    async with service() as made:
        stream = await start(made)
        since_s = stream.kept.unread_since_s
        made.streams.open(stream.kept.meta)
        assert stream.kept.unread_since_s == since_s


async def test_a_copy_that_its_owner_has_ended_already_is_forgotten_when_it_is_cancelled() -> None:
    async with shared() as (made, store):
        meta = store.has()
        made.streams.open(meta)
        store.has_ended.add(meta.id)
        await made.streams.cancel(meta)
        assert (made.streams._streams, store.copies) == ({}, {})


async def test_what_others_have_deleted_is_forgotten_if_it_has_ended() -> None:
    async with shared() as (made, store):
        done, live = await start(made), await start(made)
        await done.ends()
        meta = store.has()
        made.streams.open(meta)
        for stream_id in (done.id, live.id, meta.id, "0" * 32):
            made.streams.forget_asked(stream_id)
        await turns()
        assert set(made.streams._streams) == {live.id, meta.id}
        assert code_of(live) is None


async def test_cancelling_a_copy_is_its_owners_affair() -> None:
    async with shared() as (made, store):
        meta = store.has()
        copy = made.streams.open(meta)
        store.writes(meta.id)
        await made.streams.cancel(meta)
        assert store.count("cancel", meta.id, "other") == 1
        assert store.count("delete", meta.id) == store.count("unfollow", meta.id) == 0
        assert made.streams.open(meta) is copy
        assert copy.journal.written == 1


async def test_cancelling_an_own_stream_ends_it_and_then_forgets_it() -> None:
    async with shared() as (made, store):
        stream = await start(made, chat(n=2))
        reader = await read(made, stream)
        await made.streams.cancel(stream.kept.meta)
        assert [engine.num_aborts for engine in stream.engines] == [1, 1]
        await reader.to_end()
        assert (code_of(stream), reader.error["code"]) == ("cancelled", "cancelled")
        assert store.count("delete", stream.id) == 0
        await turns()
        await made.streams.cancel(stream.kept.meta)
        assert store.count("delete", stream.id) == 1
        assert made.streams._streams == {}
        assert made.lines[0]["ended"] == "cancelled"


async def test_what_others_ask_to_cancel_ends() -> None:
    async with shared() as (made, store):
        stream, other = await start(made), await start(made)
        reader = await read(made, stream)
        assert store.events is made.streams
        store.events.cancel_asked(stream.id)
        await reader.to_end()
        assert reader.error["code"] == "cancelled"
        assert stream.engine.is_aborted
        await turns()
        store.events.cancel_asked(stream.id)  # it is over
        store.events.cancel_asked("0" * 32)
        meta = store.has()
        made.streams.open(meta)
        store.events.cancel_asked(meta.id)  # not ours
        assert code_of(stream) == "cancelled"
        assert stream.id in made.streams._streams
        assert code_of(other) is None


# -- what the store cannot keep ------------------------------------------------------------------------------


async def test_a_stream_that_cannot_be_kept_ends_for_the_engine_and_all_its_readers() -> None:
    async with shared() as (made, store):
        stream, other = await start(made), await start(made)
        readers = [await read(made, stream) for _ in range(2)]
        stream.engine.say("a")
        store.publishes = False
        stream.engine.say("b")
        assert store.events is not None
        store.events.broken(stream.id, StoreUnavailable("It is gone."))
        assert stream.engine.is_aborted
        for reader in readers:
            await reader.to_end()
            assert reader.ids == ["1", "2", "failed"]  # nobody has what the store lacks
            assert reader.error["code"] == "store_unavailable"
            assert reader.error["message"] == "It is gone."
        await turns()
        assert [line["ended"] for line in made.lines] == ["store_unavailable"]
        assert [line["ended"] for line in made.reader_lines] == ["store_unavailable"] * 2
        assert code_of(other) is None
        store.events.broken("0" * 32, StoreUnavailable())
        store.events.broken(stream.id, StoreUnavailable())


async def test_who_comes_to_a_broken_stream_is_told_for_good_and_may_delete_it() -> None:
    """`retry` alone would have it come back until the stream is forgotten."""
    async with shared() as (made, store):
        stream = await start(made)
        store.publishes = False
        stream.engine.say("a")
        assert store.events is not None
        store.events.broken(stream.id, StoreUnavailable("It is gone."))
        late = await (await read(made, stream)).to_end()
        assert (late.ids, late.error["message"]) == (["failed"], "It is gone.")
        await turns()
        await made.streams.cancel(stream.kept.meta)
        assert made.streams._streams == {}


async def test_who_has_all_of_a_broken_stream_need_not_come_back() -> None:
    async with shared() as (made, store):
        stream = await start(made)
        reader = await read(made, stream)
        assert store.events is not None
        store.events.broken(stream.id, StoreUnavailable())  # published at once: the end has a number
        await reader.to_end()
        assert (reader.ids, reader.error["code"]) == (["1"], "store_unavailable")
        again = await (await read(made, stream, last_event_id="1")).to_end()
        assert again.client.status == 204


async def test_a_finished_stream_that_cannot_be_kept_fails_those_who_have_not_all() -> None:
    async with shared() as (made, store):
        stream = await start(made)
        reader = await read(made, stream)
        store.publishes = False
        await stream.ends()
        assert reader.ids == []
        assert store.events is not None
        store.events.broken(stream.id, StoreUnavailable())
        await reader.to_end()
        assert reader.ids == ["failed"]


# -- readers elsewhere ---------------------------------------------------------------------------------------


async def test_readers_elsewhere_keep_a_stream_alive() -> None:
    async with shared() as (made, store):
        unread, read_there, read_here = [await start(made) for _ in range(3)]
        reader = await read(made, read_here)
        now_s = monotonic()
        store.elsewhere = {read_there.id, read_here.id}
        await look(made, now_s + GRACE_S - 0.5)
        assert not [call for call in store.calls if call[0] == "read_elsewhere"]
        await look(made, now_s + GRACE_S + 0.1)
        assert store.calls[-1] == ("read_elsewhere", unread.id, read_there.id)
        assert [code_of(each) for each in (unread, read_there, read_here)] == ["abandoned", None, None]
        asked_s = monotonic()
        await look(made, asked_s + ELSEWHERE_S - 0.5)
        assert store.count("read_elsewhere", read_there.id) == 0
        await look(made, asked_s + ELSEWHERE_S + 0.1)
        assert store.count("read_elsewhere", read_there.id) == 1
        store.elsewhere.clear()
        await look(made, monotonic() + ELSEWHERE_S + 0.1)
        assert [code_of(each) for each in (read_there, read_here)] == ["abandoned", None]
        await reader.leaves()


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_a_reader_that_comes_while_the_store_is_asked_keeps_its_stream(is_elsewhere: bool) -> None:
    async with shared() as (made, store):
        stream = await start(made)
        store.elsewhere = {stream.id} if is_elsewhere else set()
        store.gate.clear()
        for _ in range(3):
            await look(made, monotonic() + GRACE_S + 0.1)
        assert store.count("read_elsewhere", stream.id) == 1  # one question at a time
        reader = await read(made, stream)
        store.gate.set()
        await turns()
        await look(made, monotonic() + 1e6)
        assert code_of(stream) is None
        assert stream.kept.unread_since_s is None
        assert store.count("read_elsewhere", stream.id) == 1
        await reader.leaves()


async def test_what_the_store_cannot_say_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async with shared() as (made, store):
        stream = await start(made)
        for error in (StoreUnavailable(), KeyError("-".join(["a", "text"]))):
            store.error = error
            await look(made, monotonic() + GRACE_S + 0.1)
            assert code_of(stream) is None
        assert "KeyError" in caplog.text
        assert caplog.text.count("unexpected") == 1
        assert "a-text" not in caplog.text
        store.error = None
        await look(made, monotonic() + GRACE_S + 0.1)
        assert code_of(stream) == "abandoned"


# -- beginnings and ends -------------------------------------------------------------------------------------


async def test_events_are_public_when_the_store_has_them() -> None:
    async with shared() as (made, store):
        stream = await start(made)
        assert store.calls[-1] == ("create", stream.id)
        reader = await read(made, stream)
        store.publishes = False
        stream.engine.say("a")
        assert reader.ids == []
        assert stream.kept.journal.written == 2
        stream.kept.journal.publish(1)
        assert reader.ids == ["1"]
        stream.kept.journal.publish(2)
        assert reader.ids == ["1", "2"]


async def test_what_the_store_does_not_take_is_no_stream() -> None:
    store = SharedStore()
    streams = Streams(StreamLimits(), store)
    store.error = StoreUnavailable()
    meta = StreamMeta("s", "t", "me", None, 0.0, 1.0, "d")
    with pytest.raises(StoreUnavailable):
        await streams.create(meta, None)
    assert streams._streams == {}
    store.error = None
    stream = await streams.create(meta, "k")
    assert stream.state == "live"
    await streams.discard(stream)
    assert streams._streams == {}
    assert store.count("delete", "s") == 1


async def test_closing_ends_what_was_begun_and_closes_the_store() -> None:
    store = SharedStore()
    streams = Streams(StreamLimits(), store)
    await streams.start()
    assert store.events is streams
    never = asyncio.Event()
    begun: list[bool] = []

    async def work() -> None:
        begun.append(True)
        await never.wait()

    tasks = [streams.spawn(work()) for _ in range(3)]
    await turns()
    await streams.close()
    assert begun == [True] * 3
    assert all(task.cancelled() for task in tasks)
    assert store.calls == [("close",)]
    assert streams._tasks == set()


async def test_a_fault_beside_is_logged_and_what_is_no_fault_is_not(caplog: pytest.LogCaptureFixture) -> None:
    streams = Streams(StreamLimits(), OwnStore())

    async def fails(error: Exception) -> None:
        raise error

    message = "-".join(["a", "text"])  # so that no line of a traceback has it
    with caplog.at_level(logging.DEBUG):
        for error in (StoreUnavailable(), StreamCancelled(), WorkerLost("w"), KeyError(message)):
            streams.spawn(fails(error))
        await until(lambda: not streams._tasks)
        await turns()
    assert caplog.text.count("unexpected") == 1
    assert "unexpected KeyError" in caplog.text
    assert "a-text" not in caplog.text
