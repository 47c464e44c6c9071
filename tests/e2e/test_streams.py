"""Streams that resume, over one process: whatever breaks, the text is the engine's, and it ends once."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import stack
from tests.components import need
from tests.e2e.asking import chat
from tests.e2e.breaking_proxy import AFTER_EVENT, AFTER_HEAD, AFTER_ID, IN_ID, Break, random_breaks
from tests.e2e.event_source import EventSource
from tests.e2e.resting import (
    assert_no_fault,
    at_rest,
    num_jobs,
    wait_for,
    wait_until_held,
)
from tests.e2e.resuming import (
    FAILED,
    SONG,
    STREAMS,
    Created,
    assert_came_back_once,
    assert_refused,
    create,
    delete,
    events,
    post,
    read,
    read_through_breaks,
    text_of,
    told,
    until_told,
)
from tests.stack import Gateway, Worker
from tests.wire import Head, connect

ENDLESS = 20_000
GRACE_S = 0.4
KEY = "key-of-alice-1234"
AS_ALICE = {"authorization": f"Bearer {KEY}"}
SING = chat("Sing the song.", 120)


@dataclass(frozen=True, slots=True)
class Served:
    """A worker behind two gateways: one waits long for readers that come back, the other does not."""

    gateway: Gateway
    hasty: Gateway
    worker: Worker

    @property
    def port(self) -> int:
        return self.gateway.port

    async def until_idle(self) -> None:
        """The engine has nothing to do."""
        await asyncio.to_thread(wait_for, self.gateway, lambda: num_jobs(self.worker) == 0, "idle")


@pytest.fixture(scope="module")
def served(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("streams")
    script = folder / "script.json"
    script.write_text(json.dumps({"Sing the song": SONG}))
    with (
        stack.start_scripted(folder, embedded_model, "--step-ms", "2", "--script", str(script)) as worker,
        stack.start_gateway(folder, [worker]) as gateway,
        stack.start_gateway(
            folder, [worker], "--stream-grace-s", str(GRACE_S), "--api-key", KEY, name="hasty"
        ) as hasty,
    ):
        yield Served(gateway, hasty, worker)
        assert_no_fault(gateway)
        assert_no_fault(hasty)


# -- what a reader gets --------------------------------------------------------------------------------------


async def test_text_is_exact_over_twenty_breaks(served: Served) -> None:
    await read_through_breaks([served.port], SING, random_breaks(20, seed=11))


@pytest.mark.long
async def test_text_is_exact_over_two_hundred_breaks(served: Served) -> None:
    await read_through_breaks([served.port], chat("Sing the song.", 2000), random_breaks(200, seed=12))


@pytest.mark.parametrize("by_the_letter", [False, True])
async def test_break_before_the_first_event_of_a_connection_forgets_no_place(
    served: Served, by_the_letter: bool
) -> None:
    """By the letter of the standard any blank line sets the last id to what this connection has said."""
    breaks = [Break(AFTER_EVENT, 1000), Break(IN_ID), Break(IN_ID), Break(AFTER_HEAD), Break(AFTER_ID)]
    await read_through_breaks([served.port], chat("Sing the song.", 40), breaks, by_the_letter)


async def test_text_is_exact_with_everything_a_chat_may_have(served: Served) -> None:
    """Frames that are more than text: usage, log probabilities, several channels of the wire."""
    body = SING | {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    await read_through_breaks([served.port], body, random_breaks(10, seed=13))


async def test_reload_in_mid_stream_and_after_the_end_replays_all(served: Served) -> None:
    stream = await create(served.port, SING)
    first = EventSource(served.port, stream.events)
    reading = asyncio.create_task(first.run())
    await until_told(first, 20)
    first.close()
    await reading
    again = await read(served.port, stream.events)
    assert told(again.messages).text == await text_of(served.port, SING)
    assert events(again.messages)[: len(first.messages)] == events(first.messages)
    late = await read(served.port, stream.events)
    assert events(late.messages) == events(again.messages)
    assert_came_back_once(late)


@pytest.mark.parametrize("by_query", [False, True])
async def test_reader_goes_on_after_any_event(served: Served, by_query: bool) -> None:
    """A page that keeps its position itself and has only the query, or a client with the header."""
    stream = await create(served.port, chat("Short", 12))
    whole = events((await read(served.port, stream.events)).messages)
    for after in range(len(whole) + 1):
        path = f"{stream.events}&last_event_id={after}" if by_query else stream.events
        headers = [] if by_query else [("last-event-id", str(after))]
        source = EventSource(served.port, path, headers=headers, on_message=close_at_end)
        await source.run()
        assert events(source.messages) == whole[after:]
        assert source.connections[0].status == (204 if after == len(whole) else 200)


def close_at_end(source: EventSource, message: Any) -> None:
    if message.type != "message":
        source.close()


async def test_header_beats_the_query(served: Served) -> None:
    """EventSource repeats its URL with each connection, and knows better by then."""
    stream = await create(served.port, chat("Short", 12))
    whole = events((await read(served.port, stream.events)).messages)
    source = await read(served.port, f"{stream.events}&last_event_id=5")
    assert events(source.messages) == whole[5:]
    assert_came_back_once(source)


async def test_several_readers_at_once_get_the_same_and_a_slow_one_holds_nobody_back(served: Served) -> None:
    body = chat("Sing the song.", 250, logprobs=True, top_logprobs=20)  # 3 KB an event
    stream = await create(served.port, body)
    async with not_reading(served.port, stream.events) as slow:
        readers = [EventSource(served.port, stream.events) for _ in range(5)]
        tasks = [asyncio.create_task(readers[0].run())]
        for number, reader in enumerate(readers[1:]):
            await until_told(readers[0], 30 * number)
            tasks.append(asyncio.create_task(reader.run()))
        await asyncio.gather(*tasks)
        raw = await all_of(slow)
    expected = events(readers[0].messages)
    assert told(readers[0].messages).is_done
    assert all(events(reader.messages) == expected for reader in readers)
    assert raw.endswith(b"0\r\n\r\n")
    assert raw.count(b"\nid: ") + raw.startswith(b"id: ") == len(expected)


@asynccontextmanager
async def not_reading(port: int, path: str) -> AsyncIterator[socket.socket]:
    """A reader that has asked and then takes as little as the kernel allows."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(
            client, f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode()
        )
        yield client


