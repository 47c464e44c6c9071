"""Token ids in a real Redis: found by others, never wrong, and never in the way."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from gateway.redis_tokens import MIN_CHARS, RedisTokens
from pipeline.encoding import pack_ids
from tests.tcp_server import listening
from tests.valkey import Valkey

PATIENT_MS = 20_000  # tests are about what comes, not how soon


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Valkey]:
    valkey = Valkey(tmp_path)
    valkey.start()
    yield valkey
    valkey.kill()


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


Open = Callable[..., RedisTokens]


@pytest.fixture
async def connect() -> AsyncIterator[Open]:
    made: list[RedisTokens] = []

    def connect_one(url: str, **options: object) -> RedisTokens:
        made.append(RedisTokens(url, **{"limit_ms": PATIENT_MS, **options}))  # type: ignore[arg-type]
        return made[-1]

    yield connect_one
    for each in made:
        await each.close()


def segment_of(number: int) -> str:
    return f"<|im_start|>user\n{number} 你好".ljust(MIN_CHARS, "é")


def ids_of(number: int) -> bytes:
    return random.Random(number).randbytes(4 * (number % 90 + 1))


async def written(tokens: RedisTokens) -> None:
    """Wait until what was offered is there."""
    if tokens._writer is not None:
        await tokens._writer


async def test_another_gateway_finds_what_was_offered(server: Valkey, connect: Open) -> None:
    one, two = connect(server.url), connect(server.url)
    one.offer("model", [(segment_of(number), ids_of(number)) for number in range(200)])
    await written(one)
    found = await two.get("model", [segment_of(number) for number in range(100, 300)])
    assert found == {segment_of(number): ids_of(number) for number in range(100, 200)}
    assert (two.hits, two.misses, two.num_late, two.num_errors) == (100, 100, 0, 0)
    assert await two.get("other model", [segment_of(1)]) == {}


async def test_short_segments_stay_here(server: Valkey, connect: Open) -> None:
    tokens = connect(server.url)
    short = "x" * (MIN_CHARS - 1)
    tokens.offer("model", [(short, ids_of(1))])
    await written(tokens)
    assert await tokens.get("model", [short]) == {}
    assert server.client.dbsize() == 0
    assert tokens.misses == 0


async def test_no_text_is_at_rest_and_entries_expire(server: Valkey, connect: Open) -> None:
    tokens = connect(server.url, ttl_s=77)
    tokens.offer("model", [("secret words " * 100, pack_ids([1, 2, 3]))])
    await written(tokens)
    (key,) = server.client.keys("*")  # type: ignore[misc]
    value = server.client.get(key)
    assert b"secret" not in key + value  # type: ignore[operator]
    assert value[:12] == pack_ids([1, 2, 3])  # type: ignore[index]
    assert 0 < server.client.ttl(key) <= 77  # type: ignore[operator]


async def test_value_that_is_not_the_keys_is_a_miss(server: Valkey, connect: Open) -> None:
    tokens = connect(server.url)
    tokens.offer("model", [(segment_of(1), ids_of(1))])
    await written(tokens)
    tokens.offer("model", [(segment_of(2), ids_of(2))])
    await written(tokens)
    one, two = server.client.keys("*")  # type: ignore[misc]
    values = server.client.mget(one, two)
    bad = [b"", b"x", values[0][:-1], bytes(40), values[0] + b"\0\0\0\0", b"\xff" + values[0][1:], values[1]]  # type: ignore[index]
    wanted = {segment_of(1): ids_of(1), segment_of(2): ids_of(2)}
    assert await tokens.get("model", list(wanted)) == wanted
    for value in bad:
        server.client.set(one, value)
        found = await tokens.get("model", list(wanted))
        assert len(found) == 1
        assert found.items() <= wanted.items()
    assert tokens.num_broken == len(bad)
    server.client.delete(one)
    server.client.lpush(one, b"a list")
    assert len(await tokens.get("model", list(wanted))) == 1


async def test_late_answer_is_a_miss_and_mixes_up_nothing(server: Valkey, connect: Open) -> None:
    tokens = connect(server.url)
    tokens.offer("model", [(segment_of(number), ids_of(number)) for number in range(10)])
    await written(tokens)
    server.signal(signal.SIGSTOP)
    tokens._limit_s = 0.01
    assert await tokens.get("model", [segment_of(1)]) == {}
    assert await tokens.get("model", [segment_of(2)]) == {}  # not asked: the first one is still on its way
    assert tokens.num_late == 1
    server.signal(signal.SIGCONT)
    assert tokens._late is not None
    await asyncio.wait([tokens._late])
    tokens._limit_s = PATIENT_MS
    for number in range(10):
        assert await tokens.get("model", [segment_of(number)]) == {segment_of(number): ids_of(number)}


async def test_lookup_that_is_cancelled_mixes_up_nothing(server: Valkey, connect: Open) -> None:
    tokens = connect(server.url)
    tokens.offer("model", [(segment_of(number), ids_of(number)) for number in range(10)])
    await written(tokens)
    for number in range(9):
        task = asyncio.create_task(tokens.get("model", [segment_of(number)]))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        found = await tokens.get("model", [segment_of(number + 1)])
        assert found == {segment_of(number + 1): ids_of(number + 1)}


@pytest.mark.parametrize(
    "answer", [b"*1\r\n$3\r\nabc\r\n", b":5\r\n", b"$-1\r\n", b"*2\r\n:1\r\n*1\r\n+a\r\n", b"?", b""]
)
async def test_answer_that_is_none_fails_no_request(tmp_path: Path, connect: Open, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if b"MGET" in data:
                writer.write(answer)
                writer.close()
            else:
                writer.write(b"+OK\r\n" * max(1, data.count(b"CLIENT")))

    path = tmp_path / "odd.sock"
    async with listening(serve, uds=path):
        tokens = connect(f"unix://{path}?protocol=2")
        assert await tokens.get("model", [segment_of(1), segment_of(2)]) == {}
        assert tokens.num_errors + tokens.num_broken > 0


async def test_dead_server_is_asked_once_a_second_and_comes_back(server: Valkey, connect: Open) -> None:
    clock = Clock()
    tokens = connect(server.url, clock=clock)
    assert await tokens.get("model", [segment_of(1)]) == {}
    server.kill()
    for _ in range(5):
        assert await tokens.get("model", [segment_of(1)]) == {}
        tokens.offer("model", [(segment_of(1), ids_of(1))])
    await written(tokens)
    assert tokens.num_errors == 1
    assert tokens.num_not_written == 5
    clock.now_s += 2
    assert await tokens.get("model", [segment_of(1)]) == {}
    assert tokens.num_errors == 2
    clock.now_s += 2
    tokens.offer("model", [(segment_of(number), ids_of(number)) for number in range(200)])
    await written(tokens)
    assert (tokens.num_errors, tokens.num_not_written) == (3, 205)
    assert tokens._waiting_bytes == 0
    server.start()
    clock.now_s += 2
    tokens.offer("model", [(segment_of(1), ids_of(1))])
    await written(tokens)
    assert await tokens.get("model", [segment_of(1)]) == {segment_of(1): ids_of(1)}


async def test_failures_are_logged_once_in_a_while_without_text(
    server: Valkey, connect: Open, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    tokens = connect(server.url.replace("unix://", "unix://:pass-word@"), clock=clock)
    server.kill()
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            await tokens.get("model", [segment_of(1)])
            clock.now_s += 2
    assert tokens.num_errors == 40
    assert [record.name for record in caplog.records] == ["headrace.redis_tokens"] * 2
    assert "pass-word" not in caplog.text
    assert "im_start" not in caplog.text


async def test_server_that_wants_a_password_gets_it(tmp_path: Path, connect: Open) -> None:
    valkey = Valkey(tmp_path, password="open:s@same")
    valkey.start()
    try:
        refused = connect(f"unix://{valkey.socket}")
        assert await refused.get("model", [segment_of(1)]) == {}
        assert refused.num_errors == 1
        tokens = connect(valkey.url)
        tokens.offer("model", [(segment_of(1), ids_of(1))])
        await written(tokens)
        assert await tokens.get("model", [segment_of(1)]) == {segment_of(1): ids_of(1)}
    finally:
        valkey.kill()


async def test_what_waits_for_a_slow_server_is_bounded(server: Valkey, connect: Open) -> None:
    tokens = connect(server.url)
    server.signal(signal.SIGSTOP)
    for number in range(20):
        tokens.offer("model", [(segment_of(number), bytes(1 << 20))])
        await asyncio.sleep(0)
    assert tokens._waiting_bytes <= 4 << 20
    assert tokens.num_not_written >= 12
    server.signal(signal.SIGCONT)


def test_other_urls_are_refused() -> None:
    with pytest.raises(ValueError, match="scheme"):
        RedisTokens("http://127.0.0.1")
