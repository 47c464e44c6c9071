"""The benchmark of the request path: its client, its stopwatch, and the names of the stages."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.bench_request_path import SHAPES, Prompts
from benchmarks.load import chat_request
from benchmarks.request_load import Client
from benchmarks.request_stages import STAGES, Stopwatch, resolve

ANSWER = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}},'
    b'"timings":{"queue_ms":1.5}}\n\ndata: [DONE]\n\n',
)


@contextmanager
def server(answer: bytes, num_pieces: int = 1) -> Iterator[tuple[int, list[int]]]:
    """Answers every request; its port, and per connection how many requests came."""
    listening = socket.create_server(("127.0.0.1", 0))
    counts: list[int] = []

    def serve(connection: socket.socket, number: int) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                assert data.startswith(b"POST ")
                counts[number] += 1
                for piece in range(num_pieces):
                    size = -(-len(answer) // num_pieces)
                    connection.sendall(answer[piece * size : (piece + 1) * size])

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            counts.append(0)
            threading.Thread(target=serve, args=(connection, len(counts) - 1), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listening.getsockname()[1], counts
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def whole_answer() -> bytes:
    return ANSWER[0] + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in ANSWER[1:]) + b"0\r\n\r\n"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    made = Client()
    yield made
    made.close()


@pytest.mark.parametrize("num_pieces", [1, 7])
def test_client_times_and_counts_an_answer(client: Client, num_pieces: int) -> None:
    with server(whole_answer(), num_pieces) as (port, _):
        before_s = time.monotonic()
        (timed,) = client.send(port, [chat_request("m", "hi", 2)], rate=1000.0)
    assert timed.is_done
    assert (timed.status, timed.num_tokens, timed.num_prompt_tokens, timed.num_cached_tokens) == (
        200,
        2,
        9,
        4,
    )
    assert timed.timings == {"queue_ms": 1.5}
    assert before_s < timed.started_s < timed.first_byte_s <= timed.first_text_s
    assert timed.first_byte_s <= timed.seen_text_s < time.monotonic()


@pytest.mark.parametrize(("keeps", "num_requests"), [(True, [3]), (False, [1, 1, 1])])
def test_client_keeps_connections_or_opens_new_ones(
    client: Client, keeps: bool, num_requests: list[int]
) -> None:
    with server(whole_answer()) as (port, counts):
        requests = [chat_request("m", "hi", 2)] * 3
        timed = client.send(port, requests, rate=None, keeps=keeps)
    assert all(each.is_done for each in timed)
    assert counts == num_requests


def test_client_says_what_went_wrong(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        client.send(port, [b"x"], rate=1000.0)
    with server(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n") as (port, _):
        (timed,) = client.send(port, [chat_request("m", "hi", 2)], rate=1000.0)
    assert (timed.status, timed.is_done) == (503, False)


@pytest.mark.parametrize("name", [name for names in STAGES.values() for name in names])
def test_every_stage_is_a_function_that_is_there(name: str) -> None:
    assert callable(resolve(name)[2])


def burn(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_inner_stages_do_not_count_for_outer_ones() -> None:
    watch = Stopwatch()
    inner = watch.wrapped("inner", burn)

    def outer() -> None:
        burn(0.01)
        inner(0.03)

    watch.wrapped("outer", outer)()
    times_ns = watch.times_ns()
    assert times_ns["outer"] < times_ns["inner"]
    assert times_ns["outer"] + times_ns["inner"] == pytest.approx(0.04e9, rel=0.3)


async def test_coroutines_count_their_steps_and_not_their_waits() -> None:
    watch = Stopwatch()

    async def work(value: int) -> int:
        burn(0.01)
        await asyncio.sleep(0)
        burn(0.01)
        return value

    timed = watch.wrapped("work", work)
    waiting = asyncio.ensure_future(timed(7))
    await asyncio.sleep(0)
    burn(0.05)
    assert await waiting == 7
    assert watch.times_ns()["work"] < 0.04e9

    async def broken() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await watch.wrapped("broken", broken)()


def test_generators_work_as_before() -> None:
    def steps(number: int) -> Generator[int, str, str]:
        answer = yield number
        try:
            answer += yield number + 1
        except ValueError:
            answer += "!"
        return answer

    watch = Stopwatch()
    timed: Any = watch.wrapped("steps", steps)(1)
    assert next(timed) == 1
    assert timed.send("a") == 2
    with pytest.raises(StopIteration) as ended:
        timed.throw(ValueError())
    assert ended.value.value == "a!"


def test_other_threads_are_not_counted() -> None:
    watch = Stopwatch()
    thread = threading.Thread(target=watch.wrapped("work", burn), args=(0.01,))
    thread.start()
    thread.join()
    assert watch.times_ns() == {}


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_share_all_but_the_last_message(shape: str) -> None:
    prompts = Prompts()
    one, other = (prompts.body(shape, "m", 3) for _ in range(2))
    assert one["messages"][-1] != other["messages"][-1]
    assert one["seed"] != other["seed"]
    assert one["messages"][0] == other["messages"][0]
    num_words = sum(len(message["content"].split()) for message in one["messages"])
    assert 1600 < num_words < 2000
