"""What a server that Headrace does not ship must be able to say: one kind per software, with its wires.

A kind knows where its servers tell of themselves. A wire turns calls into requests and the payloads of
server-sent events into what sinks take. Connections, keys, retries, faults and load are the server's
(`backend/upstream_server.py`), the same for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from backend.http_client import HttpResponse
from backend.http_ports import HttpRequest
from pipeline.ports import Sink, TextSink
from pipeline.values import EngineCall, TextCall

# A million events of 256 bytes, or 131072 tokens with the logprobs of 20 others each, 2 KiB an event.
MAX_ANSWER_BYTES: Final = 256 << 20
# Of all requests with a body, and of those that are answered with a stream.
JSON_HEADERS: Final = ((b"content-type", b"application/json"),)
STREAM_HEADERS: Final = (*JSON_HEADERS, (b"accept", b"text/event-stream"))


class AnswerReader(Protocol):
    """Reads one choice's event stream and tells its sink. Made per choice."""

    @property
    def max_bytes(self) -> int:
        """Of the whole response's body: what no honest answer to this call can have."""

    @property
    def has_finish(self) -> bool:
        """The server has told the finish. What may follow are counts: the sink's last word waits for them."""

    def refused(self, status: int, body: bytes) -> bool:
        """The server refuses the call. True: send it again, the wire makes the next request in another way.

        Asked once at most, before the first event.
        """

    def event(self, payload: bytes, now_s: float) -> bool:
        """The payload of one event, or the whole body of an answer that is JSON instead of a stream.

        True: the sink has had the finish or a failure, and gets no more. Raises `ValueError` for what is no
        answer of this API; the server's own error events become the sink's `failed`.
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

    def abort(self, request_id: str) -> HttpRequest | None:
        """What tells the server of a request given up; None where a closed connection does at once."""


class TextWire(Protocol):
    """An API that takes and gives text."""

    def request(self, call: TextCall, request_id: str) -> HttpRequest: ...

    def reader(self, call: TextCall, sink: TextSink) -> AnswerReader: ...

    def abort(self, request_id: str) -> HttpRequest | None:
        """As in `TokenWire`."""


# Of a page that only operators may see: a proxy shows it to nobody, or to another key than its models. A key
# that is wrong is told by the list of models.
NOT_SHOWN: Final = (401, 403, 404)
UNKNOWN_MODEL_LEN: Final = 1 << 30  # a server that does not tell a model's context refuses what is too long


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, or an adapter of one, as its server lists it."""

    name: str
    max_model_len: int = UNKNOWN_MODEL_LEN


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What a server tells of its load; 0 where it does not."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Traits:
    """What is learned of a server per connection, and again where its models or routes may have changed."""

    wire: TokenWire | TextWire
    api: str  # which of the server's APIs the wire uses, for operators
    block_size: int = 16  # of its KV cache, in tokens
    versions: dict[str, str] = field(default_factory=dict)


class Ask(Protocol):
    """Asks the server for a short answer, with its key and path prefix. `target`: without that prefix.

    Raises `WorkerLost`, `WorkerStalled`, `RefusedError` for a key that is not the server's, and
    `UpstreamFault` for any other status than 2xx and those in `allowed`.
    """

    async def __call__(
        self, method: str, target: str, body: bytes = b"", allowed: Sequence[int] = ()
    ) -> HttpResponse: ...


class UpstreamKind(Protocol):
    """One server software. Stateless. All raise what `Ask` raises, `ValueError` for what is no answer."""

    @property
    def is_text(self) -> bool:
        """Whether its wire is a `TextWire`."""

    async def models(self, ask: Ask) -> Sequence[ServedModel]:
        """All that it serves now; asked again every few seconds."""

    async def traits(self, ask: Ask, sends_defaults: bool) -> Traits:
        """Asked again after calls that went wrong, and with each new list of models.

        `sends_defaults`: calls hold the sampling defaults of the models' files, of all of them.
        """

    async def token_ids(self, ask: Ask, model: str, text: str) -> Sequence[int] | None:
        """What its own tokenizer makes of a text, without adding anything; None where it does not tell.

        Asked only of those that take and give ids.
        """

    async def stats(self, ask: Ask) -> EngineStats:
        """Once a second. What it raises means that the server does not live."""
