"""One store for several processes: never a wrong id, whatever dies or is torn."""

from __future__ import annotations

import fcntl
import inspect
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.shared_tokens import MIN_CHARS, SharedTokens, create

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def fd() -> Iterator[int]:
    made = create(MIB)
    yield made
    os.close(made)


@pytest.fixture
def store(fd: int) -> Iterator[SharedTokens]:
    made = SharedTokens(fd)
    yield made
    made.close()


def segment_of(number: int, length: int = MIN_CHARS) -> str:
    return f"<|im_start|>user\n{number} ".ljust(length, "é")


def ids_of(number: int) -> bytes:
    """Ids that only this segment has, of a length that differs."""
    return random.Random(number).randbytes(4 * (1 + number * 7919 % 700))


def test_other_process_object_finds_what_was_offered(fd: int, store: SharedTokens) -> None:
    other = SharedTokens(fd)
    assert other.get("model", segment_of(1)) is None
    store.offer("model", [(segment_of(1), ids_of(1)), (segment_of(2), ids_of(2))])
    assert other.get("model", segment_of(1)) == ids_of(1)
    assert other.get("model", segment_of(2)) == ids_of(2)
    assert (other.hits, other.misses, other.num_broken) == (2, 1, 0)
    other.close()


def test_models_and_texts_do_not_mix(store: SharedTokens) -> None:
    store.offer("model", [(segment_of(1), ids_of(1))])
    assert store.get("other", segment_of(1)) is None
    assert store.get("model", segment_of(1) + " ") is None


def test_short_segments_are_not_kept(store: SharedTokens) -> None:
    short = "x" * (MIN_CHARS - 1)
    store.offer("model", [(short, ids_of(1))])
    assert store.get("model", short) is None
    assert (store.hits, store.misses) == (0, 0)


def test_half_surrogates_are_text_like_any_other(store: SharedTokens) -> None:
    store.offer("model", [("\ud800" * MIN_CHARS, ids_of(1)), ("\udc00" * MIN_CHARS, ids_of(2))])
    assert store.get("model", "\ud800" * MIN_CHARS) == ids_of(1)
    assert store.get("model", "\udc00" * MIN_CHARS) == ids_of(2)


