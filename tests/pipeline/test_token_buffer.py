"""Views are leases, and a pool of buffers that never exceeds its bound."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest
import uvloop

from pipeline.encoding import BYTES_PER_ID, pack_ids
from pipeline.errors import InvalidRequest
from pipeline.token_buffer import MIN_BUFFER_TOKENS, BufferPool, TokenBuffer

SMALLEST = MIN_BUFFER_TOKENS * BYTES_PER_ID


def ids_of(num_tokens: int, first: int = 0) -> bytes:
    return pack_ids(range(first, first + num_tokens))


def buffer_of(ids: bytes, capacity: int = 4096) -> TokenBuffer:
    buffer = TokenBuffer(capacity)
    buffer.append(ids)
    return buffer


def whole(pool: BufferPool, num_tokens: int, first: int = 0) -> memoryview:
    view = pool.whole(ids_of(num_tokens, first))
    assert view is not None
    return view


def test_view_is_read_only_and_shows_the_beginning() -> None:
    buffer = buffer_of(ids_of(10))
    view = buffer.view(12)
    assert view.readonly
    assert bytes(view) == ids_of(3)


def test_view_does_not_change_when_ids_are_appended() -> None:
    buffer = buffer_of(ids_of(10))
    view = buffer.view(40)
    buffer.append(memoryview(ids_of(5, 10)))
    assert bytes(view) == ids_of(10)
    assert bytes(buffer.view(60)) == ids_of(15)


def test_any_view_makes_it_used() -> None:
    buffer = buffer_of(ids_of(1024))
    assert buffer.is_unused()
    view = buffer.view(40)
    assert not buffer.is_unused()
    piece = view[4:8]
    del view
    assert not buffer.is_unused()
    again = memoryview(piece)
    piece.release()
    assert not buffer.is_unused()
    del again
    assert buffer.is_unused()


def test_asking_does_not_touch_the_last_id_of_a_full_buffer() -> None:
    buffer = buffer_of(ids_of(1024, -5))
    assert buffer.is_unused()
    assert bytes(buffer.view(4096)) == ids_of(1024, -5)


def test_can_cut_only_behind_living_views() -> None:
    buffer = buffer_of(ids_of(10))
    short, long = buffer.view(8), buffer.view(40)
    assert buffer.can_cut(40)
    assert not buffer.can_cut(8)
    long.release()
    assert not buffer.can_cut(8)  # nobody knows which view is gone
    short.release()
    assert buffer.can_cut(8)


@pytest.mark.parametrize("loop_of", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("as_list", [False, True])
def test_what_a_transport_has_not_sent_never_changes(loop_of: object, as_list: bool) -> None:
    """Either the transport holds the buffer until it has sent the bytes, or it has its own copy."""
    assert callable(loop_of)
    num_bytes = 4 << 20
    pool = BufferPool(num_bytes)
    ids = random.Random(1).randbytes(num_bytes)

    async def send() -> bytes:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        view = pool.whole(ids)
        assert view is not None
        transport.writelines([view]) if as_list else transport.write(view)
        assert transport.get_write_buffer_size()
        view.release()
        for _ in range(3):  # whoever gets the buffer now may write into it
            other = pool.whole(b"\xff" * num_bytes)
            assert other is None or other[0] == 0xFF
        received = bytearray()
        while len(received) < num_bytes:
            received += await loop.sock_recv(theirs, 1 << 20)
        theirs.close()
        transport.close()
        await asyncio.sleep(0)
        return bytes(received)

    with asyncio.Runner(loop_factory=loop_of) as runner:
        assert runner.run(send()) == ids
    assert pool.whole(ids) is not None


def test_whole_prompt_is_copied_once() -> None:
    pool = BufferPool(1 << 20)
    view = whole(pool, 100)
    assert bytes(view) == ids_of(100)
    assert (pool.appended_bytes, pool.copied_bytes) == (400, 0)


def test_buffer_is_used_again_when_the_view_is_gone() -> None:
    pool = BufferPool(1 << 20)
    for index in range(50):
        view = whole(pool, 500, index)
        assert bytes(view) == ids_of(500, index)
    del view
    assert pool.reserved_bytes <= 2 * SMALLEST  # the one in hand while the next is made


def test_sizes_are_powers_of_two() -> None:
    pool = BufferPool(1 << 20)
    views = [whole(pool, num_tokens) for num_tokens in (0, 1, 1024)]
    assert pool.reserved_bytes == 3 * SMALLEST
    views.append(whole(pool, 1025))
    assert pool.reserved_bytes == 5 * SMALLEST
    assert pool.peak_bytes == pool.in_use_bytes == pool.reserved_bytes


def test_full_pool_gives_none_until_a_view_is_gone() -> None:
    pool = BufferPool(4 * SMALLEST)
    views = [whole(pool, 1000) for _ in range(4)]
    assert pool.whole(ids_of(1)) is None
    assert not pool.can_acquire(1)
    views.pop(1)
    assert pool.can_acquire(1)
    assert not pool.can_acquire(1025)
    views.append(whole(pool, 1))
    assert not pool.can_acquire(1)
    assert pool.peak_bytes == 4 * SMALLEST


def test_unused_buffers_of_other_sizes_make_room() -> None:
    pool = BufferPool(4 * SMALLEST)
    del (views := [whole(pool, 1000) for _ in range(4)])[:]
    assert not views
    large = whole(pool, 4096)
    assert pool.whole(b"") is None
    del large
    assert bytes(whole(pool, 7)) == ids_of(7)
    assert pool.reserved_bytes <= pool.max_bytes


def test_prompt_beyond_the_bound_is_an_error_with_both_numbers() -> None:
    pool = BufferPool(4 * SMALLEST)
    with pytest.raises(InvalidRequest, match=r"4097 tokens .* 32768 bytes.* 16384 bytes"):
        pool.whole(ids_of(4097))
    with pytest.raises(InvalidRequest):
        pool.can_acquire(4097)


def keep(pool: BufferPool, forgotten: list[int], number: int) -> TokenBuffer:
    buffer = pool.acquire(1)
    assert buffer is not None
    buffer.append(ids_of(1, number))
    pool.keep(buffer, lambda: forgotten.append(number))
    return buffer


def test_kept_buffers_go_when_room_is_needed_longest_unused_first() -> None:
    pool = BufferPool(4 * SMALLEST)
    forgotten: list[int] = []
    kept = [keep(pool, forgotten, number) for number in range(4)]
    pool.touch(kept[0])
    lease = kept[1].view(4)
    assert (pool.num_kept, pool.num_idle) == (4, 3)
    views = [whole(pool, 10)]
    assert forgotten == [2]
    views += [whole(pool, 10), whole(pool, 10)]
    assert sorted(forgotten) == [0, 2, 3]
    assert pool.whole(b"") is None  # the last one is in use
    lease.release()
    views.append(whole(pool, 10))
    assert sorted(forgotten) == [0, 1, 2, 3]
    assert [bytes(view) for view in views] == [ids_of(10)] * 4


def test_given_up_buffer_in_use_is_free_later() -> None:
    pool = BufferPool(SMALLEST)
    forgotten: list[int] = []
    lease = keep(pool, forgotten, 0).view(4)
    pool.give_up_oldest()
    assert forgotten == [0]
    assert pool.whole(b"") is None
    assert bytes(lease) == ids_of(1)
    lease.release()
    assert pool.whole(b"") is not None


def test_bound_holds_and_views_stay_under_random_use() -> None:
    rng = random.Random(2)
    pool = BufferPool(64 * SMALLEST)
    held: list[tuple[memoryview, bytes]] = []
    num_full = 0
    for _ in range(3000):
        ids = rng.randbytes(4 * int(rng.paretovariate(0.5) * 50 % 9000))
        view = pool.whole(ids)
        num_full += view is None
        if view is not None:
            held.append((view, ids))
        if (rng.random() < 0.6 and held) or view is None:
            held.pop(rng.randrange(len(held)))
        assert pool.reserved_bytes <= pool.max_bytes
    assert num_full
    assert all(view == ids for view, ids in held)
    held.clear()
    view = None
    assert pool.can_acquire(64 * MIN_BUFFER_TOKENS)
