"""What the tests of Realtime values share: ids, items, and errors by the event's name for the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from gateway.chat_schema import parse_chat
from gateway.realtime_conversation import Conversation
from gateway.realtime_items import Item, NewId, read_item
from gateway.realtime_session import ResponsePlan, Session
from gateway.sampling_fields import DEFAULT_LIMITS
from pipeline.errors import ClientError, InvalidRequest
from pipeline.values import ChatRequest, Delivery


def numbered() -> NewId:
    """Ids in the order in which they are asked for."""
    numbers = count(1)
    return lambda prefix: f"{prefix}_{next(numbers)}"


def item(data: dict[str, Any]) -> Item:
    return read_item(data, DEFAULT_LIMITS, numbered())


def said(role: str, text: str, item_id: str | None = None) -> dict[str, Any]:
    """A message of one text as a client sends it."""
    kind = "output_text" if role == "assistant" else "input_text"
    data = {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
    return data if item_id is None else {**data, "id": item_id}


def call(name: str, arguments: str, call_id: str, item_id: str | None = None) -> dict[str, Any]:
    data = {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id}
    return data if item_id is None else {**data, "id": item_id}


def refusal(act: Callable[[], object]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        act()
    return caught.value


def client_error(act: Callable[[], object]) -> ClientError:
    with pytest.raises(ClientError) as caught:
        act()
    return caught.value


def outcome(act: Callable[[], Any]) -> Any:
    """What it gives, or the client error that it raises."""
    try:
        return act()
    except ClientError as error:
        return error


def mutated(value: Any, chance: Any) -> Any:
    """A JSON value with about one of its places changed to something else. `chance`: a seeded Random."""
    if chance.random() < 0.15:
        return chance.choice(
            [None, True, -1, 0, 2**70, 1.5, "", "x" * 600, "敏", [], {}, [{}], {"type": "text"}]
        )
    if isinstance(value, dict):
        changed = {key: mutated(each, chance) for key, each in value.items()}
        if changed and chance.random() < 0.1:
            del changed[chance.choice(list(changed))]
        if chance.random() < 0.1:
            changed[chance.choice(["type", "id", "content", "extra", "null"])] = chance.choice([None, 3, "a"])
        return changed
    return [mutated(each, chance) for each in value] if isinstance(value, list) else value


TOOL: dict[str, Any] = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
CHAT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
FIRST = Session.first("sess_1", "m", DEFAULT_LIMITS)


def with_items(*texts: str) -> Conversation:
    conversation = Conversation()
    for text in texts:
        conversation.add(item(said("user", text, f"id-{text}")))
    return conversation


def planned(session: Session = FIRST, fields: dict[str, Any] | None = None) -> ResponsePlan:
    return session.plan(fields, with_items("hi"), numbered())


def chat_request(**fields: Any) -> ChatRequest:
    """That of a chat body with these fields and the conversation of `with_items("hi")`."""
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(json.dumps(body).encode(), DEFAULT_LIMITS)


def as_told(request: ChatRequest, include_timings: bool = False) -> ChatRequest:
    """The request with what is always asked of a Realtime response."""
    return replace(request, delivery=Delivery(True, True, include_timings=include_timings))