def test_entry_that_is_too_long_or_empty_is_not_kept(store: SharedTokens) -> None:
    store.offer("model", [(segment_of(1), bytes(MIB // 8)), (segment_of(2), b"")])
    assert store.get("model", segment_of(1)) is None
    assert store.get("model", segment_of(2)) is None


def test_ring_goes_round_and_the_newest_are_there(store: SharedTokens) -> None:
    for number in range(3000):
        store.offer("model", [(segment_of(number), ids_of(number))])
        assert store.get("model", segment_of(number)) == ids_of(number)
    found = [number for number in range(3000) if store.get("model", segment_of(number)) is not None]
    assert all(store.get("model", segment_of(number)) == ids_of(number) for number in found)
    assert len(found) > 300
    assert min(found) > 1500
    assert store.num_broken == 0  # what was overwritten is known to be gone


def test_offer_again_writes_nothing(fd: int, store: SharedTokens) -> None:
    store.offer("model", [(segment_of(1), ids_of(1))])
    before = os.pread(fd, MIB, 0)
    store.offer("model", [(segment_of(1), ids_of(1))])
    assert os.pread(fd, MIB, 0) == before


@pytest.mark.parametrize("seed", range(3))
def test_torn_memory_is_a_miss_and_never_a_wrong_id(fd: int, store: SharedTokens, seed: int) -> None:
    rng = random.Random(seed)
    numbers = range(300)
    num_right = num_missed = 0
    for _ in range(20):
        store.offer("model", [(segment_of(number), ids_of(number)) for number in numbers])
        for _ in range(40):
            offset = rng.choice((rng.randrange(16), rng.randrange(4096, 60_000), rng.randrange(16, MIB)))
            os.pwrite(fd, rng.randbytes(rng.choice((1, 8, 500))), min(offset, MIB - 500))
        for number in numbers:
            ids = store.get("model", segment_of(number))
            assert ids is None or ids == ids_of(number)
            num_right += ids is not None
            num_missed += ids is None
    assert num_right > 1000
    assert num_missed > 100
    assert store.num_broken


def test_foreign_memory_is_refused() -> None:
    made = create(MIB)
    os.pwrite(made, b"\0" * 8, 0)
    with pytest.raises(ValueError, match="no store"):
        SharedTokens(made)
    os.close(made)


def test_smallest_store_works() -> None:
    made = create(1)
    store = SharedTokens(made)
    store.offer("model", [(segment_of(1), ids_of(1))])
    assert store.get("model", segment_of(1)) == ids_of(1)
    assert os.fstat(made).st_size == MIB
    store.close()
    os.close(made)


def test_store_has_no_name_in_the_file_system(fd: int) -> None:
    target = os.readlink(f"/proc/self/fd/{fd}")
    assert not Path(target).exists()


# -- real processes ------------------------------------------------------------------------------------------

PROGRAM = """
import os, random, signal, sys, time
sys.path.insert(0, {root!r})
from gateway.shared_tokens import MIN_CHARS, SharedTokens
{functions}
store = SharedTokens({fd})
rng = random.Random({seed})
print("ready", flush=True)
{body}
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(fd: int) -> Iterator[Start]:
    """Starts a process with the store as `store`; it prints "ready" first."""
    started: list[subprocess.Popen[str]] = []

    def start_one(body: str, seed: int = 0) -> subprocess.Popen[str]:
        functions = inspect.getsource(segment_of) + inspect.getsource(ids_of)
        program = PROGRAM.format(
            root=str(ROOT), fd=fd, seed=seed, functions=functions, body=textwrap.dedent(body)
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[fd], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def test_child_finds_what_the_parent_offered_and_the_other_way_round(
    store: SharedTokens, start: Start
) -> None:
    store.offer("model", [(segment_of(1), ids_of(1))])
    child = start(
        """
        store.offer("model", [(segment_of(2), ids_of(2))])
        assert store.get("model", segment_of(1)) == ids_of(1)
        """
    )
    assert child.wait(60) == 0
    assert store.get("model", segment_of(2)) == ids_of(2)


@pytest.mark.parametrize("where", ["_slot_for", "_end"])
def test_writer_that_dies_within_an_entry_leaves_a_readable_store(
    store: SharedTokens, start: Start, where: str
) -> None:
    """It dies with the lock in its hands: before it has moved the end, or with ids written and no index."""
    store.offer("model", [(segment_of(1), ids_of(1))])
    child = start(
        f"""
        SharedTokens.{where} = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        SharedTokens._find = lambda *args: None
        store.offer("model", [(segment_of(1), b"wrong!!!"), (segment_of(2), b"wrong!!!")])
        """
    )
    assert child.wait(60) == -signal.SIGKILL
    assert store.get("model", segment_of(1)) == ids_of(1)
    assert store.get("model", segment_of(2)) is None
    store.offer("model", [(segment_of(2), ids_of(2))])
    assert store.num_busy == 0
    assert store.get("model", segment_of(2)) == ids_of(2)


def test_offer_does_not_wait_for_a_writer_that_hangs(store: SharedTokens, start: Start) -> None:
    child = start(
        """
        SharedTokens._write = lambda *args: (print("holds", flush=True), sys.stdin.read())
        store.offer("model", [(segment_of(1), ids_of(1))])
        """
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "holds\n"
    store.offer("model", [(segment_of(2), ids_of(2))])
    assert store.num_busy == 1
    assert store.get("model", segment_of(2)) is None
    child.kill()
    child.wait(60)
    store.offer("model", [(segment_of(2), ids_of(2))])
    assert store.get("model", segment_of(2)) == ids_of(2)


def test_killed_writers_never_make_a_wrong_id(store: SharedTokens, start: Start) -> None:
    """Three processes write and read as fast as they can; again and again one is killed somewhere."""
    body = """
        while True:
            number = rng.randrange(4000)
            found = store.get("model", segment_of(number))
            assert found is None or found == ids_of(number)
            store.offer("model", [(segment_of(number), ids_of(number))])
        """
    rng = random.Random(6)
    writers = [start(body, seed) for seed in range(3)]
    num_found = 0
    for round_ in range(5):
        deadline_s = time.monotonic() + rng.uniform(0.02, 0.08)
        while time.monotonic() < deadline_s:
            number = rng.randrange(4000)
            found = store.get("model", segment_of(number))
            assert found is None or found == ids_of(number)
            num_found += found is not None
        victim = rng.randrange(3)
        assert writers[victim].poll() is None, "a writer met a wrong id"
        writers[victim].kill()
        writers[victim].wait()
        writers[victim] = start(body, seed=100 + round_)
    assert all(writer.poll() is None for writer in writers)
    assert num_found


def test_lock_is_one_of_records_so_that_children_of_one_parent_exclude_each_other(
    fd: int, start: Start
) -> None:
    """`flock` would be shared by all who inherit the descriptor."""
    child = start(
        """
        import fcntl
        fcntl.lockf(store._fd, fcntl.LOCK_EX)
        print("holds", flush=True)
        sys.stdin.read()
        """
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "holds\n"
    with pytest.raises(BlockingIOError):
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_memory_is_taken_only_when_it_is_written() -> None:
    made = create(256 * MIB)
    store = SharedTokens(made)
    store.offer("model", [(segment_of(1), ids_of(1))])
    assert os.fstat(made).st_blocks * 512 < MIB
    assert os.fstat(made).st_size == 256 * MIB
    store.close()
    os.close(made)
