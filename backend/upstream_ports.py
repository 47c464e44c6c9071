"""What a server that Headrace does not ship must be able to say: one wire per kind of API.

A wire turns calls into requests and the payloads of server-sent events into what sinks take. Connections,
retries, faults and load are the server's (`backend/upstream_server.py`), the same for all of them.
"""

from __future__ import annotations

from typing import Protocol

from backend.http_ports import HttpRequest
from pipeline.ports import Sink, TextSink
from pipeline.values import EngineCall, TextCall


class AnswerReader(Protocol):
    """Reads one choice's event stream and tells its sink. Made per choice."""

    def event(self, payload: bytes, now_s: float) -> bool:
        """The payload of one event. True: the sink has had the finish or a failure, and gets no more.

        Raises `ValueError` for what is no answer of this API; the server's own error events become the sink's
        `failed`.
        """

    def closed(self, now_s: float) -> bool:
        """The body is complete. True: that was a tidy end, and the sink has had its finish or a failure.

        False: the stream broke off, and the server (`upstream_server.py`) tells the sink so. Not asked after
        `event` has said True.
        """


class TokenWire(Protocol):
    """An API that takes and gives token ids."""

    def request(self, call: EngineCall, request_id: str) -> HttpRequest: ...

    def reader(self, call: EngineCall, sink: Sink) -> AnswerReader: ...


class TextWire(Protocol):
    """An API that takes and gives text."""

    def request(self, call: TextCall, request_id: str) -> HttpRequest: ...

    def reader(self, call: TextCall, sink: TextSink) -> AnswerReader: ...
