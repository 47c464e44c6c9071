"""`response_format` and `structured_outputs` -> vLLM's one `structured_outputs` value.

The rules are those of vLLM 0.32 (`StructuredOutputsParams`, `structured_outputs_from_response_format`):
exactly one constraint, and a response format overrides the field of the same kind. Whether a grammar
compiles, and whether the engine knows all that a schema says, only the engine can say.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.compiled_schemas import check_compiles
from gateway.json_body import check_depth, show
from pipeline.errors import InvalidRequest
from pipeline.values import AnswerFormat

FORMATS: Final = ("text", "json_object", "json_schema", "structural_tag")
CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class JsonSchema(msgspec.Struct, kw_only=True):
    """A named JSON schema."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The shape that the answer must have."""

    type: Annotated[str, Meta(extra_json_schema={"enum": list(FORMATS)})]
    json_schema: JsonSchema | None = None
    format: Annotated[Any, Meta(description="With structural_tag: the tag.")] = UNSET
    structures: Annotated[
        list[dict[str, Any]] | UnsetType, Meta(description="With structural_tag: the older form.")
    ] = UNSET
    triggers: list[str] | UnsetType = UNSET


class StructuredOutputs(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Exactly one constraint, and how to apply it."""

    json: Annotated[str | dict[str, Any] | None, Meta(description="A JSON schema.")] = None
    regex: str | None = None
    choice: Annotated[list[str] | None, Meta(description="The answer is one of these.")] = None
    grammar: Annotated[str | None, Meta(description="A context-free grammar (EBNF or Lark).")] = None
    json_object: Annotated[bool | None, Meta(description="Any JSON object.")] = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


def to_sampling(
    outputs: StructuredOutputs | None, response_format: ResponseFormat | None, max_depth: int
) -> dict[str, Any] | None:
    """The constraint as fields of vLLM's `StructuredOutputsParams`, or None. Raises `InvalidRequest`."""
    wanted = {} if outputs is None else _from_structured_outputs(outputs, max_depth)
    if response_format is not None:
        wanted |= _from_response_format(response_format, max_depth)
    if not wanted and outputs is None:
        return None
    given = [name for name in CONSTRAINTS if name in wanted]
    if len(given) != 1:
        param = "structured_outputs"
        raise InvalidRequest(
            f"'{param}' must have exactly one constraint of {', '.join(CONSTRAINTS)} (or response_format), "
            f"got {', '.join(given) or 'none'}.",
            param,
        )
    return wanted


def to_answer_format(
    constraint: dict[str, Any] | None, response_format: ResponseFormat | None, max_depth: int
) -> AnswerFormat | None:
    """The JSON that the answer must be by a constraint of `to_sampling`, or None. Raises `InvalidRequest`."""
    if constraint is None:
        return None
    if "json_object" in constraint:
        return AnswerFormat()
    if "json" not in constraint:
        return None
    is_formatted = response_format is not None and response_format.type == "json_schema"
    param = "response_format.json_schema.schema" if is_formatted else "structured_outputs.json"
    schema = _decoded_schema(constraint["json"], param, max_depth)
    check_compiles(schema, param)
    return AnswerFormat(schema)


def _decoded_schema(schema: str | dict[str, Any], param: str, max_depth: int) -> Any:
    """A schema as an object or true, of JSON in a string, too."""
    if not isinstance(schema, str):
        return schema
    try:
        decoded = msgspec.json.decode(schema)  # takes no NaN and no half surrogate pairs, as `json` would
    except (ValueError, RecursionError):
        raise InvalidRequest(f"'{param}' must be a JSON schema; the string is no JSON.", param) from None
    check_depth(decoded, max_depth, param)
    if not isinstance(decoded, dict) and decoded is not True:
        raise InvalidRequest(f"'{param}' must be a JSON schema, got {show(decoded)}.", param)
    return decoded


def _from_structured_outputs(outputs: StructuredOutputs, max_depth: int) -> dict[str, Any]:
    check_depth(outputs.json, max_depth, "structured_outputs.json")
    _check_constraint(outputs)
    fields = msgspec.structs.asdict(outputs)
    return {name: value for name, value in fields.items() if value is not None and value is not False}


def _from_response_format(response_format: ResponseFormat, max_depth: int) -> dict[str, Any]:
    kind = response_format.type
    if response_format.json_schema is not None:
        check_depth(response_format.json_schema.schema, max_depth, "response_format.json_schema.schema")
    check_depth(response_format.format, max_depth, "response_format.format")
    check_depth(response_format.structures, max_depth, "response_format.structures")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        return {"json": _schema(response_format)}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(_structural_tag(response_format))}
    param = "response_format.type"
    raise InvalidRequest(f"'{param}' must be one of {', '.join(FORMATS)}, got {show(kind)}.", param)


def _schema(response_format: ResponseFormat) -> dict[str, Any]:
    if response_format.json_schema is None:
        raise _missing("response_format.json_schema", "json_schema")
    if response_format.json_schema.schema is None:
        raise _missing("response_format.json_schema.schema", "json_schema")
    return response_format.json_schema.schema


def _structural_tag(response_format: ResponseFormat) -> dict[str, Any]:
    if response_format.format is not UNSET:
        return {"type": "structural_tag", "format": response_format.format}
    if response_format.structures is UNSET:
        raise _missing("response_format.format", "structural_tag")
    if response_format.triggers is UNSET:
        raise _missing("response_format.triggers", "structural_tag")
    given = enumerate(response_format.structures or ())
    structures = [_structure(structure, index) for index, structure in given]
    return {"type": "structural_tag", "structures": structures, "triggers": response_format.triggers}


def _structure(structure: dict[str, Any], index: int) -> dict[str, Any]:
    for name in ("begin", "end"):
        if not isinstance(structure.get(name), str):
            param = f"response_format.structures[{index}].{name}"
            raise InvalidRequest(f"'{param}' must be a string, got {show(structure.get(name))}.", param)
    return {"begin": structure["begin"], "schema": structure.get("schema"), "end": structure["end"]}


def _missing(param: str, kind: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}' is required when 'response_format.type' is {kind!r}.", param)


def _check_constraint(outputs: StructuredOutputs) -> None:
    """What vLLM refuses of each constraint before it looks inside."""
    for name in ("json", "grammar", "structural_tag"):
        value = getattr(outputs, name)
        if isinstance(value, str) and not value.strip():
            raise _bad(name, "must not be empty")
    if outputs.choice is not None and not outputs.choice:
        raise _bad("choice", "must not be empty")
    if outputs.json_object is False:
        raise _bad("json_object", "must be true, or left out")
    if outputs.regex is not None and "\0" in outputs.regex:
        raise _bad("regex", "must not contain NUL")


def _bad(name: str, problem: str) -> InvalidRequest:
    param = f"structured_outputs.{name}"
    return InvalidRequest(f"'{param}' {problem}.", param)
