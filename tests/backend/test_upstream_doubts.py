"""What one call finds of a server holds for that call; the server itself is asked, soon and not too often."""

from __future__ import annotations

import asyncio

from backend.upstream_doubts import MODELS_GAP_S, UpstreamDoubts
from tests.backend.linked import until


async def test_models_are_asked_for_soon_and_then_rarely() -> None:
    doubts = UpstreamDoubts()
    assert not doubts.of_models(5.0)
    doubts.missing("m")
    assert doubts.of_models(5.0)
    assert not doubts.of_models(5.0), "it is settled"
    for _ in range(100):
        doubts.missing("m")
        assert not doubts.of_models(5.0 + MODELS_GAP_S * 0.99)
    assert doubts.of_models(5.0 + MODELS_GAP_S), "it is not forgotten"


async def test_model_is_passed_over_until_the_sink_has_been_told() -> None:
    doubts = UpstreamDoubts()
    for find in (doubts.missing, doubts.broke, doubts.full):
        find("m")
        assert doubts.passed_over == "m"
        doubts.told()
        assert doubts.passed_over is None


async def test_call_that_was_too_many_leaves_no_doubt() -> None:
    doubts = UpstreamDoubts()
    doubts.full("m")
    assert not doubts.of_models(5.0)
    assert not await doubts.broken_within(0.001)


async def test_broken_call_ends_the_wait_once() -> None:
    doubts = UpstreamDoubts()
    waiting = asyncio.ensure_future(doubts.broken_within(1000))
    await asyncio.sleep(0)
    doubts.missing("m")
    await asyncio.sleep(0)
    assert not waiting.done(), "that is no doubt whether it lives"
    doubts.broke("m")
    doubts.broke("m")
    await until(waiting.done)
    assert waiting.result()
    assert not await doubts.broken_within(0.001)
    assert doubts.of_models(0.0), "it may be another server by now"
