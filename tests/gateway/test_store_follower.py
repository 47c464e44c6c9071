"""Streams of other processes: copied as they are, while they are read, and ended when their owner is lost."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from gateway import store_copies, store_follower
from gateway.journal import Journal
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
    monkeypatch.setattr(store_copies, "RETRY_PAUSE_S", 0.02)
    monkeypatch.setattr(store_follower, "RETRY_PAUSE_S", 0.02)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed after 0.1 s."""
    monkeypatch.setattr(store_copies, "SILENCE_S", 0.1)
    monkeypatch.setattr(store_copies, "TEND_S", 0.03)


def code_of(copy: Journal) -> bytes:
    """The code of the error that has ended it in the store."""
    assert copy.is_over
    (entry,) = copy.entries(copy.last - 1)
    assert entry.startswith(b"\0event: failed\ndata: ")
    assert entry.endswith(b"\n\n")
    return entry.partition(b'"code":"')[2].partition(b'"')[0]


def lost(process: Process) -> list[tuple[str, str | None]]:
    """Copies that get nothing more, and why."""
    return [(stream_id, error.code) for stream_id, error in process.owner.lost]


async def test_two_followers_have_the_same_whenever_they_come(server: Valkey) -> None:
    async with processes(server.url, 3) as (owner, one, two):
        rng = random.Random(7)
        journal = await owner.stream(1)
        copies = [await one.copy(1)]
        for step in range(400):
            write_some(rng, journal)
            if rng.random() < 0.2:
                await asyncio.sleep(rng.choice((0, 0.001)))
            if step == 200:
                copies.append(await two.copy(1))
        journal.end(b"end")
        await until(lambda: all(copy.is_over for copy in copies))
        await stored(journal)
        two.store.unfollow(id_of(1))
        copies.append(await two.copy(1))
        await until(lambda: copies[2].is_over)
        assert all(same(copy, journal) for copy in copies)
        assert not one.store._follower._copies


async def test_new_stream_ends_the_wait_for_the_others(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_follower, "BLOCK_S", 60)
    async with processes(server.url, 2) as (one, two):
        journals = [await one.stream(number) for number in range(5)]
        for number, journal in enumerate(journals):
            await asyncio.sleep(0.03)  # it is waiting
            copy = await two.copy(number)
            await asyncio.sleep(0.03 * (number % 2))
            journal.frame(b"1")
            await until(lambda copy=copy: copy.last)
        assert server.client.xlen(f"headrace:inbox:{two.store.owner}") >= 4


async def test_much_to_read_comes_in_bounded_replies(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_follower, "MAX_STREAM_EVENTS", 3)
    server.client.config_resetstat()
    async with processes(server.url, 2) as (one, two):
        journals = [await one.stream(number) for number in range(2)]
        rng = random.Random(1)
        for _ in range(200):
            write_some(rng, rng.choice(journals))
        journals[0].end(b"end")
        await stored(*journals)
        copies = [await two.copy(number) for number in range(2)]
        await until(lambda: all(copy.last == j.last for copy, j in zip(copies, journals, strict=True)))
        assert all(map(same, copies, journals))
        assert server.client.info("commandstats")["cmdstat_xread"]["calls"] > journals[1].last // 3


async def test_stream_that_is_left_is_not_read_any_more(server: Valkey) -> None:
    async with processes(server.url, 2) as (one, two):
        journals = [await one.stream(number) for number in range(2)]
        copies = [await two.copy(number) for number in range(2)]
        for journal in journals:
            journal.frame(b"1")
        await until(lambda: all(copy.last == 1 for copy in copies))
        two.store.unfollow(id_of(0))
        two.store.unfollow(id_of(5))
        for journal in journals:
            journal.frame(b"2")
        await until(lambda: copies[1].last == 2)
        assert copies[0].last == 1


