"""The settings of a Realtime session, and what a response is to be made of. Values: nothing is sent here.

What the fields are called: `gateway/realtime_dialect.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec

from gateway.json_body import show
from gateway.media_parts import PCM_RATE
from gateway.realtime_conversation import Conversation
from gateway.realtime_dialect import TIMINGS, Given, Settings, chat_request, read_fields
from gateway.realtime_items import Item, NewId, messages, read_item
from gateway.sampling_fields import RequestLimits
from pipeline.errors import InvalidRequest
from pipeline.speech import Speech
from pipeline.values import ChatRequest, Delivery, Json

# Reading as many tools takes 50 ms, and a response.create of 90 bytes can ask for it again.
MAX_SETTINGS_BYTES: Final = 256 << 10
MAX_METADATA: Final = 16
MAX_METADATA_KEY_CHARS: Final = 64
MAX_METADATA_VALUE_CHARS: Final = 512
# What a session says of settings that nobody has set.
_UNSET: Final[dict[str, Json]] = {
    "instructions": "",
    "tools": [],
    "tool_choice": "auto",
    "max_output_tokens": "inf",
    "truncation": None,
    "speech": "token",
    "include": None,
}
_AUDIO: Final = {"input": {"format": {"type": "audio/pcm", "rate": PCM_RATE}, "turn_detection": None}}
# Settings that do not change what the engine is asked for.
_APART: Final = frozenset(("instructions", "output_modalities", "speech", "include"))


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """What a response is to be made of. `metadata` is the client's, for the response object."""

    request: ChatRequest
    in_conversation: bool
    metadata: dict[str, str] | None
    speech: Speech
    wants_timings: bool
    max_output_tokens: int | Literal["inf"]


@dataclass(frozen=True, slots=True)
class Session:
    """The settings in force. `base`: the chat request that they make, with no message of the conversation."""

    id: str
    model: str
    limits: RequestLimits
    settings: Settings
    base: ChatRequest
    expires_at: int | None = None  # Unix time in s; a response that runs then still ends

    @classmethod
    def first(
        cls, session_id: str, model: str, limits: RequestLimits, expires_at: int | None = None
    ) -> Session:
        """The session of a connection that has just opened. Raises `InvalidRequest` for an empty model."""
        base = chat_request({}, Given("session", {}, {}), model, limits)
        return cls(session_id, model, limits, {}, base, expires_at)

    def update(self, fields: Mapping[str, Json]) -> Session:
        """The session with these settings; null resets one. Raises `InvalidRequest` and changes nothing."""
        model = fields.get("model")
        if model is not None and model != self.model:
            raise InvalidRequest(
                f"'session.model' cannot be changed: it is {show(self.model)}, got {show(model)}.",
                "session.model",
            )
        given = read_fields(fields, "session")
        settings = _merged(self.settings, given.settings)
        _check_size(settings)
        base = chat_request(settings, given, self.model, self.limits)
        return replace(self, settings=settings, base=base)

    def wire(self) -> dict[str, Json]:
        """The session object of `session.created` and `session.updated`."""
        shown = {
            "type": "realtime",
            "object": "realtime.session",
            "id": self.id,
            "model": self.model,
            "output_modalities": ["text"],
            "audio": _AUDIO,
            **_UNSET,
            **self.settings,
        }
        return shown if self.expires_at is None else {**shown, "expires_at": self.expires_at}

    def plan(
        self, fields: Mapping[str, Json] | None, conversation: Conversation, new_id: NewId
    ) -> ResponsePlan:
        """The response that a `response.create` asks for; what it does not name is the session's.

        Raises `InvalidRequest`, `ItemNotFound` for an item in its input, or `ConversationTooLarge`.
        """
        fields = fields or {}
        given = read_fields({name: value for name, value in fields.items() if value is not None}, "response")
        settings = _merged(self.settings, given.settings)
        base = self.base
        if not given.settings.keys() <= _APART:
            base = chat_request(settings, given, self.model, self.limits)
        in_conversation = _in_conversation(fields.get("conversation"))
        metadata = _metadata(fields.get("metadata"))
        items = self._items(fields.get("input"), conversation, new_id)
        prompt = messages(items, settings.get("instructions", ""))
        if not prompt and base.template is None:
            raise InvalidRequest("There is nothing to answer: neither items nor instructions.", "response")
        wants_timings = TIMINGS in settings.get("include", ())
        delivery = Delivery(True, True, include_timings=wants_timings, escape=base.delivery.escape)
        return ResponsePlan(
            request=replace(base, messages=prompt, delivery=delivery),
            in_conversation=in_conversation,
            metadata=metadata,
            speech=settings.get("speech", "token"),
            wants_timings=wants_timings,
            max_output_tokens=base.generation.max_tokens or "inf",
        )

    def _items(self, given: Json, conversation: Conversation, new_id: NewId) -> Sequence[Item] | Conversation:
        """The items of the prompt: the input's, if there is one, in the place of the conversation's."""
        if given is None:
            return conversation
        if not isinstance(given, list) or len(given) > conversation.max_items:
            raise InvalidRequest(
                f"'response.input' must be an array of at most {conversation.max_items} items, "
                f"got {show(given)}.",
                "response.input",
            )
        items = [
            self._item(data, f"response.input[{index}]", conversation, new_id)
            for index, data in enumerate(given)
        ]
        conversation.check_size(items)  # a few bytes may refer to megabytes
        return items

    def _item(self, data: Any, param: str, conversation: Conversation, new_id: NewId) -> Item:
        if not isinstance(data, dict):
            raise InvalidRequest(f"'{param}' must be an object, got {show(data, is_text=True)}.", param)
        if data.get("type") != "item_reference" and data.keys() != {"id"}:
            return read_item(data, self.limits, new_id, param)
        item_id = data.get("id")
        if not isinstance(item_id, str):
            raise InvalidRequest(f"'{param}.id' must be a string, got {show(item_id)}.", f"{param}.id")
        return conversation.get(item_id, "reference", f"{param}.id")


