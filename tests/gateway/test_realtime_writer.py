"""What a Realtime writer makes of an answer's events: their order, their ends, and what a client was told."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gateway.realtime_events import Events, ResponseHead
from gateway.realtime_writer import RealtimeWriter, usage_object
from gateway.record import RequestRecord
from gateway.writers import Writer
from pipeline.errors import EngineFailed, HeadraceError, WorkerLost
from pipeline.events import CONTENT, REASONING, Event, Finish, TextDelta, ToolCallDelta
from pipeline.realtime_errors import ResponseCancelled
from pipeline.speech import Speech
from pipeline.values import FinishReason, Usage
from tests.gateway.answering import Case
from tests.gateway.realtime_listener import Listener
from tests.pipeline.splits import random_split

HEAD = ResponseHead("resp_1", "conv_1", {"topic": "a"}, 50)
FINISHES: tuple[FinishReason, ...] = ("stop", "length", "content_filter", "tool_calls")

BEGIN = ["response.output_item.added", "conversation.item.added"]
END = ["conversation.item.done", "response.output_item.done"]
TEXT_END = ["response.output_text.done", "response.content_part.done", *END]
MESSAGE = [*BEGIN, "response.content_part.added", "response.output_text.delta", *TEXT_END]
EMPTY_MESSAGE = [each for each in MESSAGE if not each.endswith("delta")]
CALL = [
    *BEGIN,
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    *END,
]
EMPTY_CALL = [each for each in CALL if not each.endswith("delta")]
DONE = ["response.done"]


class Place:
    """A conversation that keeps what it is told."""

    def __init__(self) -> None:
        self.ids = ["item_of_user"]
        self.begun: list[dict[str, Any]] = []
        self.ended: list[dict[str, Any]] = []

    def added(self, item: dict[str, Any]) -> str | None:
        self.begun.append(item)
        self.ids.append(item["id"])
        return self.ids[-2]

    def done(self, item: dict[str, Any]) -> None:
        self.ended.append(item)


class Said:
    """A writer with everything around it, that is told an answer's events."""

    def __init__(
        self, speech: Speech = "token", wants_timings: bool = False, in_conversation: bool = True
    ) -> None:
        self.listener = Listener()
        self.record = RequestRecord("r1", "/v1/realtime", 100.0)
        self.record.prompt_tokens = 5
        self.place = Place()
        self.ends: list[str] = []
        self.writer = RealtimeWriter(
            Events(self.listener),
            self.record,
            HEAD,
            self.place if in_conversation else None,
            speech,
            wants_timings,
            self._on_end,
        )

    def _on_end(self, status: str) -> None:
        assert self.listener.closed or self.listener.events[-1]["type"] == "response.done"
        self.ends.append(status)

    def say(self, *events: Event | str) -> Said:
        """Events of the answer, texts as content; the last of them may be a finish."""
        self.writer.first()
        for event in events:
            if isinstance(event, str):
                self.writer.text(0, event)
            elif isinstance(event, Finish):
                self.writer.finished(0, event)
                self.writer.end(lambda: {"ttft_ms": 1.5})
            else:
                self.writer.delta(0, event)
        return self

    def check(self) -> None:
        """What holds of every response that has ended: all that was said is in every `done`, and in order."""
        listener, response = self.listener, self.listener.response
        assert self.ends == [response["status"]]
        assert self.writer.num_frames == len(listener.events)
        items = [event["item"] for event in listener.all("response.output_item.done")]
        assert response["output"] == items == self.place.ended or not self.place.begun
        for index, (item, added) in enumerate(
            zip(items, listener.all("response.output_item.added"), strict=True)
        ):
            said = "".join(listener.deltas(item["id"]))
            assert added["output_index"] == index
            assert added["item"]["id"] == item["id"]
            assert added["item"]["status"] == "in_progress"
            if item["type"] == "message":
                assert item["content"] == [{"type": "output_text", "text": said}]
                assert self._of(item, "response.output_text.done")["text"] == said
                assert self._of(item, "response.content_part.done")["part"] == {"type": "text", "text": said}
            else:
                done = self._of(item, "response.function_call_arguments.done")
                assert item["arguments"] == done["arguments"] == said
                assert (item["name"], item["call_id"]) == (done["name"], done["call_id"])
        for event in listener.events:
            assert event.get("response_id", "resp_1") == "resp_1"
            if "output_index" in event:
                item_id = event["item"]["id"] if "item" in event else event["item_id"]
                assert items[event["output_index"]]["id"] == item_id

    def _of(self, item: dict[str, Any], kind: str) -> dict[str, Any]:
        (event,) = (event for event in self.listener.all(kind) if event["item_id"] == item["id"])
        return event

    @property
    def texts(self) -> list[str]:
        """The text or the arguments of each item that is done."""
        return [
            each["content"][0]["text"] if each["type"] == "message" else each["arguments"]
            for each in self.listener.response["output"]
        ]


