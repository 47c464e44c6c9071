"""The field `tool_choice` of a chat body -> `ToolChoice`, and the tools that it leaves to choose from.

What the choice means for the engine and for its text is not known here (`pipeline/tool_choice.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gateway.json_body import show
from pipeline.errors import InvalidRequest
from pipeline.values import ToolChoice

Tools = list[dict[str, Any]]

WORDS: Final = ("none", "auto", "required")
_NAME: Final = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_NAMED: Final = {
    "type": "object",
    "properties": {"type": {"enum": ["function"]}, "function": _NAME},
    "required": ["function"],
}
# The field's schema for the documentation: its forms are told apart by hand, so that errors name the place.
SCHEMA: Final[dict[str, Any]] = {
    "oneOf": [
        {"type": "string", "enum": list(WORDS)},
        _NAMED,
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["allowed_tools"]},
                "allowed_tools": {
                    "type": "object",
                    "properties": {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "minItems": 1, "items": _NAMED},
                    },
                    "required": ["mode", "tools"],
                },
            },
            "required": ["type", "allowed_tools"],
        },
    ],
    "examples": ["auto", {"type": "function", "function": {"name": "NAME"}}],
}


def to_tool_choice(
    choice: str | dict[str, Any] | None, tools: Tools | None
) -> tuple[ToolChoice, Tools | None]:
    """What the model may or must call, and the tools that it is told of. Raises `InvalidRequest`.

    Without the field: `auto` if there are tools. `allowed_tools` leaves those that it names.
    """
    if isinstance(choice, str) and choice not in WORDS:
        raise _bad("", f"must be 'none', 'auto', 'required' or a named tool, got {show(choice)}")
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidRequest("'tool_choice' needs 'tools'.", "tool_choice")
        return ToolChoice(), None
    if isinstance(choice, dict):
        return _from_object(choice, tools)
    return ToolChoice("auto" if choice is None else choice), tools  # type: ignore[arg-type]  # one of WORDS


def _from_object(choice: dict[str, Any], tools: Tools) -> tuple[ToolChoice, Tools]:
    kind = choice.get("type", "function")  # vLLM does not ask for it
    if kind == "function":
        return ToolChoice("named", _name(choice, "", tools)), tools
    if kind != "allowed_tools":
        raise _bad(".type", f"must be 'function' or 'allowed_tools', got {show(kind)}")
    place, allowed = ".allowed_tools", choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise _bad(place, f"must be an object, got {show(allowed)}")
    mode, listed = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise _bad(f"{place}.mode", f"must be 'auto' or 'required', got {show(mode)}")
    if not isinstance(listed, list) or not listed:
        raise _bad(f"{place}.tools", f"must be an array of at least one tool, got {show(listed)}")
    names = {_name(tool, f"{place}.tools[{index}]", tools) for index, tool in enumerate(listed)}
    return ToolChoice(mode), [tool for tool in tools if tool["function"]["name"] in names]


def _name(tool: Any, place: str, tools: Sequence[dict[str, Any]]) -> str:
    """The name in `{"function": {"name": …}}`; a tool of the request must have it."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise _bad(f"{place}.function", f"must be an object, got {show(function)}")
    name = function.get("name")
    if not isinstance(name, str):
        raise _bad(f"{place}.function.name", f"must be a string, got {show(name)}")
    if all(each["function"]["name"] != name for each in tools):
        raise _bad(f"{place}.function.name", f"must be the name of one of 'tools', got {show(name)}")
    return name


def _bad(place: str, problem: str) -> InvalidRequest:
    param = f"tool_choice{place}"
    return InvalidRequest(f"'{param}' {problem}.", param)
