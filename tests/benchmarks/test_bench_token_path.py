"""The profile's streams: real objects up to the cut, and none behind it; and the client that only counts."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.outbound_texts import say
from benchmarks.outbound_timing import Way
from benchmarks.stream_counter import StreamReader
from benchmarks.token_streams import Cut, open_streams
from filters.rules import RuleSet
from filters.stream import CompiledRules
from gateway.frames import json_string
from pipeline.model_text import ModelText
from tests.gateway.asgi import served
from tests.pipeline.model_files import model_files

NUM_STREAMS = 3


@pytest.fixture(scope="module")
def model() -> ModelText:
    return ModelText.from_files(model_files())


@pytest.mark.parametrize("cut", list(Cut))
async def test_every_stream_gets_its_token_up_to_the_cut(cut: Cut, model: ModelText) -> None:
    spoken = say(model, "en", 400)
    make = Way(model).plan(CompiledRules(RuleSet(()))).open
    streams = await open_streams(cut, NUM_STREAMS, spoken, make)
    readers = streams._readers
    for reader in readers:
        assert b'"role":"assistant"' in reader.recv(65536)
    assert len(readers) == (NUM_STREAMS if cut is Cut.SOCKET else 0)
    streams._link.data_received(streams.next_frame())
    for index, reader in enumerate(readers):
        assert json_string(spoken.texts[61 * index]) in reader.recv(65536)
    assert streams.feed(2) > 0
    assert streams.cut_frames(1) > 0
    assert streams.look(1) >= 0
    assert not any(slot.live_generation < 0 for slot in streams._link.slots.table)  # no sink has raised
    streams.close()
    await asyncio.sleep(0.01)


async def test_the_counting_client_counts_frames_of_streams_that_run() -> None:
    is_over = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not is_over.is_set():
            await send({"type": "http.response.body", "body": b'{"content":"a"}\n\n', "more_body": True})
            await asyncio.sleep(0.01)

    async with served(app) as port:
        with ThreadPoolExecutor(1) as threads:
            reader = StreamReader(port, 10)
            await asyncio.get_running_loop().run_in_executor(threads, reader.open, NUM_STREAMS)
            counted = await asyncio.get_running_loop().run_in_executor(threads, reader.count, 0.3)
            reader.close()
        is_over.set()
    assert counted.num_streams == NUM_STREAMS
    assert counted.num_frames >= NUM_STREAMS
    assert 0 < counted.gap_p50_ms <= counted.gap_p99_ms <= counted.gap_max_ms


async def test_the_counting_client_refuses_a_stream_that_ends() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"full"})

    async with served(app) as port:
        reader = StreamReader(port, 10)
        with ThreadPoolExecutor(1) as threads, pytest.raises(ConnectionError, match="503"):
            await asyncio.get_running_loop().run_in_executor(threads, reader.open, 1)
        reader.close()