async def all_of(client: socket.socket) -> bytes:
    received = bytearray()
    async with asyncio.timeout(30):
        while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
            received += piece
    return bytes(received)


async def test_head_says_that_nothing_may_be_kept_or_held_back(served: Served) -> None:
    stream = await create(served.port, chat("Short", 4))
    (first, last) = (await read(served.port, stream.events)).connections
    assert first.header("content-type") == "text/event-stream; charset=utf-8"
    assert first.header("cache-control").startswith("no-")
    assert first.header("x-accel-buffering") == "no"
    assert first.header("content-encoding") == ""
    assert (last.status, last.num_bytes) == (204, 0)


# -- its end -------------------------------------------------------------------------------------------------


async def test_delete_by_one_reader_ends_it_for_all(served: Served) -> None:
    stream = await create(served.port, chat(max_tokens=ENDLESS))
    readers = [EventSource(served.port, stream.events) for _ in range(3)]
    tasks = [asyncio.create_task(reader.run()) for reader in readers]
    for reader in readers:
        await until_told(reader, 5)
    status, error = await delete(served.port, stream, token="wrong")
    assert (status, error["error"]["code"]) == (401, "invalid_stream_token")
    assert num_jobs(served.worker) == 1
    assert (await delete(served.port, stream))[0] in (200, 202, 204)
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    for reader in readers:
        assert failure(reader) == "cancelled"
        assert_came_back_once(reader)
        assert events(reader.messages) == events(readers[0].messages)
    await served.until_idle()
    await delete(served.port, stream)  # it has ended: now it is forgotten
    assert_refused(await read(served.port, stream.events), "stream_not_found")