async def test_stream_that_is_left_and_come_back_to_is_read_from_its_beginning(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a read was under way that asked for what comes next."""
    monkeypatch.setattr(store_follower, "BLOCK_S", 60)
    async with processes(server.url, 2) as (one, two):
        journal = await one.stream(1)
        copy = await two.copy(1)
        journal.frame(b"1")
        await until(lambda: copy.last == 1)
        await asyncio.sleep(0.03)
        meta = await two.store.meta(id_of(1))
        assert meta is not None
        two.store.unfollow(id_of(1))
        copy = Journal(journal._limits)
        server.client.xadd(stream_key(1), {b"e": b"\0002"}, id="2-0")  # wakes that read
        two.store.follow(meta, copy)
        await until(lambda: copy.last == 2)
        assert copy.first == 1
        assert copy.entries(0) == [b"\0001", b"\0002"]


async def test_streams_of_a_lost_process_fail_once_for_all(server: Valkey, quick: None) -> None:
    async with processes(server.url, 3) as (owner, one, two):
        journals = [await owner.stream(number) for number in range(3)]
        for journal in journals[1:]:
            journal.frame(b"1")
        journals[2].end(b"end")
        await stored(*journals)
        copies = [await process.copy(number) for process in (one, two) for number in range(3)]
        await owner.die()
        server.client.delete(f"headrace:owner:{owner.store.owner}")
        await until(lambda: all(copy.is_over for copy in copies))
        for number in range(3):
            assert same(copies[number], copies[number + 3])
            assert copies[number].last == (1, 2, 2)[number]
        assert [code_of(copies[number]) for number in (0, 1)] == [b"gateway_lost"] * 2
        assert copies[2].entries(1) == [b"\0end"]
        late = await two.copy(1)  # it is in the store
        await until(lambda: late.is_over)
        assert same(late, copies[1])
        assert 0 < server.client.pttl(stream_key(0)) <= 100_000


async def test_process_that_comes_back_too_late_has_lost_its_streams(server: Valkey, quick: None) -> None:
    async with processes(server.url, 2) as (owner, one):
        journal = await owner.stream(1)
        journal.frame(b"1")
        await stored(journal)
        copy = await one.copy(1)
        for task in owner.store._tasks:  # its event loop hangs
            task.cancel()
        server.client.delete(f"headrace:owner:{owner.store.owner}")
        await until(lambda: copy.is_over)
        task = asyncio.create_task(owner.store._appender.run())
        journal.frame(b"2")
        await until(lambda: owner.owner.broken_ones)
        task.cancel()
        assert code_of(copy) == b"gateway_lost"
        assert server.client.xlen(stream_key(1)) == 3


async def test_silence_of_a_living_process_is_no_end(server: Valkey, quick: None) -> None:
    async with processes(server.url, 2) as (owner, one):
        journal = await owner.stream(1)
        copy = await one.copy(1)
        server.client.config_resetstat()
        await until(lambda: server.client.info("commandstats").get("cmdstat_exists", {}).get("calls", 0) >= 8)
        assert not copy.is_over
        journal.frame(b"1")
        await until(lambda: copy.last == 1)


async def test_lease_that_is_back_at_the_second_look_is_no_loss(server: Valkey, quick: None) -> None:
    async with processes(server.url, 2) as (owner, one):
        await owner.stream(1)
        copy = await one.copy(1)
        lease = f"headrace:owner:{owner.store.owner}"
        (known,) = one.store._care.copies.values()
        server.client.delete(lease)
        await until(lambda: known.is_orphan)
        server.client.set(lease, "1")
        await until(lambda: not known.is_orphan)
        assert not copy.is_over


async def test_stream_that_the_store_does_not_have_any_more_ends_here(server: Valkey, quick: None) -> None:
    async with processes(server.url, 2) as (owner, one):
        journals = [await owner.stream(number) for number in range(2)]
        copies = [await one.copy(number) for number in range(2)]
        journals[0].frame(b"1")
        await until(lambda: copies[0].last)
        await owner.store.delete(id_of(0))
        await until(lambda: one.owner.lost)
        assert lost(one) == [(id_of(0), "stream_not_found")]
        assert not copies[0].has_end
        assert not server.client.exists(stream_key(0))
        assert not copies[1].is_over


async def test_store_that_stays_away_ends_all_copies(
    own_server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with processes(own_server.url, 1) as (owner,), processes(own_server.url, 1, limit_s=0.3) as (one,):
        journal = await owner.stream(1)
        copy = await one.copy(1)
        journal.frame(b"1")
        await until(lambda: copy.last)
        own_server.kill()
        await until(lambda: one.owner.lost)
        assert lost(one) == [(id_of(1), "store_unavailable")]
        assert not copy.has_end
        assert not one.store._follower._copies
        own_server.start()
        await owner.stream(2)
        other = await one.copy(2)
        owner.owner.journals[id_of(2)].end(b"end")
        await until(lambda: other.is_over)


async def test_store_that_hangs_for_a_while_ends_no_copy(
    own_server: Valkey, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr(store_follower, "COMMAND_LIMIT_S", 0.05)
    monkeypatch.setattr(store_follower, "BLOCK_S", 0.05)
    async with processes(own_server.url, 2) as (owner, one):
        journal = await owner.stream(1)
        copy = await one.copy(1)
        journal.frame(b"1")
        await until(lambda: copy.last)
        own_server.signal(signal.SIGSTOP)
        num_errors = one.store._health.num_errors
        await until(lambda: one.store._health.num_errors > num_errors + 1)
        own_server.signal(signal.SIGCONT)
        await until(lambda: one.store.is_up)
        journal.frame(b"2")
        await until(lambda: copy.last == 2)
        assert not copy.is_over


async def test_silence_begins_anew_when_the_store_is_back(
    own_server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with processes(own_server.url, 2) as (owner, one):
        await owner.stream(1)
        await one.copy(1)
        own_server.kill()
        await until(lambda: one.store._follower._down_since_s is not None)
        (known,) = one.store._follower._copies.values()
        known.is_orphan, known.heard_s = True, float("inf")
        own_server.start()
        await until(lambda: not known.is_orphan)
        assert known.heard_s < float("inf")


async def test_other_processes_can_ask_for_an_end(server: Valkey) -> None:
    async with processes(server.url, 3) as (owner, one, two):
        metas = [owner.meta(number) for number in range(20)]
        await asyncio.gather(*((one, two)[meta.token[-1] in "02468"].store.cancel(meta) for meta in metas))
        await until(lambda: len(owner.owner.cancelled) >= 20)
        assert sorted(owner.owner.cancelled) == [meta.id for meta in metas]
        assert not one.owner.cancelled


async def test_inbox_is_bounded(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_copies, "MAX_INBOX", 5)
    async with processes(server.url, 1) as (process,):
        gone = process.meta(1, owner="f" * 32)
        for _ in range(9):
            await process.store.cancel(gone)
        assert server.client.xlen("headrace:inbox:" + "f" * 32) == 5
        assert 0 < server.client.pttl("headrace:inbox:" + "f" * 32) <= 60_000


HOSTILE = {
    "a gap": [("3-0", b"e", b"\0003")],
    "no number": [("2-5", b"e", b"\0002"), ("2-6", b"e", b"\0002")],
    "an empty event": [("2-0", b"e", b"")],
    "an unknown template": [("2-0", b"e", b"\x07text")],
    "a number too many": [("9999999999999999999-7", b"e", b"\0002")],
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_what_is_no_stream_of_ours_ends_its_copy_alone(server: Valkey, what: str) -> None:
    async with processes(server.url, 2) as (owner, one):
        journals = [await owner.stream(number) for number in range(2)]
        copies = [await one.copy(number) for number in range(2)]
        for journal in journals:
            journal.frame(b"1")
        await until(lambda: all(copy.last == 1 for copy in copies))
        for entry_id, field, value in HOSTILE[what]:
            server.client.xadd(stream_key(0), {field: value}, id=entry_id)
        await until(lambda: one.owner.lost)
        assert lost(one) == [(id_of(0), "stream_not_found")]
        assert not copies[0].has_end
        journals[1].frame(b"2")
        await until(lambda: copies[1].last == 2)
        assert not copies[1].is_over
        assert len(one.store._follower._copies) == 1


async def test_template_that_is_damaged_ends_its_copy_alone(server: Valkey) -> None:
    async with processes(server.url, 2) as (owner, one):
        journals = [await owner.stream(number) for number in range(2)]
        for journal in journals:
            journal.text(journal.template([b"a", b"b"]) or 0, b"1")
        await stored(*journals)
        server.client.hset(stream_key(0) + ":meta", "1", b"\xff\xff")
        copies = [await one.copy(number) for number in range(2)]
        await until(lambda: bool(one.owner.lost) and copies[1].last == 1)
        assert lost(one) == [(id_of(0), "stream_not_found")]
        assert same(copies[1], journals[1])


async def test_fault_in_a_cancel_does_not_stop_the_reading(server: Valkey) -> None:
    async with processes(server.url, 2) as (owner, one):
        inbox = f"headrace:inbox:{owner.store.owner}"
        server.client.xadd(inbox, {b"cancel": b"\xff\xfe"})
        server.client.xadd(inbox, {b"something": b"else"})
        await one.store.cancel(owner.meta(3))
        await until(lambda: owner.owner.cancelled == [id_of(3)])
