"""What requests need on their way in is served while others run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from gateway.encoders import Encoders
from gateway.needs import NeedServer
from pipeline.encoding import pack_ids
from pipeline.errors import ClientGone, InvalidRequest, QueueFull
from pipeline.needs import Compute, Encode, Pause, Steps, Wait
from pipeline.token_buffer import BufferPool


class Lengths:
    """Encodes a text as its length."""

    def encode_segments(self, segments: Sequence[str]) -> list[bytes]:
        return [pack_ids([len(segment)]) for segment in segments]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
        return [pack_ids([len(text), add_special_tokens]) for text in texts]


@pytest.fixture
async def encoders() -> AsyncIterator[Encoders]:
    made = Encoders(num_threads=1)
    yield made
    made.close()


async def test_steps_get_their_answers_and_others_run_in_between(encoders: Encoders) -> None:
    ran = []

    def steps() -> Steps[list[bytes]]:
        asyncio.get_running_loop().call_soon(ran.append, "other")
        yield Pause()
        assert ran == ["other"]
        segments = yield Encode(Lengths(), ("ab", "c"), None)
        raw = yield Encode(Lengths(), ("ab",), True)
        thread = yield Compute(threading.current_thread)
        assert thread is not threading.current_thread()
        return [*segments, *raw]

    found = await NeedServer(encoders, BufferPool(1 << 20), 1.0).serve(steps())
    assert found == [pack_ids([2]), pack_ids([1]), pack_ids([2, 1])]


async def test_what_the_steps_raise_is_raised(encoders: Encoders) -> None:
    def steps() -> Steps[None]:
        yield Pause()
        raise ClientGone("x")

    with pytest.raises(ClientGone):
        await NeedServer(encoders, BufferPool(1 << 20), 1.0).serve(steps())


async def test_what_is_raised_elsewhere_is_raised(encoders: Encoders) -> None:
    def fails() -> None:
        raise InvalidRequest("no", "messages")

    def steps() -> Steps[None]:
        yield Compute(fails)

    with pytest.raises(InvalidRequest):
        await NeedServer(encoders, BufferPool(1 << 20), 1.0).serve(steps())


async def test_wait_ends_when_a_buffer_is_given_back(encoders: Encoders) -> None:
    pool = BufferPool(4 * 1024)
    held = [pool.whole(pack_ids([1]))]

    def steps() -> Steps[bytes]:
        while (view := pool.whole(pack_ids([7]))) is None:
            yield Wait(1)
        return bytes(view)

    task = asyncio.create_task(NeedServer(encoders, pool, 60.0).serve(steps()))
    await asyncio.sleep(0.05)
    assert not task.done()
    held.clear()
    assert await task == pack_ids([7])


async def test_wait_for_a_buffer_has_an_end(encoders: Encoders) -> None:
    pool = BufferPool(4 * 1024)
    held = pool.whole(pack_ids([1]))

    def steps() -> Steps[None]:
        while True:
            yield Wait(9)

    with pytest.raises(QueueFull, match=r"No token buffer for 9 tokens became free within 0\.02 s"):
        await NeedServer(encoders, pool, 0.02).serve(steps())
    assert held is not None


async def test_steps_are_closed_when_nobody_waits_for_them(encoders: Encoders) -> None:
    closed = []

    def steps() -> Steps[None]:
        try:
            while True:
                yield Wait(1)
        finally:
            closed.append(True)

    pool = BufferPool(4 * 1024)
    held = pool.whole(pack_ids([1]))
    task = asyncio.create_task(NeedServer(encoders, pool, 60.0).serve(steps()))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.wait([task])
    assert closed == [True]
    assert held is not None


async def test_waits_of_one_request_share_its_limit(encoders: Encoders) -> None:
    """Also when the pool says each time that there is room, and there never is."""
    num_waits = 0

    def steps() -> Steps[None]:
        nonlocal num_waits
        while True:
            num_waits += 1
            yield Wait(1)

    with pytest.raises(QueueFull):
        await NeedServer(encoders, BufferPool(1 << 20), 0.05).serve(steps())
    assert 1 <= num_waits < 50


async def test_those_that_wait_are_served_in_their_order(encoders: Encoders) -> None:
    pool = BufferPool(4 * 2048)
    needs = NeedServer(encoders, pool, 60.0)
    held = [pool.whole(pack_ids([1] * 1500))]
    order: list[int] = []
    kept = []

    def steps(num_tokens: int) -> Steps[None]:
        while (view := pool.whole(pack_ids([7] * num_tokens))) is None:
            yield Wait(num_tokens)
        order.append(num_tokens)
        kept.append(view)

    tasks = [asyncio.create_task(needs.serve(steps(num_tokens))) for num_tokens in (1500, 3, 4)]
    await asyncio.sleep(0.05)
    held.clear()
    await tasks[0]
    kept.clear()
    await asyncio.gather(*tasks)
    assert order == [1500, 3, 4]
