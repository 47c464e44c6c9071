"""What the tests of Realtime values share: ids, items, and errors by the event's name for the field."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from gateway.realtime_items import Item, NewId, read_item
from gateway.sampling_fields import DEFAULT_LIMITS
from pipeline.errors import ClientError, InvalidRequest


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