def failure(source: EventSource) -> str:
    """The code of a stream that did not come to its end."""
    result = told(source.messages)
    assert not result.is_done
    assert result.error is not None
    return str(result.error["code"])


async def test_nobody_reads_from_the_start(served: Served) -> None:
    stream = await create(served.hasty.port, chat(max_tokens=ENDLESS), AS_ALICE)
    await served.until_idle()
    source = await read(served.hasty.port, stream.events)
    assert failure(source) == "abandoned"
    assert_came_back_once(source)


async def test_nobody_reads_any_more(served: Served) -> None:
    stream = await create(served.hasty.port, chat(max_tokens=ENDLESS), AS_ALICE)
    source = EventSource(served.hasty.port, stream.events)
    reading = asyncio.create_task(source.run())
    started_s = time.monotonic()
    while time.monotonic() < started_s + 2 * GRACE_S:  # it goes on as long as somebody reads
        num_seen = len(source.messages)
        await until_told(source, num_seen + 1)
    assert num_jobs(served.worker) == 1
    source.close()
    await reading
    await served.until_idle()
    again = await read(served.hasty.port, stream.events)
    assert failure(again) == "abandoned"
    assert events(again.messages)[: len(source.messages)] == events(source.messages)


async def test_answer_that_ends_within_the_grace_period_is_whole(served: Served) -> None:
    body = chat("Short", 5)
    stream = await create(served.hasty.port, body, AS_ALICE)
    await asyncio.sleep(2 * GRACE_S)
    source = await read(served.hasty.port, stream.events)
    assert told(source.messages).is_done
    assert told(source.messages).text == await text_of(served.port, body)


# -- readers that cannot be served ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda stream: stream.events.replace(stream.id, "0" * 32), "stream_not_found"),
        (lambda stream: stream.events.replace(stream.id, "no-such-stream"), "stream_not_found"),
        (lambda stream: stream.events.replace(stream.token, "guess"), "invalid_stream_token"),
        (lambda stream: stream.events.partition("?")[0], "invalid_stream_token"),
        (lambda stream: stream.events + "&last_event_id=soon", "invalid_event_id"),
        (lambda stream: stream.events + "&last_event_id=-1", "invalid_event_id"),
        (lambda stream: stream.events + "&last_event_id=1000000", "invalid_event_id"),
        (lambda stream: stream.events + "&last_event_id=" + "9" * 30, "invalid_event_id"),
    ],
)
async def test_reader_that_cannot_be_served_is_told_and_does_not_come_back(
    served: Served, change: Callable[[Created], str], code: str
) -> None:
    stream = await create(served.port, chat("Short", 4))
    assert_refused(await read(served.port, change(stream)), code)
    assert told((await read(served.port, stream.events)).messages).is_done


async def test_token_of_one_stream_opens_no_other(served: Served) -> None:
    one, other = [await create(served.port, chat("Short", 4)) for _ in range(2)]
    assert one.token != other.token
    assert_refused(
        await read(served.port, one.events.replace(one.token, other.token)), "invalid_stream_token"
    )


# -- the POST ------------------------------------------------------------------------------------------------


async def test_same_idempotency_key_is_the_same_stream(served: Served) -> None:
    headers = {"idempotency-key": "once"}
    first = await create(served.port, SING, headers)
    assert await create(served.port, SING, headers) == first
    head, document = await post(served.port, SING | {"max_tokens": 5}, headers)
    assert (head.status, document["error"]["code"]) == (422, "idempotency_key_reused")
    assert (await create(served.port, SING, {"idempotency-key": "twice"})).id != first.id
    assert told((await read(served.port, first.events)).messages).is_done


