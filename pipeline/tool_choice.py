"""What a chat's `tool_choice` means: what the engine must be made to say, and who reads it then.

A tool that must be called is called by structured outputs: the engine says the call as JSON, by a schema that
is made here, and `pipeline.forced_calls` reads it. That needs no parser of the model's format; `auto` does.
Not here: reading the field (`gateway/tool_choice_field.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pipeline.errors import InvalidRequest
from pipeline.events import Fragment
from pipeline.forced_calls import Forced, NamedCall, RequiredCalls
from pipeline.ports import OutputParser, OutputParsers
from pipeline.values import ChatRequest, CompletionRequest, Json

FORCED: Final = ("required", "named")

# Of a JSON schema: keys of which each value is a schema, whatever its name; and those that hold mere values.
_NAMED_SCHEMAS: Final = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)
_DATA: Final = frozenset(("const", "default", "enum", "examples"))
# At the root of the parameters; inside another schema they would move the base of its references.
_ROOT_ONLY: Final = frozenset(("$id", "$schema"))


def check_tool_choice(request: ChatRequest, parsers: OutputParsers | None) -> None:
    """Raises `InvalidRequest` where the model may call a tool in its own way and nothing here reads that."""
    if request.tool_choice.kind != "auto" or (parsers is not None and parsers.has_tools):
        return
    raise InvalidRequest(
        "'tool_choice': \"auto\", as 'tools' alone means it, requires a tool-call parser, and this server "
        'has none. Use \'tool_choice\': "none", or "required" or a named tool, which work without one.',
        "tool_choice",
        "unsupported_field",
    )


def forced_schema(request: ChatRequest) -> Json | None:
    """The JSON schema of what the engine must say, or None if it need not call a tool.

    A named tool: its own parameters. `required`: an array of `{"name", "parameters"}`, with one item unless
    calls may be parallel.
    """
    choice, tools = request.tool_choice, request.tools or ()
    if choice.kind == "named":
        return _parameters(_named(tools, choice.name))
    if choice.kind == "required":
        return _any_calls(tools, request.parallel_tool_calls)
    return None


def with_forced_calls(
    sampling: Mapping[str, Json], request: ChatRequest | CompletionRequest
) -> Mapping[str, Json]:
    """The sampling parameters with the constraint of a forced call; it replaces that of `response_format`."""
    schema = forced_schema(request) if isinstance(request, ChatRequest) else None
    return sampling if schema is None else {**sampling, "structured_outputs": {"json": schema}}


def open_parser(
    parsers: OutputParsers | None, request: ChatRequest, prompt_ids: Sequence[int]
) -> OutputParser | None:
    """What reads one choice's text; None: it is all content."""
    choice = request.tool_choice
    if choice.kind not in FORCED:
        own = None if parsers is None else parsers.open(request, prompt_ids)
        return own if own is None or request.parallel_tool_calls else FirstCall(own)
    reasoning = parsers.open(request, prompt_ids) if parsers is not None and parsers.has_reasoning else None
    return Forced(reasoning, NamedCall(choice.name) if choice.kind == "named" else RequiredCalls())


class FirstCall:
    """What another parser says without any call but the first: the client wants no parallel calls.

    A model that calls in its own way cannot be kept from making more; vLLM drops them, too.
    """

    __slots__ = ("_inner",)

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner

    def feed(self, text: str, ids: Sequence[int]) -> Sequence[Fragment]:
        return [fragment for fragment in self._inner.feed(text, ids) if fragment.call == 0]

    def finish(self) -> Sequence[Fragment]:
        return [fragment for fragment in self._inner.finish() if fragment.call == 0]


def _named(tools: Sequence[Mapping[str, Json]], name: str) -> Mapping[str, Json]:
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    # The schema has looked; but validation may have taken control characters out of the tools' names.
    raise InvalidRequest("'tool_choice' names a tool that is not in 'tools'.", "tool_choice")


def _parameters(tool: Mapping[str, Json]) -> Json:
    """A tool without parameters takes an object without properties, as in vLLM."""
    return tool["function"].get("parameters") or {"type": "object", "properties": {}}


def _any_calls(tools: Sequence[Mapping[str, Json]], is_parallel: bool) -> Json:
    """Each tool's parameters stand in a definition of their own, so that equal names inside never meet."""
    definitions, calls = {}, []
    for index, tool in enumerate(tools):
        name = f"tool_{index}"
        root = {key: value for key, value in _parameters(tool).items() if key not in _ROOT_ONLY}
        definitions[name] = _moved(root, f"#/$defs/{name}")
        properties = {"name": {"const": tool["function"]["name"]}, "parameters": {"$ref": f"#/$defs/{name}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return schema if is_parallel else {**schema, "maxItems": 1}


def _moved(schema: Json, place: str) -> Json:
    """The schema with references to its own root leading to `place`, where it now is."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _moved_under(key, value, place) for key, value in schema.items()}


def _moved_under(key: str, value: Json, place: str) -> Json:
    if key in _DATA:
        return value
    if key in _NAMED_SCHEMAS and isinstance(value, dict):
        return {name: _moved(schema, place) for name, schema in value.items()}
    if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return place + value[1:]
    return _moved(value, place)
