"""Events on their way into a real store: published when they are there, in few commands, never twice."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from gateway import store_appender, store_link
from gateway.journal import Journal, JournalLimits
from pipeline.stream_errors import StoreUnavailable
from tests.gateway.storing import (
    Process,
    id_of,
    processes,
    same,
    stored,
    stream_key,
    until,
    write_some,
)
from tests.valkey import Valkey


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_appender, "RETRY_PAUSE_S", 0.02)


def num_calls(server: Valkey, command: str) -> int:
    return int(server.client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))


def last_stored(server: Valkey, number: int) -> int:
    found = server.client.xrevrange(stream_key(number), count=1)
    return int(found[0][0].partition(b"-")[0]) if found else 0


class Auditor:
    """A follower that asks the server, in the moment of publication, whether it has the event."""

    def __init__(self, server: Valkey, number: int, journal: Journal) -> None:
        self._server = server
        self._number = number
        self._journal = journal
        self.seen: list[tuple[int, int]] = []
        journal.followers.add(self)

    def advance(self) -> None:
        self.seen.append((self._journal.last, last_stored(self._server, self._number)))


async def test_event_is_published_when_the_store_has_it(server: Valkey) -> None:
    async with processes(server.url, 1) as (process,):
        journals = [await process.stream(number) for number in range(3)]
        auditors = [Auditor(server, number, journal) for number, journal in enumerate(journals)]
        rng = random.Random(5)
        for _ in range(60):
            write_some(rng, rng.choice(journals))
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        assert any(journal.last < journal.written for journal in journals)
        journals[1].end(b"event: done\n\n")
        await stored(*journals)
        for auditor, journal in zip(auditors, journals, strict=True):
            assert auditor.seen
            assert all(public <= there for public, there in auditor.seen)
            assert auditor.seen[-1] == (journal.written, journal.written)


async def test_one_step_of_all_streams_is_one_command(server: Valkey) -> None:
    async with processes(server.url, 1) as (process,):
        journals = [await process.stream(number) for number in range(50)]
        for _ in range(10):
            for journal in journals:
                journal.frame(b"data: {}\n\n")
            await stored(*journals)
        assert num_calls(server, "evalsha") == 10
        assert num_calls(server, "xadd") == 50 * 11
        assert process.metrics.registry.get_sample_value("headrace_store_events_total") == 500
        assert process.metrics.registry.get_sample_value("headrace_store_append_seconds_count") == 10


async def test_what_gathers_while_a_command_is_under_way_is_the_next(server: Valkey) -> None:
    async with processes(server.url, 1) as (process,):
        journals = [await process.stream(number) for number in range(5)]
        journals[0].frame(b"the connection is open")
        await stored(*journals)
        server.client.client_pause(100)
        for number in range(200):
            journals[number % 5].frame(b"data: %d\n\n" % number)
            await asyncio.sleep(0)
        await stored(*journals)
        assert 3 <= num_calls(server, "evalsha") <= 4
        assert last_stored(server, 4) == 40


async def test_copy_is_the_journal_byte_by_byte_whatever_the_interleaving(server: Valkey) -> None:
    async with processes(server.url, 2) as (one, two):
        rng = random.Random(11)
        journals = [await one.stream(number) for number in range(6)]
        copies = [await two.copy(number) for number in range(3)]
        for step in range(300):
            write_some(rng, rng.choice(journals))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice((0, 0, 0.001)))
            if step == 150:
                copies += [await two.copy(number) for number in range(3, 6)]
        for journal in journals[:5]:
            journal.end(b"event: done\ndata: [DONE]\n\n")
        await stored(*journals)
        await until(lambda: all(copy.last == j.last for copy, j in zip(copies, journals, strict=True)))
        assert all(map(same, copies, journals))
        assert [copy.is_over for copy in copies] == [True] * 5 + [False]


async def test_old_events_are_dropped_from_the_store_too(server: Valkey) -> None:
    async with processes(server.url, 2) as (one, two):
        journal = await one.stream(1, JournalLimits(max_events=16))
        template = journal.template([b"data: ", b"\n\n"])
        assert template is not None
        for number in range(100):
            journal.text(template, b"%d" % number)
            await stored(journal)
        assert journal.first > 80
        assert server.client.xlen(stream_key(1)) == 101 - journal.first
        copy = await two.copy(1)
        await until(lambda: copy.last == 100)
        assert same(copy, journal)


async def test_much_at_once_is_several_commands(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_appender, "MAX_EVENTS", 7)
    monkeypatch.setattr(store_appender, "MAX_BYTES", 1000)
    async with processes(server.url, 2) as (one, two):
        journals = [await one.stream(number) for number in range(4)]
        for number in range(30):
            for journal in journals:
                journal.frame(b"%d" % number)
        journals[2].frame(bytes(5000))
        for journal in journals:
            journal.end(b"end")
        copies = [await two.copy(number) for number in range(4)]
        await stored(*journals)
        assert num_calls(server, "evalsha") >= 17
        await until(lambda: all(copy.is_over for copy in copies))
        assert all(map(same, copies, journals))


async def test_many_streams_are_several_commands(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_appender, "MAX_EVENTS", 7)
    async with processes(server.url, 1) as (process,):
        journals = [await process.stream(number) for number in range(20)]
        for turn in range(1, 4):
            for journal in journals:
                journal.frame(b"1")
            await stored(*journals)
            assert num_calls(server, "evalsha") == 3 * turn


async def test_end_is_marked_and_shortens_the_life_of_the_stream(server: Valkey) -> None:
    async with processes(server.url, 1) as (process,):
        journal = await process.stream(1)
        journal.frame(b"data: 1\n\n")
        await stored(journal)
        assert 600_000 < server.client.pttl(stream_key(1)) <= 700_000
        journal.end(b"data: 2\n\n")
        await stored(journal)
        entries = server.client.xrange(stream_key(1))
        assert [fields for _, fields in entries] == [
            {b"c": b""},
            {b"e": b"\0data: 1\n\n"},
            {b"d": b"\0data: 2\n\n"},
        ]
        for key in (stream_key(1), stream_key(1) + ":meta"):
            assert 0 < server.client.pttl(key) <= 100_000
        assert not process.store._appender._streams  # nothing is remembered of it


async def test_store_that_hangs_for_a_while_loses_nothing(
    own_server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hanging server still reads the first command, after the same events came again."""
    monkeypatch.setattr(store_appender, "COMMAND_LIMIT_S", 0.1)
    async with processes(own_server.url, 2) as (one, two):
        journals = [await one.stream(number) for number in range(3)]
        copies = [await two.copy(number) for number in range(3)]
        rng = random.Random(3)
        for turn in range(2):
            for _ in range(40):
                write_some(rng, rng.choice(journals))
                await asyncio.sleep(0)
            own_server.signal(signal.SIGSTOP)
            for _ in range(40):
                write_some(rng, rng.choice(journals))
                await asyncio.sleep(0.005)
            assert any(journal.last < journal.written for journal in journals)
            own_server.signal(signal.SIGCONT)
            assert one.store._health.num_errors > turn
        for journal in journals:
            journal.end(b"end")
        await stored(*journals)
        await until(lambda: all(copy.is_over for copy in copies))
        assert all(map(same, copies, journals))
        assert not one.owner.broken_ones
        assert one.store._appender._failing_since_s is None  # the next time it fails counts anew