def begin_call(
    call: int, name: str = "look", arguments: str = "", call_id: str | None = None
) -> ToolCallDelta:
    return ToolCallDelta(call, name, arguments, call_id)


def arguments(call: int, text: str) -> ToolCallDelta:
    return ToolCallDelta(call, None, text)


STOP = Finish("stop")
ORDERS: list[tuple[str, list[Event | str], list[str]]] = [
    ("text", ["Hel", "lo", STOP], [*MESSAGE, *DONE]),
    ("one token", ["Hello", STOP], [*MESSAGE, *DONE]),
    ("nothing", [STOP], [*EMPTY_MESSAGE, *DONE]),
    ("nothing within the length", [Finish("length")], DONE),
    ("nothing that may leave", [Finish("content_filter")], DONE),
    ("reasoning alone", [TextDelta(REASONING, "hm"), STOP], [*EMPTY_MESSAGE, *DONE]),
    ("reasoning cut short", [TextDelta(REASONING, "hm"), Finish("length")], DONE),
    ("reasoning and text", [TextDelta(REASONING, "hm"), "a", TextDelta(REASONING, "h"), "b", STOP],
     [*MESSAGE, *DONE]),
    ("text with logprobs' way", [TextDelta(CONTENT, "a"), "b", STOP], [*MESSAGE, *DONE]),
    ("a call", [begin_call(0), arguments(0, "{"), arguments(0, "}"), Finish("tool_calls")], [*CALL, *DONE]),
    ("a call in one piece", [begin_call(0, arguments="{}"), Finish("tool_calls")], [*CALL, *DONE]),
    ("a call that says nothing", [begin_call(0), Finish("tool_calls")], [*EMPTY_CALL, *DONE]),
    ("calls", [begin_call(0, arguments="{}"), begin_call(1), arguments(1, "[]"), Finish("tool_calls")],
     [*CALL, *CALL, *DONE]),
    ("text, then calls", ["Let", " me", begin_call(0, arguments="{}"), begin_call(1, arguments="{}"),
                          Finish("tool_calls")], [*MESSAGE, *CALL, *CALL, *DONE]),
    ("text after a call", ["a", begin_call(0, arguments="{}"), "b", begin_call(1, arguments="{}"), "c", STOP],
     [*MESSAGE, *CALL, *MESSAGE, *CALL, *MESSAGE, *DONE]),
]  # fmt: skip


@pytest.mark.parametrize("speech", ["token", "clause", "sentence"])
@pytest.mark.parametrize(("events", "order"), [row[1:] for row in ORDERS], ids=[row[0] for row in ORDERS])
def test_order_of_events(events: list[Event | str], order: list[str], speech: Speech) -> None:
    said = Said(speech).say(*events)
    assert said.listener.types == order
    said.check()


@pytest.mark.parametrize(("events", "order"), [row[1:] for row in ORDERS], ids=[row[0] for row in ORDERS])
def test_response_in_no_conversation_tells_nothing_of_one(
    events: list[Event | str], order: list[str]
) -> None:
    said = Said(in_conversation=False).say(*events)
    assert said.listener.types == [each for each in order if not each.startswith("conversation.")]
    said.check()
    assert not said.place.begun


def test_items_follow_each_other_in_the_conversation() -> None:
    said = Said().say("a", begin_call(0, arguments="{}"), begin_call(1, arguments="{}"), STOP)
    *before, last = said.place.ids
    for kind in ("conversation.item.added", "conversation.item.done"):
        events = said.listener.all(kind)
        assert [event["previous_item_id"] for event in events] == before
        assert [event["item"]["id"] for event in events] == [*before[1:], last]
    assert [item["id"] for item in said.place.begun] == [*before[1:], last]
    assert len(set(said.place.ids)) == 4


def test_message_item_is_the_assistants() -> None:
    said = Said().say("a", STOP)
    added = said.listener.one("response.output_item.added")["item"]
    same = {"id": added["id"], "object": "realtime.item", "type": "message", "role": "assistant"}
    assert added == same | {"status": "in_progress", "content": []}
    done = said.listener.one("conversation.item.done")["item"]
    assert done == same | {"status": "completed", "content": [{"type": "output_text", "text": "a"}]}


