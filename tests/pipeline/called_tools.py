"""Tools with parameters that are hard to put into one schema, and calls of them, good and bad."""

from __future__ import annotations

from typing import Any

from pipeline.values import ChatRequest, ToolChoice
from tests.pipeline.requests import chat

REQUIRED = ToolChoice("required")
TREE: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.com/tree",
    "type": "object",
    "properties": {
        "value": {"$ref": "#/$defs/value"},
        "children": {"type": "array", "items": {"$ref": "#"}},
        "$ref": {"type": "string"},
        "enum": {"anyOf": [{"$ref": "#/definitions/short"}, {"type": "null"}]},
    },
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"value": {"type": "integer"}},
    "definitions": {"short": {"enum": ["#/a", {"$ref": "#/a"}]}},
}
WORDS: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"$ref": "#/$defs/value"}},
    "required": ["word"],
    "additionalProperties": False,
    "$defs": {"value": {"type": "string"}},
}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": None, "parameters": parameters}}


def request(choice: ToolChoice, *tools: dict[str, Any], **fields: Any) -> ChatRequest:
    return chat(tools=list(tools), tool_choice=choice, **fields)


TOOLS = (tool("tree", TREE), tool("words", WORDS), tool("now"))


# What is an array of calls of TOOLS, and what is none.
GOOD: list[Any] = [
    [{"name": "tree", "parameters": {"value": 1}}],
    [{"name": "tree", "parameters": {"value": 1, "children": [{"value": 2, "children": []}]}}],
    [{"name": "tree", "parameters": {"value": 1, "$ref": "x", "enum": "#/a"}}],
    [{"name": "tree", "parameters": {"value": 1, "enum": {"$ref": "#/a"}}}],
    [{"name": "words", "parameters": {"word": "x"}}],
    [{"name": "now", "parameters": {}}],
]
EXTRA: list[Any] = [{"name": "now", "parameters": {}, "more": 1}]
BAD: list[Any] = [
    [],
    {"name": "now", "parameters": {}},
    [{"name": "later", "parameters": {}}],
    [{"name": "now"}],
    [{"parameters": {}}],
    EXTRA,
    [{"name": "now", "parameters": []}],
    [{"name": "words", "parameters": {"word": 1}}],  # with the other tool's definition of the same name
    [{"name": "words", "parameters": {"value": 1}}],
    [{"name": "tree", "parameters": {"value": "x"}}],
    [{"name": "tree", "parameters": {"value": 1, "children": [{"value": "x"}]}}],
    [{"name": "tree", "parameters": {"value": 1, "children": [[]]}}],
    [{"name": "tree", "parameters": {"value": 1, "enum": "#/b"}}],
]
