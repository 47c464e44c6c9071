"""What a Realtime session shows and keeps, and what a response is made of."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from gateway.realtime_conversation import Conversation
from gateway.realtime_session import MAX_SETTINGS_BYTES, ResponsePlan, Session
from gateway.sampling_fields import DEFAULT_LIMITS
from pipeline.realtime_errors import ConversationTooLarge, ItemNotFound
from pipeline.values import TemplateUse, ToolChoice
from tests.gateway.realtime_values import (
    FIRST,
    TOOL,
    as_told,
    call,
    chat_request,
    client_error,
    item,
    numbered,
    planned,
    refusal,
    said,
    with_items,
)


def test_a_new_session_shows_what_holds_without_settings() -> None:
    assert FIRST.wire() == {
        "type": "realtime",
        "object": "realtime.session",
        "id": "sess_1",
        "model": "m",
        "output_modalities": ["text"],
        "audio": {"input": {"format": {"type": "audio/pcm", "rate": 24000}, "turn_detection": None}},
        "instructions": "",
        "tools": [],
        "tool_choice": "auto",
        "max_output_tokens": "inf",
        "truncation": None,
        "speech": "token",
        "include": None,
    }
    assert Session.first("s", "m", DEFAULT_LIMITS, 1_900_000_000).wire()["expires_at"] == 1_900_000_000
    assert refusal(lambda: Session.first("s", "", DEFAULT_LIMITS)).param == "session.model"


def test_an_update_keeps_what_it_does_not_name_and_null_resets() -> None:
    session = FIRST.update(
        {"instructions": "Be brief.", "temperature": 0.5, "tools": [TOOL], "speech": "clause"}
    )
    later = session.update({"temperature": None, "max_output_tokens": 5})
    assert later.wire() == {
        **FIRST.wire(),
        "instructions": "Be brief.",
        "tools": [TOOL],
        "speech": "clause",
        "max_output_tokens": 5,
    }
    everything = dict.fromkeys(("instructions", "tools", "speech", "max_response_output_tokens"))
    assert later.update(everything).wire() == FIRST.wire()
    assert session.wire()["temperature"] == 0.5  # a value


def test_a_session_keeps_no_settings_that_are_slow_to_read_again() -> None:
    """A short response.create would stop everyone for as long as they take. A response may bring its own."""
    text = {"description": "x" * 300}
    tools = [TOOL | {"name": f"f{number}"} | text for number in range(1024)]
    error = refusal(lambda: FIRST.update({"tools": tools}))
    assert (error.param, f"the limit is {MAX_SETTINGS_BYTES}" in str(error)) == ("session", True)
    assert len(planned(FIRST, {"tools": tools}).request.tools or ()) == 1024
    long = "x" * 2 * MAX_SETTINGS_BYTES
    assert FIRST.update({"instructions": long, "tools": tools[:500]}).settings["instructions"] == long


def test_tools_that_are_gone_take_their_choice_with_them() -> None:
    session = FIRST.update({"tools": [TOOL], "tool_choice": "required"})
    assert session.update({"tools": []}).wire()["tool_choice"] == "auto"
    assert planned(session, {"tools": []}).request.tool_choice == ToolChoice()
    assert planned(session, {"tool_choice": "none"}).request.tool_choice == ToolChoice("none")
    assert planned(session).request.tool_choice == ToolChoice("required")


def test_the_model_stays() -> None:
    error = refusal(lambda: FIRST.update({"model": "other"}))
    assert (error.param, str(error)) == (
        "session.model",
        '\'session.model\' cannot be changed: it is "m", got "other".',
    )


def test_a_responses_error_in_a_setting_of_the_session_says_so() -> None:
    session = FIRST.update({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}})
    error = refusal(lambda: planned(session, {"tools": [{"type": "function", "name": "g"}]}))
    assert error.param == "session.tool_choice.name"


def test_a_response_has_the_sessions_settings_and_its_own_for_once() -> None:
    session = FIRST.update(
        {"instructions": "Be brief.", "temperature": 0.5, "max_output_tokens": 9, "speech": "sentence"}
    )
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "hi"}
    assert planned(session) == ResponsePlan(
        request=as_told(chat_request(temperature=0.5, max_tokens=9, messages=[system, user])),
        in_conversation=True,
        metadata=None,
        speech="sentence",
        wants_timings=False,
        max_output_tokens=9,
    )
    own = {
        "instructions": "",
        "max_output_tokens": "inf",
        "temperature": None,  # not given, as in a chat body
        "speech": "token",
        "include": ["timings", "item.input_audio_transcription.logprobs"],
        "conversation": "none",
        "metadata": {"topic": "x"},
    }
    assert planned(session, own) == ResponsePlan(
        request=as_told(chat_request(temperature=0.5), include_timings=True),
        in_conversation=False,
        metadata={"topic": "x"},
        speech="token",
        wants_timings=True,
        max_output_tokens="inf",
    )
    assert planned(session) == planned(session, {"conversation": "auto", "metadata": None, "input": None})


def test_an_input_is_there_in_the_place_of_the_conversation() -> None:
    conversation = with_items("a", "b")
    fields = {"input": [said("user", "new"), {"type": "item_reference", "id": "id-b"}, {"id": "id-a"}]}
    request = FIRST.plan(fields, conversation, numbered()).request
    assert [message["content"] for message in request.messages] == ["new", "b", "a"]
    assert [each.id for each in conversation] == ["id-a", "id-b"]
    cleared = FIRST.plan({"input": [], "instructions": "Greet."}, conversation, numbered()).request
    assert cleared.messages == ({"role": "system", "content": "Greet."},)


def test_an_input_that_refers_to_much_is_refused() -> None:
    """A thousand references to one text of megabytes would be a prompt of gigabytes."""
    conversation = Conversation(max_bytes=1000)
    conversation.add(item(said("user", "x" * 400, "big")))
    fields = {"input": [{"type": "item_reference", "id": "big"}] * 2}
    assert len(FIRST.plan(fields, conversation, numbered()).request.messages) == 2
    fields["input"] *= 2
    error = client_error(lambda: FIRST.plan(fields, conversation, numbered()))
    assert isinstance(error, ConversationTooLarge)
    assert "1600 bytes; the limit is 1000" in str(error)


@pytest.mark.parametrize(
    ("fields", "param", "said_of_it"),
    [
        ({"conversation": "conv_1"}, "conversation", 'one of auto, none; got "conv_1"'),
        ({"conversation": {}}, "conversation", "an object with 0 keys"),
        ({"metadata": []}, "metadata", "an object of at most 16 keys, got an array of 0"),
        ({"metadata": {str(each): "" for each in range(17)}}, "metadata", "got an object with 17 keys"),
        ({"metadata": {"k" * 65: ""}}, "metadata", "at most 64 characters, got 65"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "at most 512 characters, got a string of 513"),
        ({"metadata": {"k": 3}}, "metadata.k", "got 3"),
        ({"input": "hi"}, "input", "must be an array of at most 1000 items"),
        ({"input": [{}] * 1001}, "input", "got an array of 1001"),
        ({"input": ["secret"]}, "input[0]", "must be an object, got a string of 6 characters"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "must be a string, got null"),
        ({"input": [said("user", "a"), said("tool", "b")]}, "input[1].role", 'got "tool"'),
        ({"input": [{**said("user", "a"), "content": [{}]}]}, "input[0].content[0].type", "got null"),
    ],
)
def test_what_is_no_response_is_refused_by_name(fields: dict[str, Any], param: str, said_of_it: str) -> None:
    error = refusal(lambda: planned(FIRST, fields))
    assert error.param == f"response.{param}"
    assert f"'{error.param}'" in str(error)
    assert said_of_it in str(error)


def test_an_item_that_is_not_there_cannot_be_an_input() -> None:
    error = client_error(lambda: planned(FIRST, {"input": [{"id": "gone"}]}))
    assert isinstance(error, ItemNotFound)
    assert (error.code, error.param) == ("item_reference_invalid_id", "response.input[0].id")


def test_there_must_be_something_to_answer() -> None:
    empty = Conversation()
    assert "nothing to answer" in str(refusal(lambda: FIRST.plan(None, empty, numbered())))
    told = FIRST.update({"instructions": "Greet."}).plan(None, empty, numbered())
    assert told.request.messages == ({"role": "system", "content": "Greet."},)
    shaped = FIRST.update({"template": {"name": "t"}}).plan(None, empty, numbered())
    assert (shaped.request.messages, shaped.request.template) == ((), TemplateUse("t", {}))


def test_sessions_and_items_are_what_openais_client_expects() -> None:
    """Strictly: the client itself takes whatever comes."""
    from openai.types.realtime import ConversationItem, RealtimeSessionCreateResponse

    chosen = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}, "max_output_tokens": 5}
    for session in (FIRST, FIRST.update(chosen)):
        RealtimeSessionCreateResponse.model_validate(session.wire())
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}
    sound = {"type": "input_audio", "audio": "AAAA", "transcript": "ah"}
    kinds = {
        "UserMessage": {"type": "message", "role": "user", "content": [image, sound]},
        "AssistantMessage": said("assistant", "hi"),
        "SystemMessage": said("system", "hi"),
        "FunctionCall": call("f", "{}", "c"),
        "FunctionCallOutput": {"type": "function_call_output", "call_id": "c", "output": ""},
    }
    adapter: TypeAdapter[Any] = TypeAdapter(ConversationItem)
    for kind, data in kinds.items():
        for with_media in (False, True):
            read = adapter.validate_python(item(data).wire(with_media))
            assert type(read).__name__ == f"RealtimeConversationItem{kind}"
