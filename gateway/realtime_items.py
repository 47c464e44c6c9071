"""The items of a Realtime conversation as values: reading and showing them, and the messages that they are in
a prompt. Their order and their bounds are in `gateway/realtime_conversation.py`.

An item knows its own chat message, made by the same code as a chat body's, so that a turn costs only its new
items and its prompt is that of a chat request with the same messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from gateway.chat_messages import MAX_ARGUMENT_VALUES, FunctionCall, Message, ToolCall, to_messages
from gateway.json_body import num_values, show
from gateway.realtime_content import ROLES, Part, chat_content, cut, num_bytes, read_parts
from gateway.realtime_schema import MAX_ITEM_ID_CHARS
from gateway.sampling_fields import DEFAULT_LIMITS, RequestLimits
from pipeline.control_characters import NUL
from pipeline.errors import InvalidRequest
from pipeline.values import Json, MediaRef

ItemKind = Literal["message", "function_call", "function_call_output"]
ItemStatus = Literal["completed", "incomplete", "in_progress"]
NewId = Callable[[str], str]  # a prefix, as "item" or "call" -> an id that no other has
ChatMessage = Mapping[str, Json]

ROOT: Final = "root"  # as a previous_item_id: the front
MAX_FUNCTION_NAME_CHARS: Final = 256
PART_BYTES: Final = 320  # that one of several parts takes beside its text, measured
_KINDS: Final = ("message", "function_call", "function_call_output")
_ID: Final = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_ITEM_ID_CHARS}}}")
_MESSAGE: Final = "messages[0]"  # how errors of `to_messages` name an item's one message


@dataclass(frozen=True, slots=True)
class Item:
    """One item. `message`: what it is in a prompt; None: nothing, for it is empty or was never finished."""

    id: str
    kind: ItemKind
    status: ItemStatus = "completed"
    role: str = ""
    content: tuple[Part, ...] = ()
    name: str = ""
    call_id: str = ""
    arguments: str = ""  # JSON
    output: str = ""
    message: ChatMessage | None = field(default=None, compare=False, repr=False)
    num_bytes: int = field(default=0, compare=False)  # of its texts and data
    num_values: int = field(default=0, compare=False)  # in its arguments, at most

    def wire(self, with_media: bool = False) -> dict[str, Json]:
        """The item as events show it. `with_media`: with the data of images and sounds."""
        shown: dict[str, Json] = {
            "id": self.id,
            "object": "realtime.item",
            "type": self.kind,
            "status": self.status,
        }
        if self.kind == "message":
            content = [part.wire(with_media) for part in self.content]
            return {**shown, "role": self.role, "content": content}
        if self.kind == "function_call":
            return {**shown, "name": self.name, "call_id": self.call_id, "arguments": self.arguments}
        return {**shown, "call_id": self.call_id, "output": self.output}

    @property
    def text(self) -> str:
        """All text of a message."""
        return "".join(part.text for part in self.content)


def read_item(data: Mapping[str, Json], limits: RequestLimits, new_id: NewId, param: str = "item") -> Item:
    """The item that a client sends; it gets an id if it has none. Raises `InvalidRequest`."""
    kind = _one_of(data.get("type", "message"), _KINDS, f"{param}.type")
    item_id = _id(data.get("id"), f"{param}.id") or new_id("item")
    if kind == "message":
        role = _one_of(data.get("role"), ROLES, f"{param}.role")
        content = read_parts(data.get("content"), role, f"{param}.content")
        item = Item(item_id, "message", role=role, content=content)
    elif kind == "function_call":
        name = _text(data, "name", param)
        if not 1 <= len(name) <= MAX_FUNCTION_NAME_CHARS:
            raise InvalidRequest(
                f"'{param}.name' must have 1 to {MAX_FUNCTION_NAME_CHARS} characters, got {len(name)}.",
                f"{param}.name",
            )
        call_id = _id(data.get("call_id"), f"{param}.call_id") or new_id("call")
        item = Item(
            item_id, "function_call", name=name, call_id=call_id, arguments=_text(data, "arguments", param)
        )
    else:
        call_id = _id(data.get("call_id"), f"{param}.call_id", is_needed=True)
        item = Item(item_id, "function_call_output", call_id=call_id, output=_text(data, "output", param))
    return _with_message(item, limits.max_depth, param)


def answer_item(fields: Mapping[str, Json]) -> Item:
    """The item of a response, from how its events show it. Never refused, for the model wrote it.

    A call whose arguments a chat request could not have (too deep, too many values) is in no prompt. NUL is
    left out of texts: with it in a prompt, every turn from here on would be refused.
    """
    kind = fields["type"]
    if kind == "function_call":
        names = ("name", "call_id", "arguments")
        item = Item(fields["id"], kind, fields["status"], **{name: fields[name] for name in names})
    else:
        texts = [part["text"].replace(NUL, "") for part in fields["content"]]
        parts = tuple(Part("output_text", text) for text in texts)
        item = Item(fields["id"], "message", fields["status"], "assistant", parts)
    try:
        return _with_message(item, DEFAULT_LIMITS.max_depth, "item")
    except InvalidRequest:
        return item


def heard(item: Item, content_index: int, text_end: int) -> Item:
    """The assistant's message with the first characters of one part as its last; later parts are gone."""
    content = cut(item.content, content_index, text_end)
    return _with_message(replace(item, content=content, status="incomplete"), 0, "item")


