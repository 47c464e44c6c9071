"""`DELETE /v1/streams/ID`, and what the routes of streams share: paths, queries, and whom they let in."""

from __future__ import annotations

import logging

import pytest

from gateway.stream_meta import StreamMeta
from gateway.stream_routes import stream_id_of
from pipeline.stream_errors import StoreUnavailable
from tests.gateway.answering import Client, turns
from tests.gateway.asgi import Request
from tests.gateway.serving import Service, chat, service
from tests.gateway.streaming import STREAMS, Started, read, start
from tests.gateway.test_streams import shared

MARKER = "xylophone"
ROUTE = "/v1/streams/{id}"


async def delete(
    made: Service, stream: Started | StreamMeta, query: str | None = None, **headers: str
) -> Client:
    given = f"token={stream.token}" if query is None else query
    request = Request(
        f"{STREAMS}/{stream.id}", method="DELETE", headers=headers, query=given.encode("latin-1")
    )
    return await request.run(made)


async def test_deleting_a_live_stream_ends_it_for_the_engine_and_all_its_readers() -> None:
    async with service() as made:
        stream = await start(made, chat(n=2))
        readers = [await read(made, stream) for _ in range(2)]
        stream.engine.say("a")
        client = await delete(made, stream, **{"x-request-id": "abc"})
        assert (client.status, client.body) == (204, b"")
        assert client.headers == {"cache-control": "no-store", "x-request-id": "abc"}
        assert [engine.num_aborts for engine in stream.engines] == [1, 1]
        for reader in readers:
            await reader.to_end()
            assert reader.error["code"] == "cancelled"
            number = len(reader.ids)
            assert reader.ids[-1] == str(number)  # an event of the stream, as for who comes later
        late = await (await read(made, stream)).to_end()
        assert late.events == readers[0].events
        again = await (await read(made, stream, last_event_id=late.ids[-1])).to_end()
        assert again.client.status == 204


async def test_deleting_it_once_more_forgets_it_and_then_it_is_unknown() -> None:
    async with service() as made:
        stream = await start(made)
        for status in (204, 204, 404, 404):
            client = await delete(made, stream)
            assert client.status == status
            await turns()
        assert client.json["error"]["code"] == "stream_not_found"
        assert made.streams._streams == {}


async def test_a_finished_stream_is_forgotten_at_once() -> None:
    async with service() as made:
        stream = await start(made)
        await stream.ends()
        assert (await delete(made, stream)).status == 204
        one = await (await read(made, stream)).to_end()
        assert one.error["code"] == "stream_not_found"


async def test_a_stream_is_deleted_with_its_token_or_its_key_alone() -> None:
    async with service(keys=["alice", "bob"]) as made:
        alice, bob = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
        streams = [await start(made, chat(str(number)), **alice) for number in range(3)]
        other = await start(made, chat("other"), **bob)
        for query, headers in (
            ("", {}),
            ("", bob),
            ("token=", alice | {"authorization": "Basic alice"}),
            (f"token={other.token}", {}),
            ("token=é%ff%", {}),
            ("&" * 1000, {}),
        ):
            client = await delete(made, streams[0], query, **headers)
            assert client.status == 401, query
            assert client.json["error"]["code"] == "invalid_stream_token"
            assert client.json["error"]["type"] == "authentication_error"
            assert client.headers["www-authenticate"] == 'Bearer realm="headrace"'
        assert made.streams.num_live == 4
        assert (await delete(made, streams[0])).status == 204
        assert (await delete(made, streams[1], "", authorization=f"Bearer {streams[1].token}")).status == 204
        assert (await delete(made, streams[2], "", **alice)).status == 204
        await turns()
        assert made.streams.num_live == 1


@pytest.mark.parametrize("path", ["x", "0" * 32, "A" * 32, "ü", "0" * 31, ""])
async def test_a_stream_that_is_not_there_cannot_be_deleted(path: str) -> None:
    async with service() as made:
        client = await Request(f"{STREAMS}/{path}", method="DELETE", query=b"token=x").run(made)
        assert (client.status, client.json["error"]["code"]) == (404, "stream_not_found")


async def test_the_stream_of_another_process_is_ended_there() -> None:
    async with shared() as (made, store):
        meta = store.has()
        assert (await delete(made, meta)).status == 204
        assert store.count("cancel", meta.id, "other") == 1
        assert store.count("delete", meta.id) == 0
        assert made.streams._streams == {}  # to delete it, it need not be read


async def test_a_store_that_is_away_is_an_error() -> None:
    async with shared() as (made, store):
        meta = store.has()
        store.error = StoreUnavailable()
        client = await delete(made, meta)
        assert (client.status, client.json["error"]["code"]) == (503, "store_unavailable")
        assert client.headers["retry-after"] == "1"
        stream = store.has(2)
        store.error = None
        assert await made.streams.known(stream.id) is not None
        store.error = StoreUnavailable()
        assert (await delete(made, stream)).status == 503  # its owner cannot be told


async def test_a_broken_stream_can_be_deleted() -> None:
    async with shared() as (made, store):
        stream = await start(made)
        assert store.events is not None
        store.events.broken(stream.id, StoreUnavailable())
        await turns()
        assert (await delete(made, stream)).status == 204
        assert made.streams._streams == {}


async def test_an_unexpected_error_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with shared() as (made, store):
        meta = store.has()
        store.error = KeyError(MARKER)
        with caplog.at_level(logging.DEBUG):
            client = await delete(made, meta)
        assert (client.status, client.json["error"]["code"]) == (500, "internal_error")
        assert MARKER not in client.body.decode() + made.log + caplog.text


async def test_a_deletion_leaves_one_line_and_one_count_without_the_token() -> None:
    async with service() as made:
        stream = await start(made)
        await delete(made, stream)
        await delete(made, stream, f"token={MARKER}", **{"x-request-id": "abc"})
        deleted, own, refused = sorted(made.lines, key=lambda line: line["status"] * (line["id"] == "abc"))
        by_route = {line["route"]: line for line in (deleted, own)}
        assert by_route[ROUTE]["status"] == 204
        assert by_route[ROUTE]["ended"] == "complete"
        assert by_route[STREAMS]["ended"] == "cancelled"
        assert (refused["route"], refused["status"]) == (ROUTE, 401)
        assert refused["ended"] == "invalid_stream_token"
        assert MARKER not in made.log
        assert stream.token not in made.log
        for status, ended in (("204", "complete"), ("401", "invalid_stream_token")):
            labels = {"route": ROUTE, "status": status, "ended": ended}
            assert made.sample("headrace_requests_total", **labels) == 1


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/v1/streams/{'a1' * 16}", "a1" * 16),
        (f"/v1/streams/{'a1' * 16}/events", "a1" * 16),
        (f"/v1/streams/{'a1' * 16}/events/events", None),
        (f"/v1/streams/{'a1' * 16}/", None),
        (f"/v1/streams/{'a1' * 16}\n", None),
        (f"/v1/streams/{'A1' * 16}", None),
        (f"/v1/streams/{'١' * 32}", None),
        (f"/v1/streams/{'a' * 33}", None),
        (f"/v1/streams//{'a' * 32}", None),
        ("/v1/streams/", None),
        ("/v1/streams", None),
        ("", None),
    ],
)
def test_only_what_is_made_here_is_an_id(path: str, expected: str | None) -> None:
    assert stream_id_of(path) == expected