def test_call_item_has_its_name_and_id_from_the_beginning() -> None:
    said = Said().say(
        begin_call(0, "look", "{}", "call_of_model"), begin_call(1, "see"), Finish("tool_calls")
    )
    first, second = (event["item"] for event in said.listener.all("response.output_item.added"))
    assert (first["name"], first["call_id"], first["arguments"]) == ("look", "call_of_model", "")
    assert second["name"] == "see"
    assert second["call_id"].startswith("call_")
    assert [item["call_id"] for item in said.place.ended] == [first["call_id"], second["call_id"]]
    for event in said.listener.all("response.function_call_arguments.done"):
        assert event["name"] in ("look", "see")


@pytest.mark.parametrize(
    ("reason", "status", "details", "item_status"),
    [
        ("stop", "completed", {"type": "completed"}, "completed"),
        ("tool_calls", "completed", {"type": "completed"}, "completed"),
        ("length", "incomplete", {"type": "incomplete", "reason": "max_output_tokens"}, "incomplete"),
        ("content_filter", "incomplete", {"type": "incomplete", "reason": "content_filter"}, "incomplete"),
    ],
)
def test_finish_decides_the_status(
    reason: FinishReason, status: str, details: dict[str, str], item_status: str
) -> None:
    said = Said().say("a", begin_call(0), Finish(reason))
    response = said.listener.response
    assert (response["status"], response["status_details"]) == (status, details)
    assert [item["status"] for item in response["output"]] == ["completed", item_status]
    said.check()


def test_response_says_what_it_said_at_the_beginning() -> None:
    response = Said().say("a", STOP).listener.response
    assert response["id"] == "resp_1"
    assert response["conversation_id"] == "conv_1"
    assert response["metadata"] == {"topic": "a"}
    assert response["max_output_tokens"] == 50
    assert response["output_modalities"] == ["text"]
    assert response["object"] == "realtime.response"


def test_usage_is_in_the_names_of_realtime() -> None:
    said = Said()
    said.record.output_tokens, said.record.cached_tokens = 7, 3
    said.say("a", STOP)
    assert said.listener.response["usage"] == {
        "total_tokens": 12,
        "input_tokens": 5,
        "output_tokens": 7,
        "input_token_details": {
            "text_tokens": 5,
            "audio_tokens": 0,
            "image_tokens": 0,
            "cached_tokens": 3,
            "cached_tokens_details": {"text_tokens": 3, "audio_tokens": 0, "image_tokens": 0},
        },
        "output_token_details": {"text_tokens": 7, "audio_tokens": 0},
    }
    seen = usage_object(Usage(20, 1, 0, media_tokens={"image": 14}))["input_token_details"]
    assert (seen["text_tokens"], seen["image_tokens"], seen["audio_tokens"]) == (6, 14, 0)
    known = usage_object(Usage(1, 9, 0, reasoning_tokens=4))["output_token_details"]
    assert known == {"text_tokens": 9, "audio_tokens": 0, "reasoning_tokens": 4}


def test_timings_only_if_wanted_also_of_a_failure() -> None:
    assert "timings" not in Said().say("a", STOP).listener.response
    assert Said(wants_timings=True).say("a", STOP).listener.response["timings"] == {"ttft_ms": 1.5}
    cancelled = Said(wants_timings=True).say("a")
    cancelled.writer.fail(ResponseCancelled())
    assert cancelled.listener.response["timings"]["total_ms"] > 0


# -- a response that does not come to its end ---------------------------------------------------------------

STATES: list[tuple[str, list[Event | str], list[str]]] = [
    ("before the first token", [], DONE),
    ("in reasoning", [TextDelta(REASONING, "hm")], DONE),
    ("in text", ["Hel", "lo"], [*MESSAGE, *DONE]),
    ("in a call", [begin_call(0), arguments(0, '{"a')], [*CALL, *DONE]),
    ("before a call's arguments", [begin_call(0)], [*EMPTY_CALL, *DONE]),
    ("in the second call", ["a", begin_call(0, arguments="{}"), begin_call(1)],
     [*MESSAGE, *CALL, *EMPTY_CALL, *DONE]),
]  # fmt: skip
IDS = [row[0] for row in STATES]