def _with_message(item: Item, max_depth: int, param: str) -> Item:
    """The item with all that is worked out from it. Raises `InvalidRequest`."""
    size = sum(map(num_bytes, (item.name, item.call_id, item.arguments, item.output)))
    size += sum(part.num_bytes for part in item.content)
    if len(item.content) > 1:  # else the message has its plain text
        size += PART_BYTES * len(item.content)
    values = num_values((item.arguments,), MAX_ARGUMENT_VALUES) if item.arguments else 0
    message = _message(item, max_depth, param) if _is_said(item) else None
    return replace(item, message=message, num_bytes=size, num_values=values)


def _is_said(item: Item) -> bool:
    """Whether a prompt holds it: not what is still written, a call that never was whole, or silence."""
    if item.status == "in_progress":
        return False
    if item.kind == "function_call":
        return item.status == "completed"
    return item.role != "assistant" or any(part.text for part in item.content)


def _message(item: Item, max_depth: int, param: str) -> ChatMessage:
    if item.kind == "message":
        message = Message(role=item.role, content=chat_content(item.content))
    elif item.kind == "function_call":
        function = FunctionCall(name=item.name, arguments=item.arguments)
        message = Message(role="assistant", tool_calls=[ToolCall(id=item.call_id, function=function)])
    else:
        message = Message(role="tool", content=item.output, tool_call_id=item.call_id)
    try:
        made = to_messages([message], max_depth)[0]
    except InvalidRequest as error:
        raise of_item(error, item, param) from None
    content = made["content"]
    if isinstance(content, list):
        parts = [_with_place(part, f"{_place(item)}.content[{index}]") for index, part in enumerate(content)]
        return {**made, "content": parts}
    return made


def _place(item: Item) -> str:
    """How errors name an item's media."""
    return f"items[{item.id}]"


def of_item(error: InvalidRequest, item: Item, param: str) -> InvalidRequest:
    """An error of a request whose one message is that of an item, in the item's words."""
    place = (error.param or "").removeprefix(_MESSAGE).removeprefix(_place(item))
    if place.startswith(".tool_calls") or place == "messages":
        place = ".arguments" if item.kind == "function_call" else ""
    message = str(error).replace(error.param or "messages", f"{param}{place}", 1)
    return InvalidRequest(message, f"{param}{place}", error.code)


def _with_place(part: dict[str, Json], place: str) -> dict[str, Json]:
    """A part whose medium is named as part of its item: it is loaded long after the item was read."""
    media = part.get("media")
    return {**part, "media": replace(media, path=place)} if isinstance(media, MediaRef) else part


def messages(items: Iterable[Item], instructions: str = "") -> tuple[ChatMessage, ...]:
    """The chat messages of a prompt with these items, instructions as a first system message.

    Calls join the assistant's message that is right before them. Raises `InvalidRequest` where a chat request
    with them would be refused as a whole.
    """
    out: list[ChatMessage] = [{"role": "system", "content": instructions}] if instructions else []
    num_call_values = 0
    calls: list[Json] | None = None  # of the last message in `out`, if calls may join it
    for item in items:
        if item.message is None:
            continue
        if item.kind != "function_call":
            calls = [] if item.role == "assistant" else None
            out.append(item.message)
            continue
        num_call_values += item.num_values
        if calls is None:
            calls = []
            out.append({"role": "assistant", "content": None, "tool_calls": calls})
        elif not calls:
            out[-1] = {**out[-1], "tool_calls": calls}
        calls += item.message["tool_calls"]
    if num_call_values > MAX_ARGUMENT_VALUES:
        raise InvalidRequest(
            f"The arguments of function calls have {num_call_values} values in their arrays and objects; "
            f"the limit is {MAX_ARGUMENT_VALUES}.",
            "response",
        )
    return tuple(out)


def _one_of(value: Json, allowed: Sequence[str], param: str) -> Any:
    if value not in allowed:
        raise InvalidRequest(f"'{param}' must be one of {', '.join(allowed)}; got {show(value)}.", param)
    return value


def _id(value: Json, param: str, is_needed: bool = False) -> str:
    """A client's id; "" if there is none."""
    if value is None and not is_needed:
        return ""
    if not isinstance(value, str) or not _ID.fullmatch(value) or value == ROOT:
        raise InvalidRequest(
            f"'{param}' must be 1 to {MAX_ITEM_ID_CHARS} characters of A-Z, a-z, 0-9, _ . : - and not "
            f"{ROOT!r}, got {show(value)}.",
            param,
        )
    return value


def _text(data: Mapping[str, Json], name: str, param: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"'{param}.{name}' must be a string, got {show(value)}.", f"{param}.{name}")
    return value
