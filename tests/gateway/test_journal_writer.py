"""An answer's events in its journal: those of SSE, numbered, with a named one at the end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gateway.frames import ChatShape, CompletionShape, Shape
from gateway.journal import MAX_TEMPLATES, Journal, JournalLimits
from gateway.journal_writer import JournalOutlet, JournalWriter, failed_event
from gateway.outlet import Outlet
from gateway.record import RequestRecord
from gateway.writers import SseWriter, Writer
from pipeline.errors import QueueFull, WorkerLost
from pipeline.events import CONTENT, REASONING, Finish, TextDelta, ToolCallDelta
from pipeline.values import Delivery
from tests.gateway.answering import CREATED, REQUEST_ID, Case, Client, vocabulary
from tests.gateway.test_writers import CALL, ENTRY, Event, random_events

SHAPE = ChatShape(REQUEST_ID, CREATED, "m")
PLAIN = Delivery(stream=True)
USAGE = Delivery(stream=True, include_usage=True, include_timings=True)
CONTINUOUS = Delivery(stream=True, include_usage=True, continuous_usage=True)
DONE = b"event: done\ndata: [DONE]\n\n"


class Written:
    """A writer, and the journal that it writes."""

    def __init__(
        self,
        shape: Shape = SHAPE,
        delivery: Delivery = PLAIN,
        num_choices: int = 1,
        keeps_text: bool = False,
    ) -> None:
        self.journal = Journal(JournalLimits())
        self.outlet = JournalOutlet(self.journal)
        self.num_closed = 0
        self.outlet.on_closed = self._closed
        self.writer = JournalWriter(
            self.outlet, shape, vocabulary(), record(), delivery, num_choices, keeps_text
        )

    def _closed(self) -> None:
        self.num_closed += 1

    @property
    def events(self) -> list[bytes]:
        return events_of(self.journal)


def events_of(journal: Journal) -> list[bytes]:
    """Each event as it is on the wire, without its id, which is its number."""
    events = []
    for number in range(journal.last):
        event = journal.wire(number, 1)[0]
        prefix = b"id: %d\n" % (number + 1)
        assert event.startswith(prefix)
        assert event.endswith(b"\n\n")
        assert b"\n\n" not in event[:-2]
        events.append(event.removeprefix(prefix))
    return events


def data_of(body: bytes) -> list[bytes]:
    """The lines of data, in order."""
    return [line for line in body.split(b"\n") if line.startswith(b"data: ")]


def record() -> RequestRecord:
    return RequestRecord(REQUEST_ID, "/v1/chat/completions", 0.0, model="m", prompt_tokens=5)


def write(writer: Writer, events: Sequence[tuple[int, Event]], num_choices: int = 1) -> None:
    writer.first()
    for index, event in events:
        if isinstance(event, TextDelta) and event.channel == CONTENT and not event.logprobs:
            writer.text(index, event.text)
        else:
            writer.delta(index, event)
    for index in range(num_choices):
        writer.finished(index, Finish("stop"))


def on_sse(
    events: Sequence[tuple[int, Event]], shape: Shape, delivery: Delivery, num_choices: int
) -> tuple[Client, SseWriter]:
    client = Client()
    outlet = Outlet(client, 1 << 20, lambda reason: None)
    writer = SseWriter(outlet, shape, vocabulary(), record(), delivery, num_choices)
    write(writer, events, num_choices)
    return client, writer


def timings() -> dict[str, Any]:
    return {"ttft_ms": 1.5}


def with_ids(events: Sequence[Event], rng: random.Random) -> list[Event]:
    """Calls whose ids are the same for everyone."""
    return [
        event._replace(call_id=event.call_id or f"id {rng.random()}")
        if isinstance(event, ToolCallDelta) and event.name is not None
        else event
        for event in events
    ]


@pytest.mark.parametrize("delivery", [PLAIN, USAGE, CONTINUOUS], ids=["plain", "usage", "continuous"])
@pytest.mark.parametrize("seed", range(30))
def test_the_data_is_that_of_sse_byte_for_byte(seed: int, delivery: Delivery) -> None:
    rng = random.Random(seed)
    num_choices = rng.choice((1, 1, 2, 3))
    shape = ChatShape(REQUEST_ID, CREATED, "m", reasoning_content=rng.random() < 0.5)
    events = [(index, event) for index in range(num_choices) for event in with_ids(random_events(rng), rng)]
    client, plain = on_sse(events, shape, delivery, num_choices)
    plain.end(timings)
    written = Written(shape, delivery, num_choices)
    write(written.writer, events, num_choices)
    assert written.writer.num_frames == plain.num_frames - 1  # its end is still to come
    written.writer.end(timings)
    assert data_of(b"".join(written.events)) == data_of(client.body)
    assert written.events[-1] == DONE
    assert all(event.startswith(b"data: {") for event in written.events[:-1])
    assert all(len(event.decode().splitlines()) == 2 for event in written.events[:-1])
    assert (written.journal.is_over, written.outlet.closed, written.num_closed) == (True, True, 1)


def test_raw_completions_are_those_of_sse() -> None:
    shape = CompletionShape(REQUEST_ID, CREATED, "m")
    events: list[tuple[int, Event]] = [(0, TextDelta(CONTENT, "a")), (0, TextDelta(CONTENT, "\u2028"))]
    client, plain = on_sse(events, shape, USAGE, 1)
    plain.end(timings)
    written = Written(shape, USAGE)
    write(written.writer, events)
    written.writer.end(timings)
    assert data_of(b"".join(written.events)) == data_of(client.body)
    assert len(written.events) == 5


def test_more_texts_than_templates_are_written_as_whole_frames() -> None:
    num_choices = MAX_TEMPLATES + 20
    events: list[tuple[int, Event]] = [
        (index, event)
        for index in range(num_choices)
        for event in (TextDelta(CONTENT, f"{index}"), TextDelta(REASONING, "x"), TextDelta(REASONING, "y"))
    ]
    client, plain = on_sse(events, SHAPE, PLAIN, num_choices)
    plain.end(timings)
    written = Written(num_choices=num_choices)
    write(written.writer, events, num_choices)
    written.writer.end(timings)
    assert data_of(b"".join(written.events)) == data_of(client.body)
    assert len(written.journal.templates) == MAX_TEMPLATES


def test_a_token_takes_no_more_than_its_text() -> None:
    written = Written()
    written.writer.first()
    for event in (TextDelta(REASONING, "hm"), *CALL):
        written.writer.delta(0, event)
    num_entries = written.journal.written
    for _ in range(3):
        written.writer.text(0, "hi")
        written.writer.delta(0, TextDelta(REASONING, "hm"))
        written.writer.delta(0, CALL[-1])
    sizes = [len(entry) for entry in written.journal.entries(num_entries)]
    assert sizes == [5, 5, 5] * 3
    assert len(written.journal.templates) == 3


def test_each_call_has_templates_of_its_own() -> None:
    written = Written()
    written.writer.first()
    for call in range(3):
        written.writer.delta(0, ToolCallDelta(call, "f", "", "x"))
        for piece in ("{", "}"):
            written.writer.delta(0, ToolCallDelta(call, None, piece))
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in written.events[1:]]
    pieces = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in chunks]
    assert [piece["index"] for piece in pieces] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [piece["function"]["arguments"] for piece in pieces] == ["", "{", "}"] * 3


def test_usage_is_an_event_of_its_own_before_the_end() -> None:
    written = Written(delivery=USAGE)
    write(written.writer, [(0, TextDelta(CONTENT, "a"))])
    written.writer.end(timings)
    *_, finish, usage, done = written.events
    assert b'"finish_reason":"stop"' in finish
    assert json.loads(usage.removeprefix(b"data: "))["timings"] == timings()
    assert done == DONE


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_a_failure_is_the_last_event_also_before_any_token(num_before: int) -> None:
    written = Written()
    if num_before:
        written.writer.first()
    for _ in range(num_before - 1):
        written.writer.text(0, "a")
    written.writer.fail(QueueFull("full"))
    assert len(written.events) == num_before + 1
    event, data = written.events[-1].split(b"\n", 1)
    assert event == b"event: failed"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "error": {"message": "full", "type": "overloaded_error", "param": None, "code": "queue_full"}
    }
    assert (written.journal.is_over, written.num_closed) == (True, 1)


def test_a_fault_of_ours_tells_nothing() -> None:
    assert b"user text" not in failed_event(RuntimeError("user text"))
    assert b'"code":"internal_error"' in failed_event(RuntimeError("user text"))


@pytest.mark.parametrize("ends", ["end", "fail", "drop"])
def test_nothing_follows_the_end(ends: str) -> None:
    written = Written(delivery=USAGE)
    writer, outlet = written.writer, written.outlet
    endings: dict[str, Callable[[], None]] = {
        "end": lambda: writer.end(timings),
        "fail": lambda: writer.fail(WorkerLost("gone")),
        "drop": outlet.drop,
    }
    writer.first()
    writer.delta(0, TextDelta(REASONING, "hm"))
    endings[ends]()
    events = written.events
    writer.text(0, "a")
    for event in (TextDelta(REASONING, "hm"), TextDelta(CONTENT, "a", [ENTRY]), *CALL):
        writer.delta(0, event)
    writer.finished(0, Finish("stop"))
    writer.ping()
    for again in endings.values():
        again()
    assert written.events == events
    assert written.num_closed == 1


def test_an_answer_that_was_given_up_tells_its_readers() -> None:
    written = Written()
    written.writer.first()
    written.outlet.drop()
    assert written.events[-1].startswith(b'event: failed\ndata: {"error":{"message":"The server gave')


def test_an_end_that_cannot_be_written_can_still_fail() -> None:
    written = Written(delivery=USAGE)
    write(written.writer, [])
    with pytest.raises(ZeroDivisionError):
        written.writer.end(lambda: {"x": 1 // 0})
    written.writer.fail(WorkerLost("gone"))
    assert written.events[-1].startswith(b"event: failed\n")


# -- with an answer ------------------------------------------------------------------------------------------


def answered(**options: Any) -> tuple[Case, Journal]:
    """An answer that nobody is connected to."""
    one = Case(**options)
    journal = Journal(JournalLimits())
    outlet = JournalOutlet(journal)
    one.answer.writer = JournalWriter(outlet, SHAPE, vocabulary(), one.record, PLAIN, 1, keeps_text=True)
    one.answer.outlet = outlet
    return one.start(), journal


async def test_an_answer_ends_in_its_journal_with_all_its_text() -> None:
    one, journal = answered()
    one.streams[0].say("hel")
    one.streams[0].say("lo", "stop")
    *chunks, done = events_of(journal)
    texts = [json.loads(each.removeprefix(b"data: "))["choices"][0]["delta"] for each in chunks]
    assert "".join(text.get("content", "") for text in texts) == "hello"
    assert done == DONE
    assert one.record.ended == "complete"
    assert one.answer.writer.whole_text() == "hello"
    assert one.client.messages == []


async def test_silence_is_no_event() -> None:
    one, journal = answered()
    for _ in range(20):
        one.later(2.0)
    assert journal.written == 0
    one.streams[0].say("a")
    written = journal.written
    for _ in range(10):
        one.later(2.0)
    assert journal.written == written > 0
    assert one.answer.check_reader(one.engine.now_s) is None
    one.streams[0].say("b", "stop")
    assert events_of(journal)[-1] == DONE


@pytest.mark.parametrize("has_token", [False, True])
async def test_a_limit_that_is_passed_is_a_failed_event(has_token: bool) -> None:
    one, journal = answered()
    if has_token:
        one.streams[0].say("a")
    one.later(0.1)
    one.later(61.0)
    code = b"worker_stalled" if has_token else b"queue_timeout"
    assert code in events_of(journal)[-1]
    assert one.streams[0].is_aborted


async def test_an_answer_that_loses_its_client_ends_its_journal() -> None:
    one, journal = answered()
    one.streams[0].say("a")
    one.answer.client_gone("the server stops")
    assert journal.is_over
    assert events_of(journal)[-1].startswith(b"event: failed\n")


@pytest.mark.parametrize(
    ("events", "kept"),
    [
        ([TextDelta(CONTENT, "a"), TextDelta(CONTENT, "b", [ENTRY])], "ab"),
        ([TextDelta(REASONING, "hm"), TextDelta(CONTENT, "a")], "a"),
        ([TextDelta(CONTENT, "a"), *CALL, TextDelta(CONTENT, "b")], ""),
    ],
)
@pytest.mark.parametrize("delivery", [PLAIN, CONTINUOUS], ids=["plain", "continuous"])
def test_text_is_kept_only_if_asked(events: list[Event], kept: str, delivery: Delivery) -> None:
    for keeps_text in (True, False):
        written = Written(delivery=delivery, keeps_text=keeps_text)
        write(written.writer, [(0, event) for event in events])
        written.writer.end(timings)
        assert written.writer.whole_text() == (kept if keeps_text else "")