async def test_raced_idempotency_key_starts_one_generation(served: Served) -> None:
    await served.until_idle()
    body = chat("A race. " * 4000, ENDLESS)  # it takes a while to prepare
    answers = await asyncio.gather(
        *(post(served.port, body, {"idempotency-key": "raced"}) for _ in range(12))
    )
    ids = {document["id"] for head, document in answers if head.status == 201}
    assert len(ids) == 1
    statuses = Counter(head.status for head, _ in answers)
    assert statuses.keys() <= {201, 409}
    assert all(
        document["error"]["code"] == "idempotency_key_in_progress"
        for head, document in answers
        if head.status == 409
    )
    stream = await create(served.port, body, {"idempotency-key": "raced"})
    assert {stream.id} == ids
    assert num_jobs(served.worker) == 1
    await delete(served.port, stream)
    await served.until_idle()


async def test_key_of_a_refused_request_is_free_again(served: Served) -> None:
    headers = {"idempotency-key": "refused"}
    head, _ = await post(served.port, SING | {"temperature": -1}, headers)
    assert head.status == 400
    assert (await create(served.port, chat("Short", 3), headers)).id


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"model": "no-such-model"}, 404, "model_not_found"),
        ({"messages": []}, 400, None),
        ({"temperature": "hot"}, 400, None),
        ({"messages": [{"role": "user", "content": "word " * 40_000}]}, 400, "context_length_exceeded"),
    ],
)
async def test_refusal_of_the_prompt_is_a_plain_error(
    served: Served, change: dict[str, Any], status: int, code: str | None
) -> None:
    head, document = await post(served.port, chat() | change)
    assert_plain_error(head, document, status)
    assert document["error"]["code"] == code


def assert_plain_error(head: Head, document: dict[str, Any], status: int) -> None:
    assert head.status == status
    assert head["content-type"] == "application/json"
    assert document.keys() == {"error"}


async def test_post_needs_a_key_and_its_readers_none(served: Served) -> None:
    head, document = await post(served.hasty.port, chat("Short", 3))
    assert_plain_error(head, document, 401)
    assert document["error"]["code"] == "invalid_api_key"
    stream = await create(served.hasty.port, chat("Short", 3), AS_ALICE)
    assert told((await read(served.hasty.port, stream.events)).messages).is_done


async def test_overload_is_told_by_the_post(
    scripted_worker: Callable[..., Worker], gateway: Callable[..., Gateway]
) -> None:
    worker = scripted_worker("--max-running", "1")
    front = gateway([worker], "--queue-max-requests", "1")
    running = await create(front.port, chat("One", ENDLESS))
    await asyncio.to_thread(wait_for, front, lambda: num_jobs(worker) == 1, "running")
    reader = EventSource(front.port, running.events)
    reading = asyncio.create_task(reader.run())
    await until_told(reader, 3)
    waiting = await create(front.port, chat("Two", ENDLESS))
    await asyncio.to_thread(wait_for, front, lambda: num_jobs(worker, waiting=True) == 1, "queueing")
    head, document = await post(front.port, chat("Three", 3))
    assert_plain_error(head, document, 503)
    assert document["error"]["code"] == "queue_full"
    assert head.get("retry-after")
    for stream in (running, waiting):
        await delete(front.port, stream)
    await asyncio.wait_for(reading, 30)
    assert failure(reader) == "cancelled"
    assert failure(await read(front.port, waiting.events)) == "cancelled"


async def test_worker_that_is_killed_fails_the_stream_by_name(
    scripted_worker: Callable[..., Worker], gateway: Callable[..., Gateway]
) -> None:
    worker = scripted_worker("--step-ms", "5")
    front = gateway([worker])
    stream = await create(front.port, chat(max_tokens=ENDLESS))
    source = EventSource(front.port, stream.events)
    reading = asyncio.create_task(source.run())
    await until_told(source, 5)
    worker.process.kill()
    await asyncio.wait_for(reading, 30)
    assert failure(source) == "worker_lost"
    assert_came_back_once(source)
    head, document = await post(front.port, chat())
    assert head.status in (404, 503), document