async def test_reply_that_is_lost_makes_no_event_twice(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = 0
    receive = store_link._Replies.data_received

    def lose(self: store_link._Replies, data: bytes) -> None:
        nonlocal lost
        if lost < 3 and data == b"*0\r\n":  # an append has gone well
            lost += 1
            self._fail(ConnectionResetError())
        else:
            receive(self, data)

    monkeypatch.setattr(store_link._Replies, "data_received", lose)
    async with processes(server.url, 2) as (one, two):
        journals = [await one.stream(number) for number in range(3)]
        for number in range(5):
            for journal in journals:
                journal.text(journal.template([b"data: %d" % number, b"\n"]) or 0, b"x")
            await asyncio.sleep(0.01)
        journals[0].end(b"end")
        await stored(*journals)
        assert lost == 3
        copies = [await two.copy(number) for number in range(3)]
        await until(lambda: all(copy.last == j.last for copy, j in zip(copies, journals, strict=True)))
        assert all(map(same, copies, journals))
        assert not one.owner.broken_ones


def assert_broken(process: Process, *numbers: int) -> None:
    """Just these, each once; and what was written is public here."""
    assert sorted(stream_id for stream_id, _ in process.owner.broken_ones) == [id_of(n) for n in numbers]
    for stream_id, error in process.owner.broken_ones:
        assert isinstance(error, StoreUnavailable)
        assert process.owner.journals[stream_id].is_over


async def test_store_that_comes_back_empty_breaks_its_streams(own_server: Valkey) -> None:
    async with processes(own_server.url, 1) as (process,):
        journals = [await process.stream(number) for number in range(3)]
        for journal in journals:
            journal.frame(b"1")
        await stored(*journals)
        own_server.kill()
        own_server.start()
        for journal in journals[:2]:
            journal.frame(b"2")
        process.owner.journals.pop(id_of(2))  # as if its answer was just being started
        journals[2].frame(b"2")
        await until(lambda: len(process.owner.broken_ones) == 3)
        journals[2].end(b"3")
        assert journals[2].is_over
        process.owner.journals[id_of(2)] = journals[2]
        assert_broken(process, 0, 1, 2)
        new = await process.stream(7)
        new.frame(b"1")
        await stored(new)
        assert last_stored(own_server, 7) == 1
        assert own_server.client.exists(stream_key(0), stream_key(1)) == 0
        await until(lambda: not process.store._appender._loose)


async def test_store_that_stays_away_breaks_what_waits_for_it(
    own_server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_appender, "COMMAND_LIMIT_S", 0.05)
    async with processes(own_server.url, 1, limit_s=0.3) as (one,), processes(own_server.url, 1) as (two,):
        journals = [await one.stream(number) for number in range(3)]
        copy = await two.copy(0)
        own_server.signal(signal.SIGSTOP)
        journals[0].frame(b"1")
        journals[1].end(b"1")
        await until(lambda: len(one.owner.broken_ones) == 2)
        num_errors = one.store._health.num_errors
        await until(lambda: one.store._health.num_errors > num_errors + 2)
        assert_broken(one, 0, 1)
        assert journals[2].written == 0
        own_server.signal(signal.SIGCONT)
        await until(lambda: copy.is_over)  # those elsewhere learn of it in the end
        assert same(copy, journals[0])
        await until(lambda: not one.store._appender._loose)
        assert_broken(one, 0, 1)


async def test_store_that_has_lost_its_newest_events_breaks_the_stream(server: Valkey) -> None:
    """As a replica may have that takes over."""
    async with processes(server.url, 1) as (process,):
        journals = [await process.stream(number) for number in range(2)]
        for journal in journals:
            journal.frame(b"1")
        await stored(*journals)
        old = server.client.dump(stream_key(0))
        for journal in journals:
            journal.frame(b"2")
        await stored(*journals)
        server.client.restore(stream_key(0), 100_000, old, replace=True)
        server.client.client_kill_filter(_type="normal", skipme=True)
        for journal in journals:
            journal.frame(b"3")
        await stored(*journals)
        assert_broken(process, 0)
        assert [last_stored(server, 0), last_stored(server, 1)] == [1, 3]


@pytest.mark.parametrize("how", ["ended elsewhere", "deleted", "replaced", "without meta"])
async def test_stream_that_is_not_ours_any_more_is_broken_alone(server: Valkey, how: str) -> None:
    async with processes(server.url, 1) as (process,):
        journals = [await process.stream(number) for number in range(3)]
        for journal in journals:
            journal.frame(b"1")
        await stored(*journals)
        key = stream_key(1)
        if how == "ended elsewhere":
            server.client.xadd(key, {b"d": b"\0failed"}, id="2-0")
        else:
            server.client.delete(key + ":meta" if how == "without meta" else key)
        if how == "replaced":
            server.client.set(key, "x", px=1000)
        for journal in journals:
            journal.text(journal.template([b"a", b"b"]) or 0, b"2")
            journal.frame(b"3")
        await stored(*journals)
        assert_broken(process, 1)
        journals[0].end(b"4")
        await stored(journals[0])
        assert [last_stored(server, number) for number in (0, 2)] == [4, 3]
        assert server.client.exists(key + ":meta") == (0 if how == "without meta" else 1)


async def test_store_without_memory_is_waited_for(server: Valkey) -> None:
    async with processes(server.url, 1) as (process,):
        journals = [await process.stream(number) for number in range(2)]
        server.client.config_set("maxmemory", 1)
        try:
            for journal in journals:
                journal.frame(b"1")
            await until(lambda: process.store._health.num_errors)
            assert not process.store.is_up
            assert journals[0].last == 0
        finally:
            server.client.config_set("maxmemory", 0)
        await stored(*journals)
        assert not process.owner.broken_ones
        assert [last_stored(server, 0), last_stored(server, 1)] == [1, 1]


async def test_script_that_the_server_forgot_is_loaded_again(server: Valkey) -> None:
    async with processes(server.url, 1) as (process,):
        journal = await process.stream(1)
        server.client.script_flush()
        journal.frame(b"1")
        await stored(journal)
        assert last_stored(server, 1) == 1


class Faulty:
    def advance(self) -> None:
        raise RuntimeError("a reader's fault")


async def test_fault_of_one_reader_does_not_stop_the_others(server: Valkey) -> None:
    async with processes(server.url, 1) as (process,):
        journals = [await process.stream(number) for number in range(2)]
        journals[0].followers.add(Faulty())
        for turn in range(1, 3):
            for journal in journals:
                journal.frame(b"%d" % turn)
            await stored(*journals)
        assert num_calls(server, "evalsha") == 2


async def test_what_was_written_last_gets_there_before_the_end(server: Valkey) -> None:
    async with processes(server.url, 1) as (process,):
        journal = await process.stream(1)
        journal.frame(b"1")
        journal.end(b"2")
    assert last_stored(server, 1) == 2
    assert server.client.keys("headrace:owner:*") == []


async def test_deleted_stream_is_not_sent(server: Valkey) -> None:
    async with processes(server.url, 1) as (process,):
        journal = await process.stream(1)
        journal.frame(b"1")
        await process.store.delete(id_of(1))
        other = await process.stream(2)
        other.frame(b"1")
        await stored(other)
        assert server.client.exists(stream_key(1), stream_key(1) + ":meta") == 0
        assert not process.owner.broken_ones
