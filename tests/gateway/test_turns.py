"""Turns: one at a time over processes, by key, and given back when a process dies."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from gateway.turns import Turns

HOLDER = """
import asyncio, sys
from pathlib import Path
from gateway.turns import Turns

async def hold():
    async with Turns(Path(sys.argv[1])).take("w"):
        print("held", flush=True)
        await asyncio.sleep(3600)

asyncio.run(hold())
"""


async def test_one_process_needs_no_folder() -> None:
    turns = Turns()
    async with turns.take("w"), turns.take("w"):
        pass


async def test_turn_is_one_at_a_time_for_a_key(tmp_path: Path) -> None:
    one, other = Turns(tmp_path), Turns(tmp_path)
    events = []

    async def take(turns: Turns, key: str, name: str) -> None:
        async with turns.take(key):
            events.append(f"{name} begins")
            await asyncio.sleep(0.01)
            events.append(f"{name} ends")

    async with one.take("w"):
        waiting = asyncio.create_task(take(other, "w", "late"))
        await take(other, "another", "free")
        await asyncio.sleep(0.1)
        assert events == ["free begins", "free ends"]
    await asyncio.wait_for(waiting, 20)
    assert events[2:] == ["late begins", "late ends"]


async def test_wait_for_a_turn_can_be_cancelled(tmp_path: Path) -> None:
    turns = Turns(tmp_path)

    async def take() -> None:
        async with turns.take("w"):
            raise AssertionError("it was not its turn")

    async with turns.take("w"):
        waiting = asyncio.create_task(take())
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()


async def test_dead_process_gives_its_turn_back(tmp_path: Path) -> None:
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert await asyncio.wait_for(holder.stdout.readline(), 20) == b"held\n"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), Turns(tmp_path).take("w"):
                raise AssertionError("two at a time")
    finally:
        holder.kill()
        await holder.communicate()
    async with asyncio.timeout(20), Turns(tmp_path).take("w"):
        pass