async def test_gateway_that_stops_ends_its_streams_by_name(
    served: Served, gateway: Callable[..., Gateway]
) -> None:
    front = gateway([served.worker], "--drain-limit-s", "0.1")
    stream = await create(front.port, chat(max_tokens=ENDLESS))
    source = EventSource(front.port, stream.events, on_message=close_at_end)
    reading = asyncio.create_task(source.run())
    await until_told(source, 5)
    await asyncio.to_thread(front.process.stop)
    await asyncio.wait_for(reading, 30)
    assert failure(source) == "draining"
    await served.until_idle()


# -- other clients -------------------------------------------------------------------------------------------


async def test_curl_reads_a_stream(served: Served) -> None:
    stream = await create(served.port, SING)
    curl = await asyncio.create_subprocess_exec(
        *(need("curl"), "--silent", "--no-buffer", "--max-time", "30", "--write-out", "%{http_code}"),
        f"http://127.0.0.1:{served.port}{stream.events}",
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await curl.communicate()
    assert b"retry: 1000\n" in output[:20]
    assert output.endswith(b"event: done\ndata: [DONE]\n\n200")
    text = "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        for line in output.decode().split("\n")
        if line.startswith("data: {")
    )
    assert text == await text_of(served.port, SING)


def test_http_client_takes_a_connection_for_one_stream_after_the_other(served: Served) -> None:
    """Everything on one connection: the end of a stream is the end of a body, not of the connection."""
    client = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    sockets = set()
    for number in range(3):
        headers = {"content-type": "application/json"}
        client.request("POST", STREAMS, json.dumps(chat(f"Number {number}", 5)), headers)
        sockets.add(client.sock)
        response = client.getresponse()
        assert response.status == 201
        document = json.loads(response.read())
        stream = Created(document["id"], document["url"], document["token"], document["expires_at"])
        client.request("GET", stream.events)
        response = client.getresponse()
        lines = response.read().split(b"\n")
        ids = [int(line[4:]) for line in lines if line.startswith(b"id: ")]
        assert ids == list(range(1, len(ids) + 1))
        client.request("GET", stream.events, headers={"last-event-id": str(ids[-1])})
        response = client.getresponse()
        assert (response.status, response.read()) == (204, b"")
        client.request("DELETE", f"{stream.path}?token={stream.token}")
        response = client.getresponse()
        assert response.status in (200, 204)
        response.read()
    assert len(sockets) == 1
    client.close()


async def test_nothing_is_left_of_many_streams(served: Served) -> None:
    """Those that end, that fail, that are deleted and that nobody reads."""
    gateway = served.hasty
    before = at_rest(gateway, [served.worker])
    for n in range(3):  # each is read or deleted before the time of grace is over, on a slow machine, too
        stream = await create(gateway.port, chat(f"Number {n}", 5), AS_ALICE)
        assert told((await read(gateway.port, stream.events)).messages).is_done
    for n in range(3):
        stream = await create(gateway.port, chat(f"Long {n}", ENDLESS), AS_ALICE)
        await delete(gateway.port, stream)
        assert failure(await read(gateway.port, stream.events)) in ("cancelled", "abandoned")
    streams = [await create(gateway.port, chat(f"Number {n}", 5), AS_ALICE) for n in range(3, 5)]
    endless = [await create(gateway.port, chat(f"Long {n}", ENDLESS), AS_ALICE) for n in range(3, 5)]
    async with connect(gateway.port) as wire:  # a reader who vanishes
        await wire.request("GET", endless[0].events)
        assert await wire.frame()
        wire.reset()
    await served.until_idle()
    wait_until_held(gateway, [served.worker], before)
    assert {failure(await read(gateway.port, stream.events)) for stream in endless} == {"abandoned"}
    assert FAILED not in {m.type for m in (await read(gateway.port, streams[1].events)).messages}
