"""The benchmark of the proxy: its arithmetic, its HTTP/2 client, and the stamps of its worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamReset

from backend.ports import EngineEvents, Job, Output
from benchmarks.bench_nginx import TimedClient, delays_of
from benchmarks.h2_client import H2Client
from benchmarks.load import StreamResult, chat_request
from benchmarks.stamped_worker import JobTimes, StampedEngine

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
FRAMES = [b'data: {"delta":{"role":"assistant","content":""}}\n\n'] + [
    b'data: {"delta":{"content":"%s"}}\n\n' % text for text in (b"a", b'\\"', b"content")
]
LAST = b'data: {"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'


def test_a_frame_is_told_from_the_token_of_its_number() -> None:
    jobs = [JobTimes(0.0, [1.0, 1.5, 2.0]), JobTimes(0.0, [4.0, 4.5])]
    found = delays_of(jobs, [[1.25, 2.0, 2.25], [4.125, 4.75]], skip=0)
    assert found.delays_ms == [250, 500, 250, 125, 250]
    assert found.held_share == 1 / 3  # the second frame of the first stream came when the third was made
    assert found.together_share == 0


def test_frames_of_one_time_are_together() -> None:
    found = delays_of([JobTimes(0.0, [1.0, 1.5, 2.0])], [[1.25, 2.5, 2.5]], skip=0)
    assert (found.together_share, found.held_share) == (2 / 3, 1 / 2)


def test_the_first_tokens_are_left_out_together_with_their_frames() -> None:
    found = delays_of([JobTimes(0.0, [1.0, 1.5, 2.0, 2.5])], [[1.75, 1.75, 2.25, 2.75]], skip=1)
    assert (found.delays_ms, found.held_share, found.together_share) == ([250, 250, 250], 0.0, 0.0)


@pytest.mark.parametrize("job", [None, JobTimes(0.0, [1.0])])
def test_a_token_without_a_frame_is_no_measurement(job: JobTimes | None) -> None:
    with pytest.raises(RuntimeError, match="2 frames"):
        delays_of([job], [[1.0, 2.0]], skip=0)


async def test_each_frame_with_text_has_a_time_at_every_split() -> None:
    body = HEAD + b"".join(FRAMES)
    for at in range(12, len(body) + 1):  # the status comes in one piece
        client = TimedClient(b"")
        client.data_received(body[:at])
        client.data_received(body[at:])
        assert len(client.times_s) == 3, at
        assert client.times_s == sorted(client.times_s)


async def test_frames_of_one_read_have_one_time() -> None:
    client = TimedClient(b"")
    for data in (HEAD + FRAMES[0] + FRAMES[1], FRAMES[2] + FRAMES[3], LAST):
        client.data_received(data)
    first_s, second_s, third_s = client.times_s
    assert first_s < second_s == third_s
    assert (await client.done).is_done


class Joined(asyncio.Transport):
    """Hands what a client writes to a server's side of HTTP/2."""

    def __init__(self) -> None:
        super().__init__()
        self.server = H2Connection(H2Configuration(client_side=False))
        self.server.initiate_connection()
        self.events: list[Any] = []
        self.is_cut = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.events += self.server.receive_data(bytes(data))

    def abort(self) -> None:
        self.is_cut = True

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


async def two_streams() -> tuple[Joined, H2Client, list[TimedClient]]:
    wire, connection = Joined(), H2Client()
    connection.connection_made(wire)
    clients = [TimedClient(chat_request("m", f"number {number}", 5)) for number in range(2)]
    for client in clients:
        connection.open(client)
    connection.data_received(wire.server.data_to_send())
    return wire, connection, clients


def answer(wire: Joined, connection: H2Client, number: int, parts: Sequence[bytes], is_end: bool) -> None:
    wire.server.send_headers(number, [(":status", "200"), ("content-type", "text/event-stream")])
    for part in parts:
        wire.server.send_data(number, part)
    if is_end:
        wire.server.end_stream(number)
    for byte in wire.server.data_to_send():
        connection.data_received(bytes((byte,)))


async def test_a_request_travels_as_a_stream_of_http2() -> None:
    wire, _, _ = await two_streams()
    asked = [dict(event.headers) for event in wire.of(RequestReceived)]
    assert [each[b":method"] + each[b":path"] for each in asked] == [b"POST/v1/chat/completions"] * 2
    assert asked[0][b"content-type"] == b"application/json"
    assert b"host" not in asked[0]
    assert [b"number 0" in wire.of(DataReceived)[0].data, b"number 1" in wire.of(DataReceived)[1].data] == [
        True
    ] * 2


async def test_each_stream_gets_its_own_answer_byte_by_byte() -> None:
    wire, connection, clients = await two_streams()
    answer(wire, connection, 3, [*FRAMES, LAST], is_end=True)
    assert await clients[1].done == clients[1].result
    assert (clients[1].result.status, clients[1].result.num_tokens, len(clients[1].times_s)) == (200, 3, 3)
    assert clients[0].result == StreamResult(started_s=clients[0].result.started_s)


async def test_a_client_that_leaves_resets_its_stream_and_no_other() -> None:
    wire, connection, clients = await two_streams()
    answer(wire, connection, 1, FRAMES[:2], is_end=False)
    clients[0].close()
    clients[0].close()
    assert [event.stream_id for event in wire.of(StreamReset)] == [1]
    answer(wire, connection, 3, [*FRAMES, LAST], is_end=True)
    assert clients[1].result.is_done
    assert not wire.is_cut


async def test_a_cut_connection_ends_all_its_streams() -> None:
    wire, connection, clients = await two_streams()
    connection.close()
    assert wire.is_cut
    connection.connection_lost(None)
    assert [(await client.done).error for client in clients] == ["connection lost"] * 2


class Engine:
    """Only what is stamped."""

    async def start(self, events: EngineEvents) -> None:
        self.events = events

    async def stop(self) -> None: ...

    def submit(self, key: object, job: Job) -> None: ...

    def abort(self, keys: Sequence[object]) -> None: ...


async def test_jobs_are_stamped_by_the_seed_of_their_request() -> None:
    engine, steps = Engine(), list[Sequence[Output]]()
    stamped = StampedEngine(cast(Any, engine))
    none = cast(Any, None)
    await stamped.start(EngineEvents(step=steps.append, closed=none, failed=none, died=none))
    for seed in (7, 8):
        stamped.submit(f"key {seed}", Job(b"", {"seed": seed}))
    engine.events.step([Output("key 7", [1]), Output("key 8", [1])])
    engine.events.step([Output("key 7", [2], finish="length")])
    stamped.abort(["key 7", "key 8"])
    finished, aborted = stamped.jobs[7], stamped.jobs[8]
    assert (len(finished.steps_s), finished.aborted_s) == (2, None)
    assert len(aborted.steps_s) == 1
    assert aborted.aborted_s is not None
    assert aborted.submitted_s <= aborted.steps_s[0] <= aborted.aborted_s
    assert [[output.ids for output in outputs] for outputs in steps] == [[[1], [1]], [[2]]]
