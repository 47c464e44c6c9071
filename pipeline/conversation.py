"""A chat's messages (`values.ChatRequest`) -> those that its template is written for, as vLLM prepares them.

Content becomes what the template takes, tool arguments become objects, a missing content is empty. Nothing
here renders, and no text is changed. Nothing is checked but that the template takes what is no text: all else
is the schema's business (`gateway/`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, Final

from pipeline.content_format import ContentFormat
from pipeline.errors import InvalidRequest
from pipeline.leaves import nests_deeper
from pipeline.media_errors import PLURALS
from pipeline.values import Json

_PLAIN_ROLES: Final = ("user", "assistant", "system")
_MAX_ARGUMENTS_DEPTH: Final = 64  # the schema's: it refuses what it can decode and what is deeper
PART_SEPARATOR: Final = "\n"  # between text parts, where a template takes strings only (vLLM's choice)


def conversation(
    messages: Sequence[Mapping[str, Json]],
    content_format: ContentFormat,
    knows_developer: bool,
    arguments_as_text: bool = False,
) -> list[dict[str, Any]]:
    """The messages for a template.

    `arguments_as_text`: the template joins tool arguments to text (DeepSeek-V3's does), so they stay JSON in
    a string. Raises `InvalidRequest` for an image or a sound where the template takes texts alone.
    """
    arguments = _arguments_text if arguments_as_text else _arguments
    takes_text = content_format.takes_strings or not content_format.takes_parts
    return [
        {"role": message["role"], "content": message["content"]}
        if takes_text and _is_plain(message)
        else _message(message, content_format, knows_developer, arguments)
        for message in messages
    ]


def with_arguments_read(messages: Sequence[Mapping[str, Json]]) -> Sequence[Mapping[str, Json]]:
    """The messages with tool arguments as objects where escapes in their JSON may hide characters.

    Whoever looks for something in a request's texts then finds what the template will see. The same messages
    if there is nothing to read.
    """
    if not any("tool_calls" in message for message in messages):
        return messages
    read = list(map(_with_arguments_read, messages))
    return messages if all(map(is_, read, messages)) else read


def _with_arguments_read(message: Mapping[str, Json]) -> Mapping[str, Json]:
    calls = message.get("tool_calls") or ()
    read = list(map(_read_call, calls))
    return message if all(map(is_, read, calls)) else {**message, "tool_calls": read}


def _read_call(call: Mapping[str, Json]) -> Mapping[str, Json]:
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str) or "\\" not in arguments:
        return call
    read = decoded_arguments(arguments)
    # Of what is no object the template sees nothing.
    return (
        {**call, "function": {**call["function"], "arguments": read}} if isinstance(read, Mapping) else call
    )


def _is_plain(message: Mapping[str, Json]) -> bool:
    """Whether a message is a role and a text, as most are, which stay as they are: 0.2 us instead of 0.6."""
    return (
        len(message) == 2 and isinstance(message.get("content"), str) and message.get("role") in _PLAIN_ROLES
    )


def _message(
    message: Mapping[str, Json],
    content_format: ContentFormat,
    knows_developer: bool,
    arguments: Callable[[Json], Json],
) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    prepared: dict[str, Any] = {"role": role if knows_developer or role != "developer" else "system"}
    prepared["content"] = _content(content, role, content_format)
    if role == "assistant":
        _add_assistant_fields(prepared, message, arguments)
        if content_format.keeps_null and content is None and "tool_calls" in prepared:
            prepared["content"] = None
    if role == "tool" and "tool_call_id" in message:
        prepared["tool_call_id"] = message["tool_call_id"]
    if "name" in message:
        prepared["name"] = message["name"]
    return prepared


def _content(
    content: str | Sequence[Mapping[str, Json]] | None, role: str, content_format: ContentFormat
) -> str | list[dict[str, str]]:
    parts = [{"text": content}] if isinstance(content, str) else content or ()
    if role == "tool" or not content_format.takes_parts:
        return PART_SEPARATOR.join(map(_only_text, parts))
    if content_format.takes_strings and not isinstance(content, list):
        return "".join(part["text"] for part in parts)
    return list(map(_part, parts))


def _only_text(part: Mapping[str, Json]) -> str:
    if "media" in part:
        media = part["media"]
        raise InvalidRequest(
            f"'{media.path}': the model's chat template has no place for {PLURALS[media.kind]} here.",
            media.path,
        )
    text: str = part["text"]
    return text


def _part(part: Mapping[str, Json]) -> dict[str, str]:
    """The template writes a placeholder for what is no text, and sees nothing of it."""
    if "media" in part:
        return {"type": part["media"].kind}
    return {"type": "text", "text": part["text"]}


def _add_assistant_fields(
    prepared: dict[str, Any], message: Mapping[str, Json], arguments: Callable[[Json], Json]
) -> None:
    """Tool calls, and reasoning under both of its names, since templates differ."""
    if "reasoning" in message:
        prepared["reasoning"] = prepared["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        prepared["tool_calls"] = [_tool_call(call, arguments) for call in message["tool_calls"]]


def _tool_call(call: Mapping[str, Json], arguments: Callable[[Json], Json]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": arguments(function.get("arguments"))}}


def _arguments(arguments: Json) -> Mapping[str, Json]:
    """Templates need an object. What is none, since a model wrote it, becomes an empty one."""
    if isinstance(arguments, str):
        arguments = decoded_arguments(arguments)
    return arguments if isinstance(arguments, Mapping) else {}


def decoded_arguments(arguments: str) -> Json:
    """A tool call's arguments as JSON; None for what is none, or too deep to walk over."""
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return None if nests_deeper(decoded, _MAX_ARGUMENTS_DEPTH) else decoded


def _arguments_text(arguments: Json) -> str:
    """A string as the client sent it; an object as JSON; what is neither as an empty object."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments if isinstance(arguments, Mapping) else {}, ensure_ascii=False)
