"""Slices of long reads: all of them, in order, with the end last, and one at a time."""

from __future__ import annotations

import asyncio
import random

import pytest

from backend.http_slices import SLICE_BYTES, Slices
from tests.backend.linked import until


class Call:
    def __init__(self) -> None:
        self.told: list[str] = []

    def abort(self) -> None: ...

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")


class Taken:
    def __init__(self) -> None:
        self.call = Call()
        self.parts: list[bytes] = []
        self.is_ended = False
        self.slices = Slices(self.call, self.parts.append)

    def end(self) -> None:
        self.is_ended = True


DATA = random.Random(1).randbytes(5 * SLICE_BYTES + 7)


@pytest.mark.parametrize("size", [1, 100, SLICE_BYTES // 10])
def test_short_reads_are_taken_at_once(size: int) -> None:
    taken = Taken()
    for start in range(0, 10 * size, size):
        taken.slices.add(DATA[start : start + size])
    taken.slices.end(taken.end)
    assert b"".join(taken.parts) == DATA[: 10 * size]
    assert len(taken.parts) == 10
    assert (taken.is_ended, taken.call.told) == (True, [])


@pytest.mark.parametrize("seed", range(10))
async def test_reads_of_any_length_come_whole_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    cuts = sorted(chance.sample(range(1, len(DATA)), k=chance.randrange(6)))
    taken = Taken()
    for start, stop in zip([0, *cuts], [*cuts, len(DATA)], strict=True):
        taken.slices.add(DATA[start:stop])
        if chance.random() < 0.3:
            await asyncio.sleep(0.002)
    taken.slices.end(taken.end)
    await until(lambda: taken.is_ended)
    assert b"".join(taken.parts) == DATA
    assert max(map(len, taken.parts)) <= SLICE_BYTES
    assert taken.call.told in (["pause", "resume"] * (len(taken.call.told) // 2), [])
    assert taken.call.told


async def test_one_slice_at_a_time_and_the_end_after_the_last() -> None:
    taken = Taken()
    taken.slices.add(DATA)
    taken.slices.end(taken.end)
    assert (taken.parts, taken.is_ended, taken.call.told) == ([DATA[:SLICE_BYTES]], False, ["pause"])
    taken.slices.add(b"more")
    assert len(taken.parts) == 1
    await until(lambda: taken.is_ended)
    assert b"".join(taken.parts) == DATA + b"more"
    assert taken.call.told == ["pause", "resume"]


async def test_taker_that_drops_gets_nothing_more() -> None:
    for at in range(2, 7):
        taken = Taken()

        def take(data: bytes, taken: Taken = taken, at: int = at) -> None:
            taken.parts.append(data)
            if len(taken.parts) == at:
                taken.slices.drop()

        taken.slices = Slices(taken.call, take)
        taken.slices.add(DATA)
        taken.slices.end(taken.end)
        await until(lambda taken=taken, at=at: len(taken.parts) == at)
        await asyncio.sleep(0.003)
        assert (len(taken.parts), taken.is_ended) == (at, False)
