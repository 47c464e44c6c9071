"""Metrics of resumable streams. What happens there is counted there; it is brought up to date here."""

from __future__ import annotations

from gateway.metrics import Metrics
from gateway.streams import Streams


class StreamMetrics:
    """Gauges of one process's streams."""

    def __init__(self, metrics: Metrics, streams: Streams) -> None:
        self._streams = streams
        make = metrics.gauge
        help_ = "Resumable streams whose answer is being generated."
        self._live = make("headrace_streams", help_, "livesum")
        self._readers = make("headrace_stream_readers", "Clients that follow a resumable stream.", "livesum")
        help_ = "Memory of the journals of resumable streams, copies included."
        self._bytes = make("headrace_stream_journal_bytes", help_, "livesum")

    def publish(self) -> None:
        """Bring them up to date, before somebody looks."""
        self._live.set(self._streams.num_live)
        self._readers.set(self._streams.num_readers)
        self._bytes.set(self._streams.num_bytes)
