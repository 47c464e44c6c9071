"""What attacks on resumable streams have found: each was wrong once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from gateway import store_copies
from gateway.journal import Journal, JournalLimits
from gateway.journal_writer import DONE_EVENT
from gateway.store_script import lease_key
from gateway.streams import StreamLimits, Streams
from pipeline.stream_errors import UnknownStream
from tests.components import need
from tests.gateway.answering import turns
from tests.gateway.serving import chat, service
from tests.gateway.storing import id_of, processes, stored, stream_key, until, valkey
from tests.gateway.streaming import Read, SharedStore, read, start
from tests.valkey import Valkey


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    need("valkey")
    with valkey(tmp_path_factory.mktemp("valkey")) as started:
        yield started


# -- a stream that has ended is deleted through another process than its owner's -----------------------------


@pytest.mark.parametrize("way", ["cancel", "delete"])
async def test_finished_stream_that_another_process_deletes_is_forgotten_by_its_owner(
    server: Valkey, way: str
) -> None:
    """`cancel`: that process has not read so far yet."""
    server.client.flushall()
    async with processes(server.url, 2) as (one, two):
        journal, other = await one.stream(1), await one.stream(2)
        journal.end(DONE_EVENT)
        other.frame(b"data: 1\n\n")
        await stored(journal, other)
        meta = await two.store.meta(id_of(1))
        assert meta is not None
        if way == "cancel":
            assert await two.store.cancel(meta)
        else:
            await two.store.delete(id_of(1))
        assert server.client.exists(stream_key(1), stream_key(1) + ":meta") == 0
        await until(lambda: one.owner.forgotten == [id_of(1)])
        assert server.client.exists(stream_key(2)) == 1
        await one.store.delete(id_of(2))
        assert server.client.exists(stream_key(2)) == 0
        await asyncio.sleep(0.05)
        assert one.owner.forgotten == [id_of(1)]  # nobody need tell itself


async def test_stream_whose_owner_is_gone_is_deleted_at_once(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.client.flushall()
    monkeypatch.setattr(store_copies, "SILENCE_S", 0.05)
    async with processes(server.url, 2) as (one, two):
        journal = await one.stream(1)
        journal.frame(b"data: 1\n\n")
        await stored(journal)
        copy = await two.copy(1)
        await until(lambda: copy.last == 1)
        meta = await two.store.meta(id_of(1))
        assert meta is not None
        assert not await two.store.cancel(meta)
        assert server.client.exists(stream_key(1)) == 1  # its owner ends it, with an event that says so
        await until(lambda: one.owner.cancelled == [id_of(1)])
        await one.die()
        server.client.delete(lease_key(one.store.owner))
        assert not await two.store.cancel(meta)
        assert server.client.exists(stream_key(1), stream_key(1) + ":meta") == 0
        await until(lambda: two.owner.lost)
        ((stream_id, error),) = two.owner.lost
        assert (stream_id, error.code) == (id_of(1), "stream_not_found")


async def test_owner_forgets_what_others_have_deleted_if_it_has_ended() -> None:
    store = SharedStore()
    async with service(streams=Streams(StreamLimits(), store)) as made:
        stream = await start(made)
        made.streams.forget_asked(stream.id)
        assert stream.id in made.streams._streams
        await stream.ends()
        made.streams.forget_asked(stream.id)
        made.streams.forget_asked("0" * 32)
        assert (await read(made, stream)).error["code"] == "stream_not_found"


async def test_copy_of_a_stream_that_had_ended_is_forgotten_with_it() -> None:
    class Ended(SharedStore):
        async def cancel(self, meta: object) -> bool:
            return True

    store = Ended()
    async with service(streams=Streams(StreamLimits(), store)) as made:
        meta = store.has()
        copy = made.streams.open(meta)
        reader = await read(made, meta.id, f"token={meta.token}")
        await made.streams.cancel(meta)
        assert made.streams._streams == {}
        assert store.copies == {}
        await reader.to_end()  # nobody fills the copy any more
        assert reader.error["code"] == "stream_not_found"
        assert not copy.journal.followers


@pytest.mark.parametrize("num_turns", range(10))
async def test_copy_that_is_lost_just_when_a_reader_comes_does_not_keep_it_waiting(num_turns: int) -> None:
    """From when it was found until it is followed."""
    store = SharedStore()
    async with service(streams=Streams(StreamLimits(), store)) as made:
        meta = store.has()
        reader = Read(made, meta.id, f"token={meta.token}")
        for _ in range(num_turns):
            await asyncio.sleep(0)
        del store.metas[meta.id]
        made.streams.copy_lost(meta.id, UnknownStream())
        await turns(20)
        made.streams.copy_lost(meta.id, UnknownStream())  # if it came after the first
        await reader.to_end()
        assert reader.error["code"] == "stream_not_found"


async def test_stream_that_is_deleted_while_it_is_read_here_is_no_fault(
    server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first events were read, and what they need is gone."""
    server.client.flushall()
    async with processes(server.url, 2) as (one, two):
        journal = await one.stream(1)
        template = journal.template([b"data: ", b"\n\n"])
        assert template is not None
        journal.text(template, b'"a"')
        await stored(journal)
        meta = await two.store.meta(id_of(1))
        assert meta is not None
        server.client.delete(stream_key(1) + ":meta")
        two.store.follow(meta, Journal(JournalLimits()))
        await until(lambda: two.owner.lost)
        assert isinstance(two.owner.lost[0][1], UnknownStream)
        assert caplog.records == []


# -- a store without memory ----------------------------------------------------------------------------------


async def test_copy_whose_owner_is_gone_ends_also_if_the_store_takes_no_end(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers all that reads, and renews no lease."""
    server.client.flushall()
    monkeypatch.setattr(store_copies, "SILENCE_S", 0.05)
    async with processes(server.url, 2, grace_s=0.2) as (one, two):
        journal = await one.stream(1)
        journal.frame(b"data: 1\n\n")
        await stored(journal)
        copy = await two.copy(1)
        await until(lambda: copy.last == 1)
        await one.die()
        server.client.config_set("maxmemory", 1)
        try:
            server.client.delete(lease_key(one.store.owner))
            await until(lambda: two.owner.lost)
        finally:
            server.client.config_set("maxmemory", 0)
        ((stream_id, error),) = two.owner.lost
        assert (stream_id, error.code) == (id_of(1), "gateway_lost")
        assert two.store._care.copies == {}


# -- memory --------------------------------------------------------------------------------------------------


class Probe:
    """A follower that lives as long as its journal."""

    def advance(self) -> None:
        pass

    def fail(self, error: object) -> None:
        pass


@pytest.mark.parametrize("end", ["complete", "cancelled", "abandoned"])
async def test_journal_of_a_forgotten_stream_is_freed_without_the_collector(end: str) -> None:
    """It may have megabytes, and an answer and its writer hold each other."""
    async with service() as made:
        stream = await start(made, chat(n=2))
        reader = await read(made, stream)
        probe = Probe()
        is_there = weakref.ref(probe)
        stream.kept.journal.followers.add(probe)
        del probe
        if end == "complete":
            await stream.ends()
        elif end == "cancelled":
            made.streams.cancel_asked(stream.id)
        else:
            await reader.leaves()
            made.streams.look(1e12)
        await turns(8)
        await reader.to_end()
        del reader
        gc.disable()
        try:
            made.streams.look(1e12)
            await turns(8)
            assert stream.id not in made.streams._streams
            assert is_there() is None
        finally:
            gc.enable()
