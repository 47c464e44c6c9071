"""The shared store as requests use it: streams, claims, who reads; and what befalls them when it is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
import subprocess
from pathlib import Path

import pytest

from gateway import store_link, stream_store
from gateway.metrics import Metrics
from gateway.stream_meta import PENDING
from gateway.stream_ports import Store
from gateway.stream_store import StreamStore
from pipeline.stream_errors import KeyInProgress, KeyReused, StoreUnavailable
from tests.components import need
from tests.gateway.storing import (
    OPTIONS,
    Process,
    id_of,
    processes,
    same,
    stored,
    stream_key,
    until,
)
from tests.tcp_server import dialled, listening
from tests.valkey import Valkey


@pytest.mark.parametrize("key_id", ["key", "", None])
async def test_meta_is_found_by_every_process(server: Valkey, key_id: str | None) -> None:
    async with processes(server.url, 2) as (one, two):
        meta = one.meta(1, key_id=key_id, token="tökén \r\n$5", created_s=0.1 + 0.2)
        await one.store.create(meta, None)
        assert await two.store.meta(id_of(1)) == meta
        assert await one.store.meta(id_of(1)) == meta
        assert await two.store.meta(id_of(2)) is None
        await two.store.delete(id_of(1))
        assert await one.store.meta(id_of(1)) is None


async def test_everything_in_the_store_expires(server: Valkey) -> None:
    async with processes(server.url, 2) as (one, two):
        await one.store.claim("pending", id_of(9), "digest")
        await one.store.claim("key", id_of(1), "digest")
        await one.store.create(one.meta(1), "key")
        journals = [one.journal(1), await one.stream(2), await one.stream(3)]
        copy = await two.copy(1)
        for journal in journals[:2]:
            journal.text(journal.template([b"a", b"b"]) or 0, b'"x"')
        journals[1].end(b"end")
        await stored(*journals)
        await until(lambda: copy.last)
        await two.store.cancel(one.meta(3))
        await until(lambda: one.owner.cancelled)
        await until(lambda: server.client.keys("*:reader"))
        keys = sorted(key.decode() for key in server.client.scan_iter())
        kinds = {key.split(":")[1] for key in keys} | {
            key.split(":")[3] for key in keys if key.count(":") > 2
        }
        assert kinds == {"stream", "meta", "reader", "claim", "owner", "inbox"}
        limits_ms = {"owner": 10_000, "inbox": 60_000, "claim": 700_000, "stream": 700_000}
        for key in keys:
            assert 0 < server.client.pttl(key) <= limits_ms[key.split(":")[1]], key


async def test_ended_stream_is_forgotten_when_its_time_has_come(server: Valkey) -> None:
    async with processes(server.url, 1, keep_s=0.05) as (process,):
        await process.store.claim("key", id_of(1), "digest")
        await process.store.create(process.meta(1), "key")
        journal = process.journal(1)
        journal.end(b"end")
        await stored(journal)
        await until(lambda: not server.client.keys("headrace:stream:*"))
        assert await process.store.meta(id_of(1)) is None
        assert await process.store.claim("key", id_of(2), "digest") is None  # it stood for nothing
        assert await process.store.claim("key", id_of(3), "digest") is PENDING


async def test_claim_is_of_one_of_many(server: Valkey) -> None:
    async with processes(server.url, 2) as made:
        answers = await asyncio.gather(
            *(made[number % 2].store.claim("key", id_of(number), "digest") for number in range(20))
        )
        assert answers.count(None) == 1
        assert answers.count(PENDING) == 19
        winner = answers.index(None)
        meta = made[0].meta(winner)
        await made[0].store.create(meta, "key")
        again = await asyncio.gather(
            *(made[number % 2].store.claim("key", id_of(100 + number), "digest") for number in range(20))
        )
        assert again == [meta] * 20


async def test_claim_with_another_body_is_refused(server: Valkey) -> None:
    async with processes(server.url, 2) as (one, two):
        assert await one.store.claim("key", id_of(1), "digest") is None
        with pytest.raises(KeyReused):
            await two.store.claim("key", id_of(2), "otherdigest")
        await one.store.create(one.meta(1), "key")
        with pytest.raises(KeyReused):
            await two.store.claim("key", id_of(2), "otherdigest")
        assert await two.store.claim("other key", id_of(2), "otherdigest") is None


async def test_claim_is_free_after_its_release_by_who_has_it(server: Valkey) -> None:
    async with processes(server.url, 1) as (process,):
        store = process.store
        assert await store.claim("key", id_of(1), "digest") is None
        assert await store.claim("key", id_of(1), "digest") is None  # the same, again
        await store.release("key", id_of(2))
        assert await store.claim("key", id_of(3), "digest") is PENDING
        await store.release("key", id_of(1))
        assert await store.claim("key", id_of(3), "digest") is None
        await store.create(process.meta(3), "key")
        await store.delete(id_of(3))
        assert await store.claim("key", id_of(4), "digest") is None


async def test_claim_that_ran_out_makes_no_second_stream(server: Valkey) -> None:
    async with processes(server.url, 1) as (process,):
        store = process.store
        await store.claim("key", id_of(1), "digest")
        server.client.delete(*server.client.keys("headrace:claim:*"))
        await store.claim("key", id_of(2), "digest")
        with pytest.raises(KeyInProgress):
            await store.create(process.meta(1), "key")
        assert await store.meta(id_of(1)) is None
        await store.create(process.meta(2), "key")


async def test_nothing_of_a_clients_key_is_in_the_store(server: Valkey) -> None:
    async with processes(server.url, 1) as (process,):
        await process.store.claim("key:secret words é", id_of(1), "digest")
        await process.store.create(process.meta(1), "key:secret words é")
        (key,) = server.client.keys("headrace:claim:*")
        assert b"secret" not in key + server.client.get(key)


async def test_owner_learns_which_streams_others_read(server: Valkey) -> None:
    async with processes(server.url, 2, grace_s=1.2) as (one, two):
        ids, key = [id_of(number) for number in range(4)], stream_key(3) + ":reader"
        for number in range(4):
            await one.stream(number)
        assert await one.store.read_elsewhere([]) == set()
        assert await one.store.read_elsewhere(ids) == set()
        await two.copy(1)
        await two.copy(3)
        await until(lambda: server.client.exists(stream_key(1) + ":reader", key) == 2)
        assert await one.store.read_elsewhere(ids) == {ids[1], ids[3]}
        server.client.delete(key)
        await until(lambda: server.client.exists(key))  # it is told again and again
        server.client.delete(key)
        two.store.unfollow(ids[3])
        await until(lambda: server.client.exists(key))  # the grace period begins anew
        assert 0 < server.client.pttl(key) <= 1200
        two.store.unfollow(ids[1])
        server.client.delete(key)
        assert await one.store.read_elsewhere(ids) == {ids[1]}


async def assert_unavailable(process: Process) -> None:
    store, meta = process.store, process.meta(1)
    for work in (
        store.claim("key", id_of(1), "digest"),
        store.release("key", id_of(1)),
        store.create(meta, "key"),
        store.meta(id_of(1)),
        store.cancel(meta),
        store.delete(id_of(1)),
        store.read_elsewhere([id_of(1)]),
    ):
        with pytest.raises(StoreUnavailable):
            await work
    assert not store.is_up


async def test_store_that_is_away_is_told_at_once_and_found_again(own_server: Valkey) -> None:
    own_server.kill()
    async with processes(own_server.url, 1) as (process,):
        await assert_unavailable(process)
        own_server.start()
        await until(lambda: process.store.is_up)
        await until(lambda: own_server.client.exists(f"headrace:owner:{process.store.owner}"))
        await process.store.create(process.meta(2), None)
        own_server.kill()
        await assert_unavailable(process)


async def test_store_that_hangs_is_told_within_the_limit(
    own_server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stream_store.COMMAND_LIMIT_S <= 2
    monkeypatch.setattr(stream_store, "COMMAND_LIMIT_S", 0.05)
    async with processes(own_server.url, 1) as (process,):
        assert process.store.is_up
        own_server.signal(signal.SIGSTOP)
        try:
            await assert_unavailable(process)
        finally:
            own_server.signal(signal.SIGCONT)
        await until(lambda: process.store.is_up)


async def test_what_a_request_made_before_it_was_given_up_is_taken_back(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_store, "LEASE_RENEWAL_S", 0.05)
    async with processes(server.url, 1) as (process,):
        await process.store.claim("key", id_of(1), "digest")
        task = asyncio.create_task(process.store.create(process.meta(1), "key"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await until(lambda: not process.store._undone)
        assert server.client.exists(stream_key(1), stream_key(1) + ":meta") == 0
        assert await process.store.claim("key", id_of(2), "digest") is None


@pytest.mark.parametrize("what", ["claim", "create"])
async def test_what_a_failed_request_made_is_taken_back(
    server: Valkey, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its commands have reached the store; the reply is lost."""
    monkeypatch.setattr(stream_store, "LEASE_RENEWAL_S", 0.05)
    receive, lost = store_link._Replies.data_received, [True]
    async with processes(server.url, 1) as (process,):
        store = process.store
        if what == "create":
            await store.claim("key", id_of(1), "digest")

        def lose(self: store_link._Replies, data: bytes) -> None:
            if (b":1\r\n" if what == "create" else b"*0\r\n") in data and lost:
                lost.pop()
                self._fail(ConnectionResetError())
            else:
                receive(self, data)

        monkeypatch.setattr(store_link._Replies, "data_received", lose)
        work = (
            store.create(process.meta(1), "key")
            if what == "create"
            else store.claim("key", id_of(1), "digest")
        )
        with pytest.raises(StoreUnavailable):
            await work
        assert server.client.exists(stream_key(1), stream_key(1) + ":meta") == (2 if what == "create" else 0)
        assert len(server.client.keys("headrace:claim:*")) == 1
        await until(lambda: not store._undone)
        assert server.client.exists(stream_key(1), stream_key(1) + ":meta") == 0
        assert await store.claim("key", id_of(2), "digest") is None


