"""The messages and tools of a chat body -> plain dicts, checked, for `pipeline.conversation`.

The dicts have the keys, in the order, that vLLM 0.32 hands to its templates (`renderers/chat_utils.py`), so
that templates which print a whole object (`tool | tojson`) give the same text. What joins content parts for
a template that wants plain strings is rendering's business.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.json_body import check_depth, num_values, show
from gateway.media_parts import MEDIA_PARTS, OTHER_MEDIA_PARTS, media_part
from pipeline.errors import InvalidRequest

MAX_ROLE_CHARS: Final = 64
MAX_ARGUMENT_VALUES: Final = 131_072  # in all tool calls of a chat: 0.1 s to decode and to print
# Kinds of part that are text, and the key that holds it.
TEXT_PARTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# Fields of a message that are known and not served, and what to use instead.
UNSUPPORTED: Final = {
    "audio": "",
    "function_call": "; use 'tool_calls'",
    "task": "",
    "tools": "; use the request's 'tools'",
}


class FunctionCall(msgspec.Struct, kw_only=True):
    """A call that the assistant made. `arguments` is JSON in a string."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """One of the assistant's tool calls."""

    id: str | None = None
    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})] = "function"
    function: FunctionCall


class Message(msgspec.Struct, kw_only=True):
    """One turn of the chat."""

    role: Annotated[
        str, Meta(min_length=1, max_length=MAX_ROLE_CHARS, examples=["system", "user", "assistant"])
    ]
    content: Annotated[
        str | list[str | dict[str, Any]] | None,
        Meta(
            description="Text, or a list of parts: `text`, and where the model takes them `image_url`, "
            "`input_image`, `input_audio` and `audio_url`. Only the assistant's may be null.",
            examples=[
                "What is this?",
                [
                    {"type": "text", "text": "What is this?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}},
                ],
            ],
        ),
    ] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: Annotated[
        str | None, Meta(description="The assistant's reasoning, for templates that show it.")
    ] = None
    reasoning_content: Annotated[str | None, Meta(description="An older name of reasoning.")] = None
    audio: Any = None
    function_call: Any = None
    task: Any = None
    tools: Any = None


class Function(msgspec.Struct, kw_only=True):
    """What a tool is called and takes."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="A JSON schema.")] = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may be told of."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})] = "function"
    function: Function
    defer_loading: bool | None = None


def to_messages(messages: list[Message], max_depth: int) -> tuple[dict[str, Any], ...]:
    """The template's messages. Raises `InvalidRequest`."""
    if not messages:
        raise InvalidRequest("'messages' must not be empty.", "messages")
    _check_num_values(messages)
    return tuple(
        [
            {"role": message.role, "content": message.content}
            if _is_plain(message)
            else _to_message(message, f"messages[{index}]", max_depth)
            for index, message in enumerate(messages)
        ]
    )


def _is_plain(message: Message) -> bool:
    """Whether it is a role and a text, as most are: 0.2 us to see it, 0.7 us saved."""
    return (
        type(message.content) is str
        and message.tool_calls is None
        and message.name is None
        and message.tool_call_id is None
        and message.reasoning is None
        and message.reasoning_content is None
        and message.audio is None
        and message.function_call is None
        and message.task is None
        and message.tools is None
    )


def _check_num_values(messages: list[Message]) -> None:
    """JSON in strings is decoded on the event loop, and printed there by templates."""
    calls = (call for message in messages for call in message.tool_calls or ())
    texts = [call.function.arguments for call in calls if isinstance(call.function.arguments, str)]
    number = num_values(texts, MAX_ARGUMENT_VALUES)
    if number > MAX_ARGUMENT_VALUES:
        raise InvalidRequest(
            f"The arguments of tool calls have {number} values in their arrays and objects; "
            f"the limit is {MAX_ARGUMENT_VALUES}.",
            "messages",
        )


def _to_message(message: Message, param: str, max_depth: int) -> dict[str, Any]:
    _refuse_unsupported(message, param)
    out: dict[str, Any] = {"role": message.role, "content": _content(message, param)}
    if message.role == "assistant":
        _add_assistant_fields(out, message, param, max_depth)
    if message.role == "tool" and message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def _refuse_unsupported(message: Message, param: str) -> None:
    for name, hint in UNSUPPORTED.items():
        if getattr(message, name) is not None:
            raise InvalidRequest(
                f"'{param}.{name}' is not supported by this server{hint}.",
                f"{param}.{name}",
                "unsupported_field",
            )


def _add_assistant_fields(out: dict[str, Any], message: Message, param: str, max_depth: int) -> None:
    if message.tool_calls:
        out["tool_calls"] = [
            _to_tool_call(call, f"{param}.tool_calls[{index}]", max_depth)
            for index, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        out["reasoning"] = reasoning


def _content(message: Message, param: str) -> str | list[dict[str, Any]] | None:
    content = message.content
    if isinstance(content, list):
        takes_media = message.role != "tool"  # every template takes a tool's result as one text
        return [
            _to_part(part, f"{param}.content[{index}]", takes_media) for index, part in enumerate(content)
        ]
    if content is None and message.role != "assistant":
        raise InvalidRequest(f"'{param}.content' must be a string or an array, got null.", f"{param}.content")
    return content


def _to_part(part: str | dict[str, Any], param: str, takes_media: bool) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type")
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        if isinstance(kind, str) and kind in MEDIA_PARTS and takes_media:
            return media_part(kind, part, param)
        raise _bad_part(kind, param)
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequest(f"'{param}.{key}' must be a string, got {show(text)}.", f"{param}.{key}")
    return {"type": "text", "text": text}


def _bad_part(kind: object, param: str) -> InvalidRequest:
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        return InvalidRequest(
            f"'{param}' is of type {show(kind)}, but a message of the role 'tool' takes text only.", param
        )
    if isinstance(kind, str) and kind in OTHER_MEDIA_PARTS:
        return InvalidRequest(
            f"'{param}' is of type {show(kind)}, which this server does not take.", param, "unsupported_field"
        )
    allowed = ", ".join((*TEXT_PARTS, *MEDIA_PARTS))
    return InvalidRequest(f"'{param}.type' must be one of {allowed}; got {show(kind)}.", f"{param}.type")


def _to_tool_call(call: ToolCall, param: str, max_depth: int) -> dict[str, Any]:
    if call.type != "function":
        raise InvalidRequest(f"'{param}.type' must be 'function', got {show(call.type)}.", f"{param}.type")
    _check_arguments(call.function.arguments, max_depth, f"{param}.function.arguments")
    return {
        "id": call.id,
        "function": {"arguments": call.function.arguments, "name": call.function.name},
        "type": "function",
    }


def _check_arguments(arguments: str | dict[str, Any] | None, max_depth: int, param: str) -> None:
    """Refuse what nests too deeply, as JSON in a string too: templates get it decoded.

    What is no JSON passes. A model wrote it, and refusing it would refuse every later turn of that chat.
    """
    value: object = arguments
    if isinstance(arguments, str):
        if arguments.count("{") + arguments.count("[") <= max_depth:
            return
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return
    check_depth(value, max_depth, param)


def to_tools(tools: list[Tool] | None, max_depth: int, max_tools: int) -> list[dict[str, Any]] | None:
    """The template's tools. Raises `InvalidRequest`."""
    if tools is None:
        return None
    if not tools:
        raise InvalidRequest(
            "'tools' must not be an empty array. Give at least one tool, or leave it out.", "tools"
        )
    if len(tools) > max_tools:
        raise InvalidRequest(f"'tools' has {len(tools)} entries; the limit is {max_tools}.", "tools")
    return [_to_tool(tool, f"tools[{index}]", max_depth) for index, tool in enumerate(tools)]


def _to_tool(tool: Tool, param: str, max_depth: int) -> dict[str, Any]:
    if tool.type != "function":
        raise InvalidRequest(f"'{param}.type' must be 'function', got {show(tool.type)}.", f"{param}.type")
    function = tool.function
    check_depth(function.parameters, max_depth, f"{param}.function.parameters")
    described: dict[str, Any] = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    defer_loading = function.defer_loading if function.defer_loading is not None else tool.defer_loading
    if function.strict is not None:
        described["strict"] = function.strict
    if defer_loading is not None:
        described["defer_loading"] = defer_loading
    out = {"type": "function", "function": described}
    return out if tool.defer_loading is None else {**out, "defer_loading": tool.defer_loading}
