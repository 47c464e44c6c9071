"""The OpenAPI document: valid, complete, and true of what is parsed and sent."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import msgspec
import pytest

from gateway.answer_schema import ChatChunk, ChatCompletion, Completion, ErrorDocument
from gateway.error_body import stream_error
from gateway.flow import generation_routes
from gateway.frames import ChatShape, CompletionShape, usage_object
from gateway.openai_schema import ChatBody, CompletionBody, RequestLimits, parse_chat, parse_completion
from gateway.openapi import ROUTES, document
from gateway.text_writers import NDJSON, TEXT_HEADERS
from gateway.unsupported_fields import NAMES as UNSUPPORTED
from gateway.whole_message import WholeCall, WholeMessage
from gateway.writers import JSON_HEADERS, SSE
from pipeline.errors import InvalidRequest
from pipeline.events import REASONING, Finish, PositionLogprobs, ToolCallDelta
from pipeline.values import TokenLogprobs, Usage
from tests.gateway.bodies import CHAT, COMPLETION, FIELDS, TOOL, encode, random_fields


@pytest.fixture(scope="module")
def api() -> Any:
    return json.loads(msgspec.json.encode(document("1.2.3")))


def validator(api: Any, name: str) -> jsonschema.Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": api["components"]}
    return jsonschema.Draft202012Validator(schema)


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    return set().union(*(references(value) for value in node)) if isinstance(node, list) else set()


def test_document_names_version_and_every_route(api: Any) -> None:
    assert api["openapi"] == "3.1.0"
    assert api["info"]["version"] == "1.2.3"
    assert set(api["paths"]) == {route.path for route in ROUTES}
    ids = [operation["operationId"] for methods in api["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids)) == len(ROUTES)


def test_schemas_are_valid_and_references_resolve(api: Any) -> None:
    schemas = api["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert {reference.rsplit("/", 1)[1] for reference in references(api)} <= set(schemas)


def test_every_form_of_a_stream_is_documented(api: Any) -> None:
    forms = [dict(framing.headers)[b"content-type"] for framing in (SSE, NDJSON)]
    forms += [dict(headers)[b"content-type"] for headers in (JSON_HEADERS, TEXT_HEADERS)]
    for path in generation_routes(RequestLimits()):
        content = api["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {form.decode().partition(";")[0] for form in forms}


def test_every_field_that_is_parsed_is_documented(api: Any) -> None:
    for body in (ChatBody, CompletionBody):
        schema = api["components"]["schemas"][body.__name__]
        assert set(schema["properties"]) == set(body.__struct_fields__) - set(UNSUPPORTED)
        assert all(name in schema["description"] for name in UNSUPPORTED)
        for name in FIELDS:
            assert schema["properties"][name].get("description") or "$ref" in schema["properties"][name]


def test_limits_that_are_settings_are_documented() -> None:
    properties = document("1", RequestLimits(max_n=3, max_stop_strings=9))["components"]["schemas"][
        "ChatBody"
    ]["properties"]
    assert properties["n"]["maximum"] == 3
    assert properties["stop"]["anyOf"][1]["maxItems"] == 9


@pytest.mark.parametrize("name", ["ChatBody", "CompletionBody"])
def test_documented_limits_are_those_that_hold(api: Any, name: str) -> None:
    """What the schema refuses, the parser refuses, for the bounds of every number."""
    parse, base = (parse_chat, CHAT) if name == "ChatBody" else (parse_completion, COMPLETION)
    base = base | {"max_tokens": 2**31 - 1, "logprobs": True if name == "ChatBody" else 1}
    check = validator(api, name)
    num_refused = 0
    for field, schema in api["components"]["schemas"][name]["properties"].items():
        for bound in ("minimum", "maximum", "exclusiveMinimum"):
            if bound not in schema:
                continue
            edge = schema[bound]
            for value in (edge - 1, edge, edge + 1):
                body = base | {field: value}
                is_valid = check.is_valid(body)
                assert is_valid == accepts(parse, body), (field, value)
                num_refused += not is_valid
    assert num_refused > 20


def accepts(parse: Any, body: dict[str, Any]) -> bool:
    try:
        parse(encode(body))
    except InvalidRequest:
        return False
    return True


def test_accepted_bodies_fit_the_schema(api: Any) -> None:
    rng = random.Random(3)
    check = validator(api, "ChatBody")
    num_checked = 0
    for _ in range(300):
        body = CHAT | {name: value for name, value in random_fields(rng).items() if value is not None}
        if accepts(parse_chat, body):
            check.validate(body)
            num_checked += 1
    assert num_checked > 100


@pytest.mark.parametrize(
    ("fields", "is_allowed"),
    [
        ({"messages": CHAT["messages"]}, True),
        ({"template": {"name": "x"}}, True),
        ({"template": {"name": "x", "variables": {"a": "b"}}, "messages": []}, True),
        ({"template": {"name": "x", "variables": {"a": 1}}}, False),
        ({"template": {"variables": {}}}, False),
        ({}, False),
        ({"messages": CHAT["messages"], "context_policy": "middle_out"}, True),
        ({"messages": CHAT["messages"], "context_policy": "middle"}, False),
    ],
)
def test_templates_and_policies_are_documented_as_they_are_parsed(
    api: Any, fields: dict[str, Any], is_allowed: bool
) -> None:
    body = {"model": "m", **fields}
    assert validator(api, "ChatBody").is_valid(body) == accepts(parse_chat, body) == is_allowed


@pytest.mark.parametrize(
    ("choice", "is_allowed"),
    [
        ("none", True),
        ("auto", True),
        ("required", True),
        ({"type": "function", "function": {"name": "f"}}, True),
        ({"function": {"name": "f"}}, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}, True),
        ("sometimes", False),
        (1, False),
        ({}, False),
        ({"type": "custom", "function": {"name": "f"}}, False),
        ({"function": {"name": 1}}, False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [TOOL]}}, False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}]}}, False),
    ],
)
def test_tool_choices_are_documented_as_they_are_parsed(api: Any, choice: Any, is_allowed: bool) -> None:
    body = CHAT | {"tools": [TOOL], "tool_choice": choice}
    assert validator(api, "ChatBody").is_valid(body) == accepts(parse_chat, body) == is_allowed


def test_what_is_most_needed_is_documented_first(api: Any) -> None:
    schemas = api["components"]["schemas"]
    assert list(schemas["ChatBody"]["properties"])[:3] == ["model", "messages", "template"]
    assert list(schemas["CompletionBody"]["properties"])[:2] == ["model", "prompt"]


def test_examples_are_accepted(api: Any) -> None:
    for path, parse in (("/v1/chat/completions", parse_chat), ("/v1/completions", parse_completion)):
        parse(encode(api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]))


# -- answers -----------------------------------------------------------------------------------------


class Texts:
    def token_text(self, token_id: int, /) -> str:
        return f"t{token_id}"

    def token_bytes(self, token_id: int, /) -> bytes:
        return self.token_text(token_id).encode()


def entries() -> list[PositionLogprobs]:
    logprobs = TokenLogprobs((7, 7, 8), (-0.5, -0.5, -1.5), 1)
    return [PositionLogprobs(token_id=7, start=0, end=2, logprobs=logprobs)]


USAGE = usage_object(Usage(10, 5, 8))


def answers() -> list[tuple[type[msgspec.Struct], Any]]:
    chat, raw = ChatShape("id", 1, "m", reasoning_content=True), CompletionShape("id", 1, "m")
    chat_logprobs, raw_logprobs = chat.logprobs(entries(), Texts()), raw.logprobs(entries(), Texts())
    timings = {"ttft_ms": 1.5, "tpot_ms": None}
    message = WholeMessage(["x"], ["y"], [WholeCall("c", "f", ["{}"])])
    bare = WholeMessage(calls=message.calls)
    reasoned = usage_object(Usage(10, 5, None, reasoning_tokens=2))
    return [
        (ChatChunk, chat.chunk([chat.opening(0)])),
        (ChatChunk, chat.chunk([chat.delta(0, "x", chat_logprobs)])),
        (ChatChunk, chat.chunk([chat.delta(0, "x", None, REASONING)])),
        (ChatChunk, chat.chunk([chat.tool_call(0, ToolCallDelta(0, "f", "", "c"))])),
        (ChatChunk, chat.chunk([chat.tool_call(0, ToolCallDelta(0, None, "{}"))])),
        (ChatChunk, chat.chunk([chat.ending(0, Finish("stop", 5))])),
        (ChatChunk, chat.chunk([chat.ending(0, Finish("content_filter"))])),
        (ChatChunk, chat.chunk([chat.ending(0, Finish("stop", None, "not JSON"))])),
        (ChatChunk, chat.chunk([]) | {"usage": USAGE, "timings": timings}),
        (ChatChunk, chat.chunk([]) | {"usage": reasoned}),
        (ChatCompletion, chat.document([chat.whole(0, message, chat_logprobs, Finish("length"))], USAGE)),
        (ChatCompletion, chat.document([chat.whole(0, bare, None, Finish("tool_calls"))], reasoned)),
        (Completion, raw.chunk([raw.delta(0, "x", raw_logprobs)])),
        (Completion, raw.chunk([raw.ending(0, Finish("stop", "END"))])),
        (Completion, raw.chunk([]) | {"usage": USAGE, "timings": timings}),
        (
            Completion,
            raw.document([raw.whole(0, WholeMessage(["x"]), None, Finish("content_filter"))], USAGE),
        ),
        (ErrorDocument, stream_error(InvalidRequest("m", "n"))),
    ]


@pytest.mark.parametrize(("struct", "answer"), answers())
def test_answers_fit_their_schema_and_lose_no_field(
    api: Any, struct: type[msgspec.Struct], answer: Any
) -> None:
    sent = json.loads(json.dumps(answer))
    validator(api, struct.__name__).validate(sent)
    assert kept(sent, msgspec.to_builtins(msgspec.convert(sent, struct)))


def kept(sent: Any, read: Any) -> bool:
    """Whether everything that was sent is also there after it was read by the documented structs."""
    if isinstance(sent, dict):
        return all(key in read and kept(value, read[key]) for key, value in sent.items())
    if isinstance(sent, list):
        return len(sent) == len(read) and all(map(kept, sent, read))
    return bool(sent == read)