async def test_question_that_is_given_up_mixes_up_no_answers(server: Valkey) -> None:
    async with processes(server.url, 1) as (process,):
        for number in range(12):
            await process.store.create(process.meta(number), None)
        for number in range(11):
            task = asyncio.create_task(process.store.meta(id_of(number)))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            task.cancel()
            found = await asyncio.gather(*(process.store.meta(id_of(n)) for n in (number + 1, number, 99)))
            assert [meta and meta.token for meta in found] == [f"token {number + 1}", f"token {number}", None]
        assert process.store._asking.num_opened == 1


@pytest.mark.parametrize("answer", [b"?\r\n", b"", b"-ERR secret\r\n", b"*1\r\n$7"])
async def test_answer_that_is_none_is_an_error(tmp_path: Path, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if b"SETINFO" in data:
                writer.write(b"+OK\r\n" * data.count(b"SETINFO"))
            else:
                writer.write(answer)
                writer.close()

    path = tmp_path / "odd.sock"
    async with listening(serve, uds=path):
        store = Process(f"unix://{path}").store
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await store.meta(id_of(1))
        await store.close()


async def test_errors_are_logged_once_in_a_while_without_text(
    own_server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.kill()
    with caplog.at_level(logging.INFO):
        async with processes(own_server.url.replace("unix://", "unix://:pass-word@"), 1) as (process,):
            await assert_unavailable(process)
            await assert_unavailable(process)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("headrace")]
    assert told == ["store of the streams: ConnectionError; tried again"]
    value = process.metrics.registry.get_sample_value
    assert (value("headrace_store_errors_total") or 0) >= 14
    assert value("headrace_store_up") == 0


async def test_password_and_options_of_the_url(tmp_path: Path) -> None:
    server = Valkey(tmp_path, "pass word")
    server.start()
    try:
        url = f"{server.url}?decode_responses=true&protocol=3&db=3&socket_timeout=1"
        async with processes(url, 2) as (one, two):
            journal = await one.stream(1)
            journal.text(journal.template([b"\xff", b"\xfe"]) or 0, b"\x80")
            journal.end(b"\xff\xfe")
            copy = await two.copy(1)
            await until(lambda: copy.is_over)
            assert copy.wire(0, 1000) == journal.wire(0, 1000)
            assert server.client.dbsize() == 0
    finally:
        server.kill()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    openssl, folder = need("openssl"), tmp_path_factory.mktemp("tls")
    paths = folder / "certificate.pem", folder / "key.pem"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run([openssl, "req", *kind, *names, *files], check=True, capture_output=True, timeout=30)
    return paths


async def copy_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


async def test_connection_may_be_tcp_and_tls(server: Valkey, certificate: tuple[Path, Path]) -> None:
    path, key = certificate
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path, key)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with dialled(uds=server.socket) as (near, far):
            await asyncio.gather(copy_bytes(reader, far), copy_bytes(near, writer))

    for scheme, options, tls in (("redis", "", None), ("rediss", f"?ssl_ca_certs={path}", context)):
        server.client.flushall()
        async with listening(forward, tls=tls) as tunnel:
            address = f"{scheme}://127.0.0.1:{tunnel.port}"
            async with processes(address + options, 2) as (one, two):
                journal = await one.stream(1)
                copy = await two.copy(1)
                for number in range(50):
                    journal.frame(b"%d" % number * 5000)
                    await asyncio.sleep(0)
                journal.end(b"end")
                await until(lambda copy=copy: copy.is_over)
                assert same(copy, journal)
                assert not one.store._health.num_errors
            if tls is not None:
                untrusting = Process(address).store
                with pytest.raises(StoreUnavailable) as raised:
                    await untrusting.meta(id_of(1))
                assert "CERTIFICATE_VERIFY_FAILED" in str(raised.value.__cause__)
                await untrusting.close()


