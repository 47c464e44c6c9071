"""A conversation's driver, with a flow whose answers the test itself speaks."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest

from gateway import realtime
from gateway.flow import Flow
from gateway.realtime import RealtimeTalk, TalkParts
from gateway.realtime_conversation import Memory
from gateway.realtime_ports import OpenedSocket
from gateway.record import RequestRecord
from gateway.sampling_fields import DEFAULT_LIMITS
from gateway.websocket_outlet import WebSocketOutlet
from pipeline.errors import HeadraceError, InvalidRequest
from pipeline.events import Finish
from pipeline.values import ChatRequest

Event = dict[str, Any]


class FakeAnswer:
    """One answer, as the test lets the engine speak it."""

    def __init__(self, client: Any, writer: Any, request: ChatRequest) -> None:
        self.client = client
        self.writer = writer
        self.request = request
        self.is_ended = False
        self.reason = ""

    def say(self, *texts: str) -> None:
        for text in texts:
            self.writer.text(0, text)

    def end(self) -> None:
        self.is_ended = True
        self.writer.finished(0, Finish("stop"))
        self.writer.end(dict)

    def fail(self, error: HeadraceError) -> None:
        if not self.is_ended:
            self.is_ended = True
            self.writer.fail(error)

    def client_gone(self, reason: str) -> None:
        self.is_ended = True
        self.reason = reason

    @property
    def contents(self) -> list[Any]:
        """What stands in the prompt."""
        return [message["content"] for message in self.request.messages]


class FakeFlow:
    def __init__(self) -> None:
        self.in_progress: set[Any] = set()
        self.answers: list[FakeAnswer] = []

    def check(self, request: ChatRequest) -> None:
        (message,) = request.messages
        if "\0" in message["content"]:
            raise InvalidRequest("messages[0].content holds the character U+0000.", "messages[0].content")

    async def prepare_request(self, asker: Any, request: ChatRequest) -> tuple[ChatRequest, None]:
        return request, None

    def start(self, client: Any, writer: Any, request: ChatRequest, ready: None) -> FakeAnswer:
        self.answers.append(FakeAnswer(client, writer, request))
        writer.first()
        return self.answers[-1]

    async def finish(self, client: Any, answer: FakeAnswer, request: ChatRequest) -> None:
        await client.finished()


class Talking:
    """A talk, and the events that it has sent."""

    def __init__(self, max_responses: int = 2) -> None:
        self.flow = FakeFlow()
        self.sent: list[Event] = []
        self.remembered: list[RequestRecord] = []
        self.memory = Memory(1 << 20)

        async def send(message: Any) -> None:
            self.sent.append(json.loads(message["text"]))

        outlet = WebSocketOutlet(cast(Any, send), 1 << 20, lambda reason: None)
        parts = TalkParts(
            cast(Flow, self.flow),
            self.remembered.append,
            DEFAULT_LIMITS,
            100,
            1 << 20,
            self.memory,
            max_responses,
            60.0,
        )
        socket = OpenedSocket(outlet, {}, "key-1", "192.0.2.1", lambda: None)
        self.talk = RealtimeTalk(parts, socket, "model")
        self.talk.opened()

    def send(self, kind: str, **fields: Any) -> list[Event]:
        """The events that come of one, in the same call."""
        start = len(self.sent)
        self.talk.received(json.dumps({"type": kind, **fields}))
        return self.sent[start:]

    def add(self, text: str, role: str = "user", **fields: Any) -> list[Event]:
        kind = "output_text" if role == "assistant" else "input_text"
        item = {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **fields}
        return self.send("conversation.item.create", item=item)

    async def answer(self, **response: Any) -> FakeAnswer:
        """The answer that a new response has begun."""
        (created,) = self.send("response.create", response=response)
        assert created["type"] == "response.created"
        for _ in range(3):
            await asyncio.sleep(0)
        return self.flow.answers[-1]

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.sent if event["type"] == kind]


async def say_hello(talking: Talking) -> FakeAnswer:
    talking.add("Hello.")
    answer = await talking.answer()
    answer.say("Good ", "day.")
    return answer


def error_code(events: list[Event]) -> str:
    (event,) = events
    assert event["type"] == "error"
    return str(event["error"]["code"])


def test_the_session_tells_when_it_ends() -> None:
    before_s = int(time.time())
    (created,) = Talking().sent
    assert before_s <= created["session"]["expires_at"] - 60 <= time.time()


async def test_turns_build_on_what_was_said() -> None:
    talking = Talking()
    (await say_hello(talking)).end()
    assert talking.talk.is_idle
    talking.add("And you?")
    answer = await talking.answer()
    assert answer.contents == ["Hello.", "Good day.", "And you?"]
    answer.end()


async def test_a_second_response_in_the_conversation_is_refused() -> None:
    talking = Talking()
    answer = await say_hello(talking)
    assert error_code(talking.send("response.create")) == "conversation_already_has_active_response"
    answer.end()
    await talking.answer()


async def test_responses_outside_the_conversation_run_beside_it_up_to_a_limit() -> None:
    talking = Talking(max_responses=2)
    first = await say_hello(talking)
    beside = await talking.answer(conversation="none", metadata={"purpose": "title"})
    assert beside.contents == ["Hello."]  # what is still being said is in no prompt
    assert error_code(talking.send("response.create", response={"conversation": "none"})) == (
        "too_many_responses"
    )
    beside.say("A title.")
    beside.end()
    first.end()
    talking.add("Go on.")
    assert (await talking.answer()).contents == ["Hello.", "Good day.", "Go on."]
    done = talking.events("response.done")[0]["response"]
    assert (done["metadata"], done["conversation_id"]) == ({"purpose": "title"}, None)


async def test_an_item_of_meanwhile_stands_behind_the_answer() -> None:
    talking = Talking()
    talking.add("One.")
    answer = await talking.answer()
    talking.add("Two.")  # before the first token
    answer.say("Answer to one.")
    answer.end()
    assert (await talking.answer()).contents == ["One.", "Answer to one.", "Two."]
    added = [event["previous_item_id"] for event in talking.events("conversation.item.added")]
    first_id = talking.events("conversation.item.added")[0]["item"]["id"]
    assert added[2] == first_id


async def test_a_cancel_makes_room_at_once() -> None:
    """All in one burst: the client need not wait for anything."""
    talking = Talking()
    answer = await say_hello(talking)
    kinds = [event["type"] for event in talking.send("response.cancel")]
    assert kinds == [
        "response.output_text.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
    ]
    item_id = talking.events("response.output_item.done")[0]["item"]["id"]
    (truncated,) = talking.send("conversation.item.truncate", item_id=item_id, content_index=0, text_end=4)
    assert (truncated["type"], truncated["text_end"]) == ("conversation.item.truncated", 4)
    talking.add("Stop!")
    second = await talking.answer()
    assert answer.is_ended
    assert second.contents == ["Hello.", "Good", "Stop!"]


@pytest.mark.parametrize("end", ["complete", "cancelled", "cancelled before its prompt", "lost"])
async def test_no_response_waits_for_the_garbage_collector(end: str) -> None:
    """Nor the conversation behind it, which holds all that was said."""
    gc.collect()
    gc.disable()
    try:
        talking = Talking()
        conversation = weakref.ref(talking.talk._conversation)
        talking.add("Hello.")
        response = await one_life(talking, end)
        await asyncio.sleep(0)
        assert response() is None
        del talking.talk
        assert conversation() is None
    finally:
        gc.enable()


async def one_life(talking: Talking, end: str) -> Callable[[], Any]:
    if end == "cancelled before its prompt":
        talking.send("response.create")
    else:
        (await talking.answer()).say("Good day.")
    response = weakref.ref(next(iter(talking.talk._responses.values())))
    if end == "complete":
        talking.flow.answers[-1].end()
    elif end == "lost":
        talking.talk.lost("closed the connection")
    else:
        talking.send("response.cancel")
    talking.flow.answers.clear()
    for _ in range(3):
        await asyncio.sleep(0)
    return response


async def test_a_cancel_before_the_response_has_begun() -> None:
    talking = Talking()
    talking.add("Hello.")
    (created,) = talking.send("response.create")
    (done,) = talking.send("response.cancel")
    assert done["response"]["id"] == created["response"]["id"]
    assert (done["response"]["status"], done["response"]["output"]) == ("cancelled", [])
    await asyncio.sleep(0.01)
    assert not talking.flow.answers
    assert [record.ended for record in talking.remembered] == ["cancelled"]


async def test_a_cancel_by_id_spares_the_others() -> None:
    talking = Talking()
    first = await say_hello(talking)
    beside = await talking.answer(conversation="none")
    response_id = talking.events("response.created")[1]["response"]["id"]
    talking.send("response.cancel", response_id=response_id)
    assert (first.is_ended, beside.is_ended) == (False, True)
    assert error_code(talking.send("response.cancel", response_id=response_id)) == (
        "response_cancel_not_active"
    )


async def test_nothing_to_cancel_is_an_error_that_names_the_event() -> None:
    (event,) = Talking().send("response.cancel", event_id="mine")
    assert event["error"]["code"] == "response_cancel_not_active"
    assert event["error"]["event_id"] == "mine"


async def test_an_item_that_is_deleted_while_it_is_said_stays_deleted() -> None:
    talking = Talking()
    answer = await say_hello(talking)
    item_id = talking.events("response.output_item.added")[0]["item"]["id"]
    talking.send("conversation.item.delete", item_id=item_id)
    answer.end()
    talking.add("Again.")
    assert (await talking.answer()).contents == ["Hello.", "Again."]


async def test_a_barge_in_by_delete_and_create() -> None:
    talking = Talking()
    await say_hello(talking)
    talking.send("response.cancel")
    item = talking.events("response.output_item.done")[0]["item"]
    user_id = talking.events("conversation.item.added")[0]["item"]["id"]
    (deleted,) = talking.send("conversation.item.delete", item_id=item["id"])
    assert deleted["item_id"] == item["id"]
    heard = {
        "id": item["id"],
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Goo"}],
    }
    added, _ = talking.send("conversation.item.create", item=heard, previous_item_id=user_id)
    assert added["previous_item_id"] == user_id
    assert (await talking.answer()).contents == ["Hello.", "Goo"]


async def test_an_item_that_no_prompt_may_hold_is_refused_when_it_comes() -> None:
    """Or every response would fail until somebody finds out which item it is."""
    talking = Talking()
    talking.add("Hello.")
    (event,) = talking.add("Nothing\0 good.")
    assert event["error"]["param"] == "item.content"
    assert event["error"]["message"] == "item.content holds the character U+0000."
    assert (await talking.answer()).contents == ["Hello."]


async def test_settings_that_no_prompt_may_hold_change_nothing() -> None:
    talking = Talking()
    talking.send("session.update", session={"instructions": "Be kind."})
    (event,) = talking.send("session.update", session={"instructions": "Be \0."})
    assert event["error"]["param"] == "session.instructions"
    assert event["error"]["message"] == "session.instructions holds the character U+0000."
    talking.add("Hello.")
    assert (await talking.answer()).contents == ["Be kind.", "Hello."]


async def test_a_lost_connection_stops_every_response() -> None:
    talking = Talking()
    first, beside = await say_hello(talking), await talking.answer(conversation="none")
    assert talking.memory.num_bytes > 0
    talking.talk.lost("closed with 1001")
    assert talking.memory.num_bytes == 0
    assert (first.reason, beside.reason) == ("closed with 1001",) * 2
    assert talking.talk.is_idle
    await asyncio.sleep(0.01)
    assert len(talking.remembered) == 2
    assert not talking.flow.in_progress


async def test_each_response_is_remembered_with_who_asked() -> None:
    talking = Talking()
    (await say_hello(talking)).end()
    await asyncio.sleep(0.01)
    (record,) = talking.remembered
    assert (record.route, record.key_id, record.client) == ("/v1/realtime", "key-1", "192.0.2.1")


async def test_a_fault_of_ours_is_told_without_details_and_the_talk_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    talking, said = Talking(), "what the user said"

    def fail(*args: Any) -> None:
        raise ZeroDivisionError(said)

    monkeypatch.setattr(realtime, "read_item", fail)
    (event,) = talking.send("conversation.item.create", item={}, event_id="mine")
    assert (event["error"]["code"], event["error"]["event_id"]) == ("internal_error", "mine")
    assert said not in json.dumps(event)
    assert said not in caplog.text
    assert talking.send("session.update", session={"instructions": "Go on."})[0]["type"] == "session.updated"


async def test_what_the_socket_refuses_is_an_error_event() -> None:
    talking = Talking()
    talking.talk.refused(HeadraceError("Not now."))
    assert talking.sent[-1]["error"]["message"] == "Not now."
