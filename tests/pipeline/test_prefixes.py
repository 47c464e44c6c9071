"""Prompts that share a beginning share its buffer, and no view ever changes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pipeline.encoding import BYTES_PER_ID
from pipeline.prefixes import Prefixes
from pipeline.token_buffer import MIN_BUFFER_TOKENS, BufferPool
from pipeline.token_cache import Entry, TokenCache

SMALLEST = MIN_BUFFER_TOKENS * BYTES_PER_ID


class Chats:
    """Prefixes with a pool and a cache; a prompt is written as its segments' names and lengths."""

    def __init__(self, pool_bytes: int = 1 << 24, max_boundaries: int = 1 << 16) -> None:
        self.pool = BufferPool(pool_bytes)
        self.prefixes = Prefixes(self.pool, max_boundaries)
        self.tokens = TokenCache(1 << 26).of("model")

    def entries(self, *segments: str) -> list[Entry]:
        """`name:length` -> entry with so many tokens, 10 where there is no length."""
        return [
            self.tokens.put(
                segment, random.Random(segment).randbytes(4 * int(segment.partition(":")[2] or 10))
            )
            for segment in segments
        ]

    def prompt(self, *segments: str) -> memoryview:
        """Assembled, and checked."""
        entries = self.entries(*segments)
        view = self.prefixes.assemble("model", entries)
        assert view is not None
        assert view.readonly
        assert view == expected(entries)
        return view


def expected(entries: Sequence[Entry]) -> bytes:
    return b"".join(entry.ids for entry in entries)


def test_next_turn_is_appended_in_place() -> None:
    chats = Chats()
    first = chats.prompt("system:100", "user")
    second = chats.prompt("system:100", "user", "assistant", "user 2")
    assert first == second[: len(first)]
    assert first.obj is second.obj
    pool = chats.pool
    assert (pool.copied_bytes, pool.forks, pool.reused_tokens) == (0, 0, 110)
    assert pool.appended_bytes == 4 * 130
    assert pool.reserved_bytes == SMALLEST


def test_same_prompt_again_writes_nothing() -> None:
    chats = Chats()
    views = [chats.prompt("system:100", "user") for _ in range(3)]
    assert all(view.obj is views[0].obj for view in views)
    assert chats.pool.appended_bytes == 4 * 110


def test_generation_prompt_of_the_last_turn_is_cut_off_once_it_is_unused() -> None:
    chats = Chats()
    history = ["system:50"]
    for turn in range(40):
        history.append(f"user {turn}:20")
        view = chats.prompt(*history, "generation:3")
        del view
        history.append(f"assistant {turn}:30")
    pool = chats.pool
    assert pool.forks == 0
    assert pool.copied_bytes <= 4 * 2 * len(history) * 30  # growth alone: 1,024 tokens once, then twice that
    assert pool.num_kept == 1


def test_generation_prompt_in_use_is_forked_from() -> None:
    chats = Chats()
    first = chats.prompt("system:50", "user", "generation:3")
    before = bytes(first)
    second = chats.prompt("system:50", "user", "assistant", "user 2", "generation:3")
    assert first == before
    assert second.obj is not first.obj
    assert (chats.pool.forks, chats.pool.copied_bytes) == (1, 4 * 60)


def test_two_continuations_share_until_both_append() -> None:
    chats = Chats()
    base = chats.prompt("system:500")
    one = chats.prompt("system:500", "user a")
    assert chats.pool.forks == 0
    two = chats.prompt("system:500", "user b")
    assert (chats.pool.forks, chats.pool.copied_bytes) == (1, 2000)
    assert base.obj is one.obj is not two.obj
    one_more = chats.prompt("system:500", "user a", "assistant a")
    two_more = chats.prompt("system:500", "user b", "assistant b")
    assert one_more.obj is one.obj
    assert two_more.obj is two.obj
    assert chats.pool.forks == 1


def test_users_of_one_system_prompt_who_overlap_get_their_own_buffers_once() -> None:
    chats = Chats()
    users = [["system:400", f"user {user}:50"] for user in range(20)]
    for turn in range(5):
        views = [chats.prompt(*history, "generation:3") for history in users]
        assert len({id(view.obj) for view in views}) == 20
        views.clear()
        for user, history in enumerate(users):
            history += [f"assistant {user} {turn}:20", f"user {user} {turn}:5"]
    assert chats.pool.forks == 19
    assert chats.pool.num_kept == 20


