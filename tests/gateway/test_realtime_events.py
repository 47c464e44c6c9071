"""The server events of a Realtime connection: each is OpenAI's, and each has an id of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.realtime_events import Events, ResponseHead, new_id
from pipeline.errors import HeadraceError, InvalidRequest
from pipeline.realtime_errors import (
    ActiveResponse,
    ConversationTooLarge,
    DuplicateItem,
    ItemNotFound,
    NoActiveResponse,
    ResponseCancelled,
    TooManyResponses,
)
from tests.gateway.realtime_listener import Listener, check

MESSAGE = {
    "id": "item_1",
    "object": "realtime.item",
    "type": "message",
    "role": "user",
    "status": "completed",
    "content": [{"type": "input_text", "text": "hi"}],
}
SESSION = {"type": "realtime", "model": "m", "output_modalities": ["text"], "instructions": "Be brief."}
HEAD = ResponseHead("resp_1", "conv_1", {"topic": "a"}, 100)

ALL: list[tuple[str, Callable[[Events], Any], dict[str, Any]]] = [
    ("session.created", lambda say: say.session_created(SESSION), {"session": SESSION}),
    ("session.updated", lambda say: say.session_updated(SESSION), {"session": SESSION}),
    (
        "conversation.item.added",
        lambda say: say.item_added(MESSAGE, None),
        {"item": MESSAGE, "previous_item_id": None},
    ),
    (
        "conversation.item.done",
        lambda say: say.item_done(MESSAGE, "item_0"),
        {"item": MESSAGE, "previous_item_id": "item_0"},
    ),
    ("conversation.item.retrieved", lambda say: say.item_retrieved(MESSAGE), {"item": MESSAGE}),
    ("conversation.item.deleted", lambda say: say.item_deleted("item_1"), {"item_id": "item_1"}),
    (
        "conversation.item.truncated",
        lambda say: say.item_truncated("item_1", 0, text_end=5),
        {"item_id": "item_1", "content_index": 0, "audio_end_ms": 0, "text_end": 5},
    ),
    (
        "response.created",
        lambda say: say.response_created(HEAD),
        {
            "response": {
                "object": "realtime.response",
                "id": "resp_1",
                "status": "in_progress",
                "status_details": None,
                "output": [],
                "conversation_id": "conv_1",
                "output_modalities": ["text"],
                "max_output_tokens": 100,
                "metadata": {"topic": "a"},
                "usage": None,
            }
        },
    ),
    (
        "response.done",
        lambda say: say.response_done(HEAD.wire("completed", {"type": "completed"}, [MESSAGE])),
        {
            "response": {
                "object": "realtime.response",
                "id": "resp_1",
                "status": "completed",
                "status_details": {"type": "completed"},
                "output": [MESSAGE],
                "conversation_id": "conv_1",
                "output_modalities": ["text"],
                "max_output_tokens": 100,
                "metadata": {"topic": "a"},
                "usage": None,
            }
        },
    ),
    (
        "response.output_item.added",
        lambda say: say.output_item_added("resp_1", 2, MESSAGE),
        {"response_id": "resp_1", "output_index": 2, "item": MESSAGE},
    ),
    (
        "response.output_item.done",
        lambda say: say.output_item_done("resp_1", 2, MESSAGE),
        {"response_id": "resp_1", "output_index": 2, "item": MESSAGE},
    ),
    (
        "response.content_part.added",
        lambda say: say.part_of("resp_1", "item_1", 2).added(),
        {
            "response_id": "resp_1",
            "item_id": "item_1",
            "output_index": 2,
            "content_index": 0,
            "part": {"type": "text", "text": ""},
        },
    ),
    (
        "response.output_text.delta",
        lambda say: say.part_of("resp_1", "item_1", 2).delta("hi"),
        {
            "response_id": "resp_1",
            "item_id": "item_1",
            "output_index": 2,
            "content_index": 0,
            "delta": "hi",
        },
    ),
    (
        "response.function_call_arguments.delta",
        lambda say: say.call_of("resp_1", "item_1", 2, "call_1", "look").delta('{"a'),
        {
            "response_id": "resp_1",
            "item_id": "item_1",
            "output_index": 2,
            "call_id": "call_1",
            "delta": '{"a',
        },
    ),
    (
        "response.function_call_arguments.done",
        lambda say: say.call_of("resp_1", "item_1", 2, "call_1", "look").done("{}"),
        {
            "response_id": "resp_1",
            "item_id": "item_1",
            "output_index": 2,
            "call_id": "call_1",
            "name": "look",
            "arguments": "{}",
        },
    ),
]


@pytest.mark.parametrize(("kind", "say", "fields"), ALL)
def test_event_is_of_the_openai_type(kind: str, say: Callable[[Events], Any], fields: dict[str, Any]) -> None:
    listener = Listener()
    say(Events(listener))
    (event,) = listener.events
    assert event == {"type": kind, "event_id": event["event_id"], **fields}


def test_end_of_a_text_is_two_events() -> None:
    listener = Listener()
    Events(listener).part_of("resp_1", "item_1", 0).done("hello")
    assert listener.types == ["response.output_text.done", "response.content_part.done"]
    assert listener.events[0]["text"] == "hello"
    assert listener.events[1]["part"] == {"type": "text", "text": "hello"}


def test_ids_of_events_are_unique_on_and_across_connections() -> None:
    listener = Listener()
    for _ in range(3):
        events = Events(listener)
        part, call = events.part_of("r", "i", 0), events.call_of("r", "i", 1, "c", "f")
        for _, say, _ in ALL:
            say(events)
        for _ in range(20):
            part.delta("a")
            call.delta("b")
    ids = [event["event_id"] for event in listener.events]
    assert len(set(ids)) == len(ids) == 3 * (len(ALL) + 40)
    assert all(each.startswith("event_") for each in ids)


@pytest.mark.parametrize(
    "text",
    ['"', "\\", "\x00mark\x00", "\u0000mark\u0000\\u0000", "a\nb\r\u2028\u2029\x85", "é€😀", "{}%s%d", ""],
)
def test_delta_carries_any_text(text: str) -> None:
    listener = Listener()
    events = Events(listener)
    events.part_of("resp_1", 'item_"\\é', 0).delta(text)
    events.call_of("resp_1", "item_1", 0, 'call_"{}é', "f").delta(text)
    assert [event["delta"] for event in listener.events] == [text, text]
    assert listener.events[0]["item_id"] == 'item_"\\é'
    assert listener.events[1]["call_id"] == 'call_"{}é'


ERRORS: list[tuple[BaseException, str, str | None, str | None]] = [
    (InvalidRequest("Bad.", "item.type"), "invalid_request_error", None, "item.type"),
    (ActiveResponse("resp_1"), "invalid_request_error", "conversation_already_has_active_response", None),
    (NoActiveResponse(), "invalid_request_error", "response_cancel_not_active", None),
    (NoActiveResponse("resp_9"), "invalid_request_error", "response_cancel_not_active", "response_id"),
    (ItemNotFound("item_9", "delete"), "invalid_request_error", "item_delete_invalid_item_id", "item_id"),
    (
        ItemNotFound("item_9", "create", "previous_item_id"),
        "invalid_request_error",
        "item_create_invalid_previous_item_id",
        "previous_item_id",
    ),
    (DuplicateItem("item_1"), "invalid_request_error", "item_create_duplicate_item_id", "item.id"),
    (ConversationTooLarge(3, 2, "items"), "invalid_request_error", "conversation_too_large", None),
    (TooManyResponses(4, 4), "overloaded_error", "too_many_responses", None),
    (ResponseCancelled(), "invalid_request_error", "cancelled", None),
    (RuntimeError("secret"), "server_error", "internal_error", None),
]


@pytest.mark.parametrize(("error", "kind", "code", "param"), ERRORS)
def test_error_names_the_client_event(
    error: BaseException, kind: str, code: str | None, param: str | None
) -> None:
    listener = Listener()
    Events(listener).error(error, "event_of_client")
    told = listener.one("error")["error"]
    message = told.pop("message")
    assert told == {"type": kind, "code": code, "param": param, "event_id": "event_of_client"}
    assert message == (str(error) if isinstance(error, HeadraceError) else message)
    assert "secret" not in message


def test_error_of_an_event_without_an_id() -> None:
    listener = Listener()
    Events(listener).error(NoActiveResponse())
    assert listener.one("error")["error"]["event_id"] is None


def test_a_client_cannot_make_a_message_of_an_error_long() -> None:
    for error in (
        ItemNotFound("x" * 9999, "delete"),
        DuplicateItem("x" * 9999),
        NoActiveResponse("x" * 9999),
    ):
        assert len(error.message) < 200
        assert error.log_detail in ("", "item_id", "item", "response_id")


def test_ids_have_their_kind() -> None:
    assert new_id("item").startswith("item_")
    assert new_id("item") != new_id("item")


def test_the_listener_takes_no_other_types_and_no_other_fields() -> None:
    good = '{"type":"conversation.item.deleted","event_id":"e","item_id":"i"}'
    assert check(good)["item_id"] == "i"
    with pytest.raises(ValidationError):
        check(good.replace('"i"', "5"))
    with pytest.raises(ValidationError):
        check(good.replace("deleted", "undeleted"))
    with pytest.raises(AssertionError, match="surplus"):
        check(good.replace('"item_id"', '"surplus":1,"item_id"'))