def test_url_of_something_else_is_refused() -> None:
    async def make() -> None:
        StreamStore("https://localhost", metrics=Metrics(), **OPTIONS)

    with pytest.raises(ValueError, match="redis://"):
        asyncio.run(make())


def test_it_is_a_store() -> None:
    names = [name for name in vars(Store) if not name.startswith("_")]
    assert "claim" in names
    assert all(callable(getattr(StreamStore, name)) for name in names)


async def test_error_reply_fails_the_question_it_belongs_to_alone(
    server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    async with processes(server.url, 1) as (process,):
        metas = [process.meta(number) for number in range(4)]
        for meta in metas[1:]:
            await process.store.create(meta, None)
        server.client.set(stream_key(0) + ":meta", "no hash")
        with caplog.at_level(logging.WARNING):
            found = await asyncio.gather(
                *(process.store.meta(meta.id) for meta in metas), return_exceptions=True
            )
        assert isinstance(found[0], StoreUnavailable)
        assert found[1:] == metas[1:]
        assert "WRONGTYPE; tried again" in caplog.text  # what kind, and no more
        assert "against a key" not in caplog.text


async def test_text_is_not_decoded_whatever_the_address_asks_for(server: Valkey) -> None:
    async with processes(f"{server.url}?decode_responses=true", 2) as (one, two):
        meta = one.meta(1)
        await one.store.create(meta, None)
        assert await two.store.meta(id_of(1)) == meta