def test_long_tail_is_not_cut_off_for_a_short_beginning() -> None:
    chats = Chats()
    long = ["system:50", *(f"turn {turn}:30" for turn in range(10))]
    chats.prompt(*long)
    chats.prompt("system:50", "somebody else")
    assert chats.pool.forks == 1
    appended = chats.pool.appended_bytes
    chats.prompt(*long, "next:7")
    assert chats.pool.appended_bytes == appended + 4 * 7


def test_short_tail_is_cut_off_and_comes_back() -> None:
    chats = Chats()
    for user in ("a", "b", "a", "b"):
        chats.prompt("document:900", f"question {user}:20")
    pool = chats.pool
    assert (pool.forks, pool.copied_bytes, pool.reserved_bytes) == (0, 0, SMALLEST)
    assert pool.appended_bytes == 4 * (900 + 4 * 20)


def test_dropped_reasoning_cuts_back_to_where_it_was() -> None:
    """Qwen3: within a tool loop reasoning stays, at the next user turn that of earlier turns is dropped."""
    chats = Chats()
    history = ["system:300"]
    for turn in range(6):
        history.append(f"user {turn}:40")
        loop: list[str] = []
        for step in range(3):
            chats.prompt(*history, *loop, "generation:3")
            loop += [f"think and call {turn} {step}:60", f"tool {turn} {step}:25"]
        for step in range(3):
            history += [f"call {turn} {step}:15", f"tool {turn} {step}:25"]
        history.append(f"answer {turn}:30")
    pool = chats.pool
    assert pool.forks == 0
    assert pool.num_kept == 1
    assert pool.copied_bytes < 4 * 2048  # growth from 1,024 tokens to 2,048, once


def test_dropped_middle_turn_reuses_what_precedes_it() -> None:
    chats = Chats()
    chats.prompt("system:200", "a", "b", "c")
    reused = chats.pool.reused_tokens
    chats.prompt("system:200", "a", "c")
    assert chats.pool.reused_tokens == reused + 210


def test_growth_moves_the_line_and_frees_the_small_buffer() -> None:
    chats = Chats()
    first = chats.prompt("system:1000")
    second = chats.prompt("system:1000", "user:100")
    assert second.obj is not first.obj
    pool = chats.pool
    assert (pool.copied_bytes, pool.forks, pool.num_kept) == (4000, 0, 1)
    del first
    assert bytes(chats.prompt("other:10"))
    assert pool.reserved_bytes == 3 * SMALLEST  # the other prompt got the small buffer


def test_models_do_not_share() -> None:
    chats = Chats()
    one = chats.prompt("system")
    two = chats.prefixes.assemble("other model", chats.entries("system"))
    assert two is not None
    assert one.obj is not two.obj


def test_entries_without_ids_and_no_entries_at_all() -> None:
    chats = Chats()
    assert chats.prompt().nbytes == 0
    for segments in (
        ["a:0"],
        ["a:0", "b:0"],
        ["a:0", "b:0", "c"],
        ["a:0", "d:0"],
        ["a:0", "c"],
        ["a:0", "b:0"],
    ):
        chats.prompt(*segments)
        chats.prompt(*segments, "e")


def test_entry_that_is_not_kept_ends_what_is_remembered() -> None:
    chats = Chats()
    one_off = TokenCache(0).of("model").put("one-off", b"\1\0\0\0" * 20)
    entries = [*chats.entries("system:50"), one_off, *chats.entries("generation")]
    view = chats.prefixes.assemble("model", entries)
    assert view == expected(entries)
    assert chats.prefixes.num_boundaries == 1
    chats.prompt("system:50", "user")
    assert chats.pool.reused_tokens == 50
    assert view == expected(entries)


def test_prompt_of_entries_that_are_not_kept_is_not_remembered() -> None:
    chats = Chats(pool_bytes=2 * SMALLEST)
    tokens = TokenCache(0).of("model")
    for index in range(10):
        entries = [tokens.put("a", b"\1\0\0\0" * index)]
        view = chats.prefixes.assemble("model", entries)
        assert view == expected(entries)
    assert (chats.prefixes.num_boundaries, chats.pool.num_kept) == (0, 0)


