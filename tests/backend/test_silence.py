"""Silence is noticed once, and not when our own loop stood still."""

from __future__ import annotations

import asyncio
import time

from backend.silence import Silence
from tests.backend.linked import until


async def test_silence_is_told_once_with_its_limit() -> None:
    told: list[float] = []
    silence = Silence(told.append)
    silence.start(0.02)
    await until(lambda: told)
    await asyncio.sleep(0.06)
    assert told == [0.02]


async def test_shorter_limit_holds_from_when_it_is_set() -> None:
    told: list[float] = []
    silence = Silence(told.append)
    silence.start(100.0)
    silence.start(0.02)
    await until(lambda: told)
    assert told == [0.02]


async def test_stopped_watch_says_nothing() -> None:
    told: list[float] = []
    silence = Silence(told.append)
    silence.start(0.01)
    silence.stop()
    await asyncio.sleep(0.05)
    assert told == []


async def test_own_stand_still_is_not_blamed_on_a_peer_that_has_written() -> None:
    told: list[float] = []
    silence = Silence(told.append)
    silence.start(0.1)
    time.sleep(0.3)  # noqa: ASYNC251
    asyncio.get_running_loop().call_later(0.01, silence.broken)  # what had arrived is read in the next rounds
    await asyncio.sleep(0.05)
    assert told == []
    silence.stop()
