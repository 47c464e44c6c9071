"""Gauges of streams, their readers and their memory."""

from __future__ import annotations

from gateway.stream_metrics import StreamMetrics
from tests.gateway.serving import Service
from tests.gateway.streaming import read, start
from tests.gateway.test_streams import shared


def gauges(made: Service) -> tuple[float, float, float]:
    names = ("headrace_streams", "headrace_stream_readers", "headrace_stream_journal_bytes")
    streams, readers, num_bytes = (made.sample(name) for name in names)
    return streams, readers, num_bytes


async def test_gauges_show_streams_readers_and_memory_when_they_are_published() -> None:
    async with shared() as (made, store):
        metrics = StreamMetrics(made.metrics, made.streams)
        metrics.publish()
        assert gauges(made) == (0, 0, 0)
        first, second = await start(made), await start(made)
        meta = store.has()
        readers = [await read(made, first), await read(made, first)]
        readers.append(await read(made, meta.id, f"token={meta.token}"))
        first.engine.say("a")
        store.writes(meta.id)
        assert gauges(made) == (0, 0, 0)
        metrics.publish()
        num_bytes = first.kept.journal.num_bytes + store.copies[meta.id].num_bytes
        assert gauges(made) == (2, 3, num_bytes)
        await first.ends()
        metrics.publish()
        assert gauges(made)[:2] == (1, 1)
        assert gauges(made)[2] > num_bytes  # what has ended is kept
        await readers[2].leaves()
        await second.ends()
        made.streams.look(1e12)
        metrics.publish()
        assert gauges(made) == (0, 0, 0)
        exposition = made.metrics.exposition().decode()
        assert "# HELP headrace_streams Resumable streams whose answer is being generated." in exposition