def test_full_pool_gives_none_and_the_same_call_works_later() -> None:
    chats = Chats(pool_bytes=2 * SMALLEST)
    views = [chats.prompt("a"), chats.prompt("b")]
    entries = chats.entries("c")
    assert chats.prefixes.assemble("model", entries) is None
    assert not chats.pool.can_acquire(10)
    views.pop()
    assert chats.pool.can_acquire(10)
    assert chats.prefixes.assemble("model", entries) == expected(entries)
    assert views[0] == expected(chats.entries("a"))


def test_full_pool_gives_none_for_growth_and_fork_too() -> None:
    chats = Chats(pool_bytes=2 * SMALLEST)
    view = chats.prompt("a:1000", "b")
    entries = chats.entries("a:1000", "b", "c:100")
    assert chats.prefixes.assemble("model", entries) is None
    other = chats.prompt("x")
    fork = chats.entries("a:1000", "d")
    assert chats.prefixes.assemble("model", fork) is None
    other.release()
    assert chats.prefixes.assemble("model", fork) == expected(fork)
    assert view == expected(chats.entries("a:1000", "b"))


def test_making_room_does_not_give_up_the_beginning_that_is_copied() -> None:
    chats = Chats(pool_bytes=3 * SMALLEST)
    chats.prompt("a:1000")
    chats.prompt("a:1000", "b:100")  # 1,024 and 2,048 at once, just fits
    assert chats.pool.copied_bytes == 4000


def test_given_up_beginning_is_found_in_the_forks_that_remain() -> None:
    chats = Chats(pool_bytes=3 * SMALLEST)
    one = chats.prompt("system:500", "a")
    two = chats.prompt("system:500", "b")
    one.release()
    chats.prompt("other")
    chats.prompt("another")  # no room any more: the longest unused goes
    assert two == expected(chats.entries("system:500", "b"))
    reused = chats.pool.reused_tokens
    chats.prompt("system:500", "b", "c")
    assert chats.pool.reused_tokens == reused + 510


def test_boundaries_are_bounded() -> None:
    chats = Chats(max_boundaries=100)
    for chat in range(50):
        chats.prompt(*(f"{chat} {index}" for index in range(30)))
        assert chats.prefixes.num_boundaries <= 130
    chats.prompt(*(f"long {index}:1" for index in range(500)))
    assert chats.pool.num_kept == 1
    chats.prompt("short")
    assert chats.prefixes.num_boundaries == 1


@pytest.mark.parametrize("seed", range(4))
def test_no_view_changes_under_random_continuations(seed: int) -> None:
    """Random walks over a tree of segments, views held for random times, in a pool that is often full."""
    rng = random.Random(seed)
    chats = Chats(pool_bytes=48 * SMALLEST, max_boundaries=300)
    held: list[tuple[memoryview, bytes]] = []
    num_full = 0
    for _ in range(4000):
        length = rng.randint(1, 12)
        segments = [
            f"{index}.{min(int(rng.paretovariate(1.5)), 4)}:{index * 37 % 400}" for index in range(length)
        ]
        entries = chats.entries(*segments)
        view = chats.prefixes.assemble("model", entries)
        if view is None:
            num_full += 1
        else:
            assert view == expected(entries)
            held.append((view, bytes(view)))
        while held and (view is None or rng.random() < 0.5):
            changed, ids = held.pop(rng.randrange(len(held)))
            assert changed == ids
            view = changed
            del changed
        view = None
        assert chats.pool.reserved_bytes <= chats.pool.max_bytes
    assert all(view == ids for view, ids in held)
    assert chats.pool.forks > 50
    assert num_full
    held.clear()
    assert chats.pool.can_acquire(32 * MIN_BUFFER_TOKENS)
    assert sum(len(line.numbers) for line in set(chats.prefixes._index.values())) <= 300


def test_same_entries_in_another_order_are_another_prompt() -> None:
    """The index goes by sums, which are the same here."""
    chats = Chats()
    for segments in (["a:20", "b:30", "c"], ["b:30", "a:20", "c"], ["c", "b:30", "a:20"]) * 2:
        chats.prompt(*segments)
        chats.prompt(*segments, "d")


def test_digests_that_are_all_equal_cost_time_and_nothing_else() -> None:
    rng = random.Random(1)
    chats = Chats()
    for entry in chats.entries(*(f"{index}:{index}" for index in range(8))):
        entry.digest = 1
    views = []
    for _ in range(300):
        segments = [f"{index}:{index}" for index in rng.choices(range(8), k=rng.randint(1, 6))]
        view = chats.prompt(*segments)
        views.append((view, bytes(view)))
    assert all(view == ids for view, ids in views)
