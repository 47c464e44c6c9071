"""What the tests of the answer path share: a client, an engine driven by hand, and an answer between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from filters.rules import Rule, RuleSet
from filters.stream import CompiledRules
from gateway.answer import Answer, AnswerLimits
from gateway.audit import Audit
from gateway.choice import Choice
from gateway.frames import ChatShape, CompletionShape, Shape
from gateway.json_writer import JsonWriter
from gateway.metrics import Metrics
from gateway.outlet import Message, Outlet
from gateway.record import RequestRecord
from gateway.writers import SseWriter, Writer
from pipeline.errors import HeadraceError
from pipeline.events import CONTENT, Fragment
from pipeline.outbound import Outbound
from pipeline.outbound_plan import OutboundPlan, stop_matcher
from pipeline.ports import OutputParser, Sink, TextSink
from pipeline.values import (
    Delivery,
    EngineCall,
    FirstToken,
    Generation,
    MediaKind,
    MediaSupport,
    ModelInfo,
    Prompt,
    TextCall,
    TextUsage,
    TokenLogprobs,
)
from pipeline.vocabulary import Vocabulary
from tests.pipeline import small_tokenizers

REQUEST_ID = "r1"
CREATED = 1_700_000_000
MODEL = "m"
END_ID = 2  # <|im_end|>


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(small_tokenizers.byte_level())


def ids_of(text: str) -> list[int]:
    return list(vocabulary().tokenizer.encode(text, add_special_tokens=False).ids)


class Client:
    """An ASGI `send`: remembers messages. While `reads` is off it suspends, as a server's does."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.cancelled = 0
        self.error: Exception | None = None
        self._reads = asyncio.Event()
        self._reads.set()

    async def __call__(self, message: Message) -> None:
        if self.error is not None:
            raise self.error
        try:
            if not self._reads.is_set():
                await self._reads.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        self.messages.append(dict(message))

    def stops_reading(self) -> None:
        self._reads.clear()

    def reads_again(self) -> None:
        self._reads.set()

    @property
    def status(self) -> int | None:
        return next((each["status"] for each in self.messages if each["type"] == "http.response.start"), None)

    @property
    def headers(self) -> dict[str, str]:
        start = self.messages[0]
        return {name.decode(): value.decode() for name, value in start["headers"]}

    @property
    def bodies(self) -> list[bytes]:
        return [each["body"] for each in self.messages if each["type"] == "http.response.body"]

    @property
    def body(self) -> bytes:
        return b"".join(self.bodies)

    @property
    def is_ended(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("more_body") is False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def frames(self) -> list[bytes]:
        """The events, each without its blank line."""
        body = self.body
        assert body.endswith(b"\n\n"), body
        return body[:-2].split(b"\n\n")

    @property
    def chunks(self) -> list[Any]:
        """The JSON of every data frame but `[DONE]`."""
        return [
            json.loads(frame.removeprefix(b"data: "))
            for frame in self.frames
            if not frame.startswith(b":") and frame != b"data: [DONE]"
        ]

    @property
    def is_done(self) -> bool:
        return self.is_ended and self.frames[-1] == b"data: [DONE]"

    def text(self, index: int = 0) -> str:
        """The text of one choice of a streamed chat."""
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return "".join(each["delta"].get("content", "") for each in choices if each["index"] == index)

    def finishes(self) -> list[tuple[int, str]]:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return [(each["index"], each["finish_reason"]) for each in choices if each["finish_reason"]]


class Stream:
    """One call that an engine has taken: its sink, to be driven by hand, and its handle."""

    def __init__(self, engine: Engine, call: EngineCall, sink: Sink, worker: str) -> None:
        self.call = call
        self.sink = sink
        self.worker = worker
        self.num_aborts = 0
        self.is_over = False
        self._engine = engine
        self._is_begun = False

    @property
    def is_aborted(self) -> bool:
        return self.num_aborts > 0

    def abort(self) -> None:
        self.num_aborts += 1
        self.is_over = True

    def say(
        self,
        text: str | list[int],
        finish: str | None = None,
        stop: int | str | None = None,
        logprobs: bool = False,
        first: FirstToken | None = None,
    ) -> None:
        """Tokens of this text in one step, and for the finish `stop` the one that ends a sequence.

        A stream that is over must not speak, as on the real link.
        """
        assert not self.is_over, "the engine would not send this"
        ids = ids_of(text) if isinstance(text, str) else text
        if finish == "stop":
            ids = [*ids, END_ID]
        if not self._is_begun:
            first = first or FirstToken(cached_tokens=3, queue_ms=1.5, prefill_ms=2.5)
        self._is_begun = True
        self.is_over = finish is not None
        entries = (
            [TokenLogprobs([each, each, 1], [-0.5, -0.5, -1.5], 1) for each in ids] if logprobs else None
        )
        self.sink.tokens(ids, finish, stop, first, entries, self._engine.now_s)
        self.check_sink()

    def fail(self, error: HeadraceError) -> None:
        assert not self.is_over, "the engine would not send this"
        self.is_over = True
        self.sink.failed(error)

    def check_sink(self) -> None:
        """A choice that has ended by itself must have told the engine."""
        if isinstance(self.sink, Choice) and self.sink.is_done:
            assert self.is_over, "the engine still generates for a choice that has ended"


class TextStream:
    """One call that a server of text has taken: its sink, to be driven by hand, and its handle."""

    def __init__(self, engine: Engine, call: TextCall, sink: TextSink, worker: str) -> None:
        self.call = call
        self.sink = sink
        self.worker = worker
        self.num_aborts = 0
        self.is_over = False
        self._engine = engine

    def abort(self) -> None:
        self.num_aborts += 1
        self.is_over = True

    def say(self, *fragments: Fragment | str, num_tokens: int = 1) -> None:
        """What one event of the server had; a string is content. A stream that is over must not speak."""
        assert not self.is_over, "the server would not send this"
        made = [Fragment(CONTENT, each) if isinstance(each, str) else each for each in fragments]
        self.sink.text(made, num_tokens, self._engine.now_s)

    def end(
        self, finish: str = "stop", stop: int | str | None = None, usage: TextUsage | None = None
    ) -> None:
        assert not self.is_over, "the server would not send this"
        self.is_over = True
        self.sink.ended(finish, stop, usage or TextUsage(), self._engine.now_s)

    def fail(self, error: HeadraceError) -> None:
        assert not self.is_over, "the server would not send this"
        self.is_over = True
        self.sink.failed(error)


class Engine:
    """`pipeline.ports.Engine`. `refuse` holds what the next submits raise, None for one that succeeds."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s
        self.streams: list[Stream] = []
        self.text_streams: list[TextStream] = []
        self.refuse: list[HeadraceError | None] = []
        self.room: HeadraceError | None = None
        self.context = 65536
        self.taken: dict[MediaKind, MediaSupport] = {}

    def models(self) -> Sequence[ModelInfo]:
        return ()

    def check_room(self, model: str) -> None:
        if self.room is not None:
            raise self.room

    def max_model_len(self, model: str) -> int:
        return self.context

    def media(self, model: str) -> dict[MediaKind, MediaSupport]:
        return self.taken

    def submit(self, call: EngineCall, sink: Sink) -> Stream:
        error = self.refuse.pop(0) if self.refuse else None
        if error is not None:
            raise error
        stream = Stream(self, call, sink, f"w{len(self.streams)}")
        self.streams.append(stream)
        return stream

    def submit_text(self, call: TextCall, sink: TextSink) -> TextStream:
        error = self.refuse.pop(0) if self.refuse else None
        if error is not None:
            raise error
        stream = TextStream(self, call, sink, f"t{len(self.text_streams)}")
        self.text_streams.append(stream)
        return stream


def call(max_tokens: int = 8, prompt: Prompt | None = None) -> EngineCall:
    return EngineCall(MODEL, prompt or Prompt(memoryview(b"\1\0\0\0" * 5), 5, 0), {}, max_tokens)


class Case:
    """One request with everything around it."""

    def __init__(
        self,
        num_choices: int = 1,
        stream: bool = True,
        rules: Sequence[Rule] = (),
        stops: Sequence[str] = (),
        limits: AnswerLimits | None = None,
        hold_policy: str = "block",
        completion: bool = False,
        max_buffered_bytes: int = 1 << 16,
        parser: Callable[[], OutputParser] | None = None,
        **delivery: bool,
    ) -> None:
        self.client = Client()
        self.engine = Engine()
        self.metrics = Metrics()
        self.record = RequestRecord(REQUEST_ID, "/v1/chat/completions", self.engine.now_s, model=MODEL)
        self.record.prompt_tokens = 5
        self.gone: list[str] = []
        self.outlet = Outlet(self.client, max_buffered_bytes, self._on_gone)
        shape: Shape = (CompletionShape if completion else ChatShape)(REQUEST_ID, CREATED, MODEL)
        wanted = Delivery(stream=stream, **delivery)
        self.writer: Writer = (
            SseWriter(self.outlet, shape, vocabulary(), self.record, wanted, num_choices)
            if stream
            else JsonWriter(self.outlet, shape, vocabulary(), self.record, num_choices)
        )
        self.audit_lines: list[dict[str, Any]] = []
        self.answer = Answer(
            self.engine,
            self.writer,
            self.outlet,
            self.record,
            self.metrics,
            Audit(self.metrics, self),
            limits or AnswerLimits(),
        )
        self._rules = CompiledRules(RuleSet(tuple(rules)), on_max_hold=hold_policy)  # type: ignore[arg-type]
        self._stops = stops
        self._parser = parser
        self._num_choices = num_choices

    def start(self, prompt: Prompt | None = None) -> Case:
        """Submit; each choice has a prompt of its own, unless one is given for all."""
        self.answer.start([call(prompt=prompt) for _ in range(self._num_choices)], self._make)
        return self

    def write(self, fields: Mapping[str, Any]) -> None:
        """As the audit's log."""
        self.audit_lines.append(dict(fields))

    def _make(self, call: EngineCall) -> Outbound:
        generation = Generation({}, stop=tuple(self._stops), logprobs=0)
        parser = self._parser
        return OutboundPlan(
            vocabulary(),
            generation,
            stop_matcher(generation),
            lambda channel: self._rules,
            open_parser=None if parser is None else lambda call: parser(),
        ).open(call)

    def _on_gone(self, reason: str) -> None:
        self.gone.append(reason)
        self.answer.client_gone(reason)

    @property
    def streams(self) -> list[Stream]:
        return self.engine.streams

    def later(self, seconds: float) -> None:
        """Time goes on, and the watch looks."""
        self.engine.now_s += seconds
        if not self.answer.is_ended:
            self.answer.check(self.engine.now_s)

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


async def turns(num: int = 5) -> None:
    """Let the event loop run what is ready."""
    for _ in range(num):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    """Wait for something to become true; fails the test when it does not."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - any condition, of any object
            await asyncio.sleep(0.001)
