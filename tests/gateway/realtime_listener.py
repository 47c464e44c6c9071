"""Who listens to a Realtime connection in tests: keeps every event, held strictly against OpenAI's types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from openai import BaseModel
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

EVENT: Final[TypeAdapter[Any]] = TypeAdapter(RealtimeServerEvent)
# What we say beyond OpenAI's types, which take any field.
EXTENSIONS: Final = {"text_end", "timings", "reasoning_tokens"}


def check(text: str) -> dict[str, Any]:
    """The event, which must be one of OpenAI's: of the exact types, with no field that it does not have."""
    strange = set(_strange(EVENT.validate_json(text, strict=True))) - EXTENSIONS
    assert not strange, strange
    event: dict[str, Any] = json.loads(text)
    assert event.keys() >= {"type", "event_id"}
    return event


def _strange(value: Any) -> Iterator[str]:
    """Fields that OpenAI's types do not have."""
    if isinstance(value, list):
        for each in value:
            yield from _strange(each)
    elif isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for _, each in value:
            if each not in (value.model_extra or {}).values():
                yield from _strange(each)


class Listener:
    """An outlet that hears all. `closed`: it takes no more."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.closed = False

    def push(self, text: bytes) -> None:
        if not self.closed:
            self.events.append(check(text.decode()))

    @property
    def types(self) -> list[str]:
        """The types of all events, several deltas in a row as one."""
        types = [event["type"] for event in self.events]
        return [
            each
            for before, each in zip(["", *types], types, strict=False)
            if not each.endswith(".delta") or each != before
        ]

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        (event,) = self.all(kind)
        return event

    @property
    def response(self) -> dict[str, Any]:
        """The response of the one `response.done`, which is the last event."""
        assert self.events[-1]["type"] == "response.done"
        response: dict[str, Any] = self.one("response.done")["response"]
        return response

    def deltas(self, item_id: str) -> list[str]:
        """What was said of an item, piece by piece."""
        return [
            event["delta"]
            for event in self.events
            if event["type"].endswith(".delta") and event["item_id"] == item_id
        ]