@pytest.mark.parametrize(("events", "order"), [row[1:] for row in STATES], ids=IDS)
def test_cancel_closes_all_that_is_open(events: list[Event | str], order: list[str]) -> None:
    said = Said().say(*events)
    said.writer.fail(ResponseCancelled())
    assert said.listener.types == order
    response = said.listener.response
    assert response["status"] == "cancelled"
    assert response["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
    assert [item["status"] for item in response["output"][-1:]] == ["incomplete"] * (order != DONE)
    assert all(item["status"] == "completed" for item in response["output"][:-1])
    said.check()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            EngineFailed("It broke."),
            {"type": "engine_error", "code": "engine_failed", "message": "It broke."},
        ),
        (
            RuntimeError("secret"),
            {
                "type": "server_error",
                "code": "internal_error",
                "message": "The server failed on this request. The request's id is r1.",
            },
        ),
    ],
)
@pytest.mark.parametrize(("events", "order"), [row[1:] for row in STATES], ids=IDS)
def test_failure_closes_all_that_is_open_and_is_told(
    events: list[Event | str], order: list[str], error: Exception, told: dict[str, str]
) -> None:
    said = Said().say(*events)
    said.writer.fail(error)
    assert said.listener.types == order
    response = said.listener.response
    assert response["status"] == "failed"
    assert response["status_details"] == {"type": "failed", "error": told}
    said.check()


@pytest.mark.parametrize("error", [ResponseCancelled(), EngineFailed("It broke.")])
def test_nothing_follows_the_end(error: HeadraceError) -> None:
    said = Said().say("a", STOP)
    said.writer.fail(error)
    said.check()
    failed = Said().say("a")
    failed.writer.fail(error)
    failed.writer.fail(EngineFailed("Later."))
    failed.check()


def test_end_that_cannot_be_written_is_a_failure() -> None:
    """`Answer` reports a fault of ours in the end with `fail`."""
    said = Said(wants_timings=True)
    said.writer.first()
    said.writer.text(0, "a")
    said.writer.finished(0, STOP)

    def broken() -> dict[str, Any]:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        said.writer.end(broken)
    said.writer.fail(HeadraceError("An internal error ended this answer."))
    assert said.listener.response["status"] == "failed"
    assert said.texts == ["a"]
    said.check()


@pytest.mark.parametrize("speech", ["token", "clause"])
def test_closed_outlet_changes_nothing_for_the_conversation(speech: Speech) -> None:
    said = Said(speech).say("Well said. ")
    said.listener.closed = True
    said.say("More", begin_call(0, arguments="{}"), STOP)
    assert [item["type"] for item in said.place.ended] == ["message", "function_call"]
    assert said.place.ended[0]["content"][0]["text"] == "Well said. More"
    assert said.ends == ["completed"]


def test_whole_text_is_what_was_sent_unless_a_call_came() -> None:
    said = Said("sentence").say("One. Two. Thr")
    assert said.writer.whole_text() == "One. Two. "
    said.say("ee.", STOP)
    assert said.writer.whole_text() == "One. Two. Three."
    assert Said().say("a", begin_call(0, arguments="{}"), STOP).writer.whole_text() == ""


@pytest.mark.parametrize("speech", ["token", "clause"])
def test_the_text_writer_writes_what_text_does_also_after_a_call(speech: Speech) -> None:
    said, other = Said(speech), Said(speech)
    write = other.writer.text_writer(0)
    assert write is not None
    for text in ("Well", " said. "):
        said.say(text)
        write(text)
    for each in (said, other):
        each.say(begin_call(0, arguments="{}"))
    said.say("More. ")
    write("More. ")
    for each in (said, other):
        each.say(STOP)
    assert other.texts == said.texts
    assert other.writer.num_frames == said.writer.num_frames
    assert [item["type"] for item in other.place.ended] == ["message", "function_call", "message"]


def test_ping_is_not_an_event() -> None:
    said = Said().say("a")
    num = len(said.listener.events)
    said.writer.ping()
    assert len(said.listener.events) == said.writer.num_frames == num


# -- speech -------------------------------------------------------------------------------------------------

SPOKEN = "Hello there, my friend. Pi is 3.14, Dr. Smith says. Goodbye"
SENTENCES = ["Hello there, my friend. ", "Pi is 3.14, Dr. Smith says. ", "Goodbye"]
CLAUSES = ["Hello there, ", "my friend. ", "Pi is 3.14, ", "Dr. Smith says. ", "Goodbye"]


@pytest.mark.parametrize(("speech", "pieces"), [("sentence", SENTENCES), ("clause", CLAUSES)])
def test_speech_is_sent_by_pieces(speech: Speech, pieces: list[str]) -> None:
    rng = random.Random(1)
    for parts in [list(SPOKEN), [SPOKEN], *(random_split(SPOKEN, rng) for _ in range(5))]:
        said = Said(speech).say(*parts, STOP)
        assert said.listener.deltas(said.place.ids[-1]) == pieces
        assert said.texts == [SPOKEN]
        said.check()


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter"])
def test_what_waits_to_be_spoken_leaves_at_the_end(reason: FinishReason) -> None:
    said = Said("sentence").say("One. Tw", Finish(reason))
    assert said.texts == ["One. Tw"]
    said.check()