def of_session(error: InvalidRequest) -> InvalidRequest:
    """An error of a request with a session's settings, whose one message are its instructions."""
    param = error.param or ""
    name = "session.instructions" if param.startswith("messages") else f"session.{param}".rstrip(".")
    message = str(error).replace(param, name, 1) if param.startswith("messages") else str(error)
    return InvalidRequest(message, name, error.code)


def _merged(settings: Settings, given: Settings) -> dict[str, Json]:
    """The settings with those that are given in their place; null resets one."""
    merged = {name: value for name, value in {**settings, **given}.items() if value is not None}
    if "tools" in given and not given["tools"] and given.get("tool_choice") is None:
        merged.pop("tool_choice", None)  # it was about tools that are gone
    return merged


def _check_size(settings: Settings) -> None:
    """Of what is read again for a response that has settings of its own."""
    size = len(msgspec.json.encode({name: value for name, value in settings.items() if name not in _APART}))
    if size > MAX_SETTINGS_BYTES:
        raise InvalidRequest(
            f"The session's settings, without its instructions, have {size} bytes; the limit is "
            f"{MAX_SETTINGS_BYTES}. What is larger goes with each response.",
            "session",
        )


def _in_conversation(value: Json) -> bool:
    param = "response.conversation"
    if value not in (None, "auto", "none"):
        raise InvalidRequest(f"'{param}' must be one of auto, none; got {show(value)}.", param)
    return bool(value != "none")


def _metadata(value: Json) -> dict[str, str] | None:
    param = "response.metadata"
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise InvalidRequest(
            f"'{param}' must be an object of at most {MAX_METADATA} keys, got {show(value)}.", param
        )
    for key, text in value.items():
        if len(key) > MAX_METADATA_KEY_CHARS:
            raise InvalidRequest(
                f"A key of '{param}' must have at most {MAX_METADATA_KEY_CHARS} characters, got {len(key)}.",
                param,
            )
        if not isinstance(text, str) or len(text) > MAX_METADATA_VALUE_CHARS:
            raise InvalidRequest(
                f"'{param}.{key}' must be a string of at most {MAX_METADATA_VALUE_CHARS} characters, "
                f"got {show(text, is_text=True)}.",
                f"{param}.{key}",
            )
    return value
