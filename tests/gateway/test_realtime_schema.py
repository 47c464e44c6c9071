"""One message of a Realtime client is an event or a clear refusal, and its id is found either way."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from gateway.realtime_schema import (
    EDGE_CHARS,
    EVENT_TYPES,
    MAX_ID_SEARCH_CHARS,
    ClientEvent,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    ResponseCancel,
    ResponseCreate,
    SessionUpdate,
    event_id_of,
    read_event,
)
from gateway.sampling_fields import DEFAULT_LIMITS
from pipeline.errors import ClientError, DuplicateKey, InvalidRequest
from tests.gateway.realtime_values import mutated, outcome, refusal, said

EVENTS: list[tuple[dict[str, Any], ClientEvent]] = [
    ({"type": "session.update", "session": {"a": 1}}, SessionUpdate(session={"a": 1})),
    (
        {"type": "conversation.item.create", "item": {"a": 1}, "previous_item_id": "root"},
        ItemCreate(item={"a": 1}, previous_item_id="root"),
    ),
    (
        {"type": "conversation.item.create", "item": {}, "previous_item_id": None, "event_id": None},
        ItemCreate(item={}),
    ),
    ({"type": "conversation.item.delete", "item_id": "i"}, ItemDelete(item_id="i")),
    ({"type": "conversation.item.retrieve", "item_id": "i"}, ItemRetrieve(item_id="i")),
    (
        {"type": "conversation.item.truncate", "item_id": "i", "content_index": 1, "audio_end_ms": 30},
        ItemTruncate(item_id="i", content_index=1, audio_end_ms=30),
    ),
    (
        {"type": "conversation.item.truncate", "item_id": "i", "text_end": 0},
        ItemTruncate(item_id="i", text_end=0),
    ),
    ({"type": "response.create"}, ResponseCreate()),
    ({"type": "response.create", "response": {"a": 1}}, ResponseCreate(response={"a": 1})),
    ({"type": "response.cancel"}, ResponseCancel()),
    ({"type": "response.cancel", "response_id": "r", "other": [1]}, ResponseCancel(response_id="r")),
]
MANY = json.dumps({"type": "response.create", "response": {"a": [[]] * 50}})


def read(text: str) -> ClientEvent:
    return read_event(text, DEFAULT_LIMITS)


@pytest.mark.parametrize(("data", "event"), EVENTS)
def test_each_event_is_read(data: dict[str, Any], event: ClientEvent) -> None:
    assert read(json.dumps(data)) == event
    with_id = read(json.dumps({**data, "event_id": "e" * 512}))
    assert with_id.event_id == "e" * 512
    assert type(with_id) is type(event)


def test_the_known_types_are_those_of_the_events() -> None:
    assert sorted(EVENT_TYPES) == sorted({data["type"] for data, _ in EVENTS})


@pytest.mark.parametrize(
    ("text", "param", "said_of_it"),
    [
        ("", None, "The event is not valid JSON"),
        ("{", None, "The event is not valid JSON"),
        ("NaN", None, "The event is not valid JSON"),
        ('{"type": "response.create", "event_id": "\\ud800"}', None, "half a surrogate pair"),
        ("\ud800", None, "The event is not valid UTF-8"),
        pytest.param(
            f'{{"type": "session.update", "session": {{"a": {"[" * 10_000}',
            None,
            "The event nests arrays and objects too deeply",
            id="deep",
        ),
        ("[]", None, "The event must be an object, got an array of 0"),
        ('"a"', None, "The event must be an object"),
        ("{}", "type", "'type' is required"),
        ('{"type": null}', "type", "'type'"),
        ('{"type": 5}', "type", "one of session.update, conversation.item.create"),
        ('{"type": "session.updated"}', "type", 'response.cancel; got "session.updated"'),
        ('{"type": "input_audio_buffer.append", "audio": "AA"}', "type", "has no audio buffers"),
        ('{"type": "output_audio_buffer.clear"}', "type", "has no audio buffers"),
        ('{"type": "session.update"}', "session", "'session' is required"),
        ('{"type": "session.update", "session": []}', "session", "must be an object, got an array of 0"),
        ('{"type": "conversation.item.create"}', "item", "'item' is required"),
        ('{"type": "conversation.item.create", "item": null}', "item", "must be an object, got null"),
        ('{"type": "conversation.item.delete"}', "item_id", "'item_id' is required"),
        ('{"type": "conversation.item.delete", "item_id": 3}', "item_id", "must be a string, got 3"),
        (json.dumps({"type": "conversation.item.delete", "item_id": "i" * 129}), "item_id", "at most 128"),
        (json.dumps({"type": "response.cancel", "event_id": "e" * 513}), "event_id", "at most 512"),
        ('{"type": "response.cancel", "event_id": 7}', "event_id", "a string or null, got 7"),
        ('{"type": "response.create", "response": "x"}', "response", 'an object or null, got "x"'),
        (
            '{"type": "conversation.item.truncate", "item_id": "i", "text_end": -1}',
            "text_end",
            "at least 0, got -1",
        ),
        (
            '{"type": "conversation.item.truncate", "item_id": "i", "text_end": 2147483648}',
            "text_end",
            "at most 2147483647, got 2147483648",
        ),
        (
            '{"type": "conversation.item.truncate", "item_id": "i", "content_index": 0.5}',
            "content_index",
            "an integer, got 0.5",
        ),
        pytest.param(
            f'{{"type": "session.update", "session": {{"a": {"[" * 69}{"]" * 69}}}}}',
            "session",
            "deeper than 68 levels",
            id="too deep",
        ),
    ],
)
def test_what_is_no_event_is_refused_by_name(text: str, param: str | None, said_of_it: str) -> None:
    error = refusal(lambda: read(text))
    assert said_of_it in str(error)
    assert error.param == param


def test_a_key_that_stands_twice_is_refused_and_not_logged() -> None:
    error = refusal(lambda: read('{"type": "session.update", "session": {"secret": 1, "secret": 2}}'))
    assert isinstance(error, DuplicateKey)
    assert error.log_detail == ""


def test_an_event_of_too_many_values_is_refused_with_both_numbers() -> None:
    limits = replace(DEFAULT_LIMITS, max_containers=52)
    assert "53 arrays and objects; the limit is 52" in str(refusal(lambda: read_event(MANY, limits)))
    assert isinstance(read_event(MANY, replace(limits, max_containers=53)), ResponseCreate)


def test_half_a_surrogate_pair_is_left_out_where_the_limits_say_so() -> None:
    text = '{"type": "session.update", "session": {"instructions": "a\\ud83d"}}'
    event = read_event(text, replace(DEFAULT_LIMITS, drop_lone_surrogates=True))
    assert event == SessionUpdate(session={"instructions": "a"})


LARGE = "x" * MAX_ID_SEARCH_CHARS


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"type": "nothing", "event_id": "e1"}', "e1"),
        ('{"event_id": "e\\u00e9"}', "eé"),
        ('{"event_id": "e1", "item": {', "e1"),  # not JSON
        ('{"item": {"event_id": "other"}, "event_id": "e1"}', "e1"),
        ('{"item": {"event_id": "other"}}', None),
        ('{"text": "\\"event_id\\": \\"e2\\"", "event_id": "e1", ', "e1"),
        ('{"event_id": 3}', None),
        ('{"event_id": ["e1"', None),
        ("[]", None),
        ("", None),
        ("\ud800", None),
        (json.dumps({"event_id": "e" * 513}), None),
        pytest.param(json.dumps({"event_id": "e1", "pad": LARGE}), "e1", id="at the start"),
        pytest.param(json.dumps({"pad": LARGE, "event_id": "e1"}), "e1", id="at the end"),
        pytest.param(
            f'{{"pad": "{LARGE}", "event_id": "e1", "pad": "{"x" * EDGE_CHARS}"}}', None, id="too far inside"
        ),
    ],
)
def test_the_event_id_is_found(text: str, found: str | None) -> None:
    assert event_id_of(text) == found


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_is_an_event_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    num_read = 0
    for _ in range(300):
        data, _ = chance.choice(EVENTS)
        text = json.dumps(mutated({**data, "event_id": "e", "item": said("user", "hi")}, chance))
        if chance.random() < 0.3:
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(['"', "{", "\\", "\ud83d", "", "\x00"]) + text[at + 1 :]
        event = outcome(partial(read, text))
        if isinstance(event, ClientError):
            assert isinstance(event, InvalidRequest)
            assert "The body" not in str(event)
        else:
            num_read += 1
        found = event_id_of(text)
        assert found is None or len(found) <= 512
    assert num_read > 20