def test_what_waits_to_be_spoken_leaves_before_a_call() -> None:
    said = Said("sentence").say("Let me", begin_call(0, arguments="{}"), Finish("tool_calls"))
    assert said.texts == ["Let me", "{}"]
    said.check()


def test_what_waits_to_be_spoken_leaves_with_a_failure_and_is_dropped_by_a_cancel() -> None:
    failed, cancelled = Said("sentence").say("One. Tw"), Said("sentence").say("One. Tw")
    failed.writer.fail(EngineFailed("It broke."))
    cancelled.writer.fail(ResponseCancelled())
    assert failed.texts == ["One. Tw"]
    assert cancelled.texts == ["One. "]
    early = Said("sentence").say("On")
    early.writer.fail(ResponseCancelled())
    assert early.listener.types == DONE
    for said in (failed, cancelled, early):
        said.check()


def test_only_text_that_waits_to_be_spoken_can_be_taken_back() -> None:
    said = Said("sentence").say("On")
    assert said.writer.take_back(0)
    said.say("One. Two.")
    assert not said.writer.take_back(0)
    said.say(STOP)
    assert said.texts == ["One. Two."]
    assert not Said().writer.take_back(0)  # it would leave at once
    assert not Said("clause").say(begin_call(0)).writer.take_back(0)


# -- under a real answer ------------------------------------------------------------------------------------


def answering(said: Said) -> Case:
    case = Case()
    writer: Writer = said.writer
    case.answer.writer = writer
    case.answer.record = said.record
    return case.start()


async def test_answer_streams_as_it_comes() -> None:
    said = Said()
    case = answering(said)
    for text in ("Hel", "lo"):
        case.streams[0].say(text)
        assert said.listener.events[-1]["delta"] == text
    case.streams[0].say("!", "stop")
    assert said.texts == ["Hello!"]
    assert said.listener.response["usage"]["output_tokens"] == said.record.output_tokens
    said.check()


async def test_cancelled_answer_stops_its_engine_at_once() -> None:
    said = Said()
    case = answering(said)
    case.streams[0].say("Hel")
    case.answer.fail(ResponseCancelled())
    assert case.streams[0].is_aborted
    assert said.texts == ["Hel"]
    assert said.listener.response["status"] == "cancelled"
    assert said.record.ended == "cancelled"
    said.check()


async def test_another_worker_says_what_waited_to_be_spoken() -> None:
    said = Said("sentence")
    case = answering(said)
    case.streams[0].say("Never to be hea")
    case.streams[0].fail(WorkerLost("gone"))
    case.streams[1].say("This is heard.", "stop")
    assert said.texts == ["This is heard."]
    said.check()


async def test_lost_worker_fails_what_has_been_spoken() -> None:
    said = Said("sentence")
    case = answering(said)
    case.streams[0].say("Heard. Not")
    case.streams[0].fail(WorkerLost("gone"))
    assert len(case.streams) == 1
    assert said.listener.response["status_details"]["error"]["code"] == "worker_lost"
    said.check()


# -- any answer ---------------------------------------------------------------------------------------------


def any_answer(rng: random.Random) -> Iterator[Event | str]:
    """Arguments follow their call's name or other arguments of it, as `pipeline.events` has it."""
    call, in_call = -1, False
    for _ in range(rng.randrange(12)):
        kind = rng.randrange(4)
        if kind == 0:
            yield TextDelta(REASONING, "hm")
        elif kind == 1:
            call, in_call = call + 1, True
            yield begin_call(call, arguments=rng.choice(["", "{"]))
        elif kind == 2 and in_call:
            yield arguments(call, rng.choice(["", '"k":', "1}"]))
        else:
            in_call = False
            yield rng.choice(["a", "One. ", "Two, ", "drei! ", "。", "\n", "é\u2028"])


def ends(rng: random.Random) -> Callable[[Said], Any]:
    finish = Finish(rng.choice(FINISHES))
    return rng.choice(
        [
            lambda said: said.say(finish),
            lambda said: said.writer.fail(ResponseCancelled()),
            lambda said: said.writer.fail(EngineFailed("It broke.")),
        ]
    )


@pytest.mark.parametrize("speech", ["token", "clause", "sentence"])
def test_any_answer_is_told_as_it_was_sent(speech: Speech) -> None:
    rng = random.Random(7)
    for _ in range(30):
        said, events = Said(speech), list(any_answer(rng))
        said.say(*events)
        ends(rng)(said)
        said.check()
