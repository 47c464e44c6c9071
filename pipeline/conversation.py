"""A client's messages -> the messages that chat templates are written for, as vLLM prepares them.

Content becomes what the template takes, tool arguments become objects, a missing content is empty. Nothing
here renders, and no text is changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from pipeline.content_format import ContentFormat
from pipeline.errors import InvalidRequest
from pipeline.values import Json

# Part type -> where its text is.
_TEXT_PARTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_PLAIN_ROLES: Final = ("user", "assistant", "system")
PART_SEPARATOR: Final = "\n"  # between text parts, where a template takes strings only (vLLM's choice)


def conversation(
    messages: Sequence[Mapping[str, Json]],
    content_format: ContentFormat,
    knows_developer: bool,
    arguments_as_text: bool = False,
) -> list[dict[str, Any]]:
    """The messages for a template. Raises `InvalidRequest` naming the message for a content it can't take.

    `arguments_as_text`: the template joins tool arguments to text (DeepSeek-V3's does), so they stay JSON in
    a string.
    """
    arguments = _arguments_text if arguments_as_text else _arguments
    takes_text = content_format.takes_strings or not content_format.takes_parts
    return [
        {"role": message["role"], "content": message["content"]}
        if takes_text and _is_plain(message)
        else _message(message, f"messages[{index}]", content_format, knows_developer, arguments)
        for index, message in enumerate(messages)
    ]


def _is_plain(message: Mapping[str, Json]) -> bool:
    """Whether a message is a role and a text, as most are, which stay as they are: 0.2 us instead of 0.6."""
    return (
        len(message) == 2 and isinstance(message.get("content"), str) and message.get("role") in _PLAIN_ROLES
    )


def text_parts(content: Json, path: str) -> list[str]:
    """The texts of a message's content, in order. Raises `InvalidRequest` for a part that is not text."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequest(f"{path} must be a string or a list of parts, not {_kind(content)}.", path)
    return list(_texts(content, path))


def _texts(parts: list[Json], path: str) -> Iterator[str]:
    for index, part in enumerate(parts):
        where = f"{path}[{index}]"
        if isinstance(part, str):
            yield part
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            shown = repr(kind[:40]) if isinstance(kind, str) else _kind(kind)
            raise InvalidRequest(
                f"{where}.type is {shown}; this model takes {', '.join(sorted(_TEXT_PARTS))}.",
                f"{where}.type",
            )
        text = part.get(_TEXT_PARTS[kind])
        if text is None:
            continue
        if not isinstance(text, str):
            field = f"{where}.{_TEXT_PARTS[kind]}"
            raise InvalidRequest(f"{field} must be a string, not {_kind(text)}.", field)
        yield text


def _message(
    message: Mapping[str, Json],
    path: str,
    content_format: ContentFormat,
    knows_developer: bool,
    arguments: Callable[[Json], Json],
) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{path}.role must be a string, not {_kind(role)}.", f"{path}.role")
    prepared: dict[str, Any] = {"role": role if knows_developer or role != "developer" else "system"}
    prepared["content"] = _content(message.get("content"), f"{path}.content", role, content_format)
    if role == "assistant":
        _add_assistant_fields(prepared, message, path, arguments)
        if content_format.keeps_null and message.get("content") is None and "tool_calls" in prepared:
            prepared["content"] = None
    if role == "tool" and "tool_call_id" in message:
        prepared["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        prepared["name"] = message["name"]
    return prepared


def _content(
    content: Json, path: str, role: str, content_format: ContentFormat
) -> str | list[dict[str, str]]:
    texts = text_parts(content, path)
    if role == "tool" or not content_format.takes_parts:
        return PART_SEPARATOR.join(texts)
    if content_format.takes_strings and not isinstance(content, list):
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _add_assistant_fields(
    prepared: dict[str, Any], message: Mapping[str, Json], path: str, arguments: Callable[[Json], Json]
) -> None:
    """Tool calls, and reasoning under both of its names, since templates differ."""
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    if reasoning is not None:
        prepared["reasoning"] = prepared["reasoning_content"] = reasoning
    tool_calls = message.get("tool_calls")
    if tool_calls is None or tool_calls == []:
        return
    where = f"{path}.tool_calls"
    if not isinstance(tool_calls, list):
        raise InvalidRequest(f"{where} must be a list, not {_kind(tool_calls)}.", where)
    prepared["tool_calls"] = [
        _tool_call(call, f"{where}[{i}]", arguments) for i, call in enumerate(tool_calls)
    ]


def _tool_call(call: Json, path: str, arguments: Callable[[Json], Json]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise InvalidRequest(f"{path} must be a tool call of type 'function'.", path)
    return {**call, "function": {**function, "arguments": arguments(function.get("arguments"))}}


def _arguments(arguments: Json) -> Mapping[str, Json]:
    """Templates need an object. What is none, since a model wrote it, becomes an empty one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, Mapping) else {}


def _arguments_text(arguments: Json) -> str:
    """A string as the client sent it; an object as JSON; what is neither as an empty object."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments if isinstance(arguments, Mapping) else {}, ensure_ascii=False)


def _kind(value: Json) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
