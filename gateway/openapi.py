"""The OpenAPI 3.1 document: a table of routes, and schemas made from the structs that parse the bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import msgspec

from gateway.answer_schema import ChatChunk, ChatCompletion, Completion, ErrorDocument, StreamStarted
from gateway.chat_messages import UNSUPPORTED as UNSUPPORTED_IN_MESSAGES
from gateway.openai_schema import ChatBody, CompletionBody, RequestLimits
from gateway.unsupported_fields import NAMES as UNSUPPORTED

Json = dict[str, Any]

GENERATION_ERRORS: Final = (400, 401, 404, 408, 413, 429, 431, 502, 503, 504)
CHAT_EXAMPLE: Final = {
    "messages": [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
}
MAIN_FIELDS: Final = ("messages", "template")  # one of these is required
TEXT_FORMS: Final = (
    "With `Accept: application/x-ndjson` each event is a line of JSON instead, after spaces while waiting, "
    "and nothing follows the last. With `Accept: text/plain` the stream is the content alone, of one choice "
    "without tools, logprobs or stream_options. It does not tell why it ends; one that fails or is blocked "
    "stops without the end of its chunked coding, which HTTP clients report."
)
MEDIA_FORMS: Final = (
    " Where the model takes them, content parts may be images (`image_url`, `input_image`: PNG, JPEG, WebP "
    "or GIF, of which the first frame counts) and sounds (`input_audio`, `audio_url`: WAV, FLAC, Ogg or MP3, "
    "and raw samples as `pcm16`). Addresses are data URIs with base64, and http(s) from the hosts that the "
    "server allows, if any. `detail` is taken and ignored: the model's own processor decides how it sees an "
    "image."
)
COMPLETION_EXAMPLE: Final = {"prompt": "The sky is blue because", "max_tokens": 32, "temperature": 0}


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """One route, as it is documented."""

    method: str
    path: str
    summary: str
    description: str = ""
    body: type[msgspec.Struct] | None = None
    example: Json | None = None
    answer: type[msgspec.Struct] | str = "application/json"  # a struct, or a media type
    events: type[msgspec.Struct] | None = None  # what each server-sent event holds
    has_text_forms: bool = False  # the stream also comes as JSON lines or plain text
    errors: tuple[int, ...] = ()
    needs_key: bool = False
    status: int = 200
    query: Mapping[str, str] = field(default_factory=dict)  # what may stand in the query, all optional


ROUTES: Final = (
    RouteDoc(
        "POST",
        "/v1/chat/completions",
        "Continue a chat",
        "OpenAI's chat completions with vLLM's sampling fields. With `stream: true` the answer comes as "
        "server-sent events: `data: {…}` per piece, comments `: ping` while waiting, and `data: [DONE]` at "
        'the end. A stream that fails ends with `data: {"error": …}` and without `[DONE]`. '
        + TEXT_FORMS
        + MEDIA_FORMS,
        body=ChatBody,
        example=CHAT_EXAMPLE,
        answer=ChatCompletion,
        events=ChatChunk,
        has_text_forms=True,
        errors=GENERATION_ERRORS,
        needs_key=True,
    ),
    RouteDoc(
        "POST",
        "/v1/completions",
        "Continue a raw prompt",
        "The prompt reaches the model as it is: no chat template. Streams like a chat.",
        body=CompletionBody,
        example=COMPLETION_EXAMPLE,
        answer=Completion,
        events=Completion,
        has_text_forms=True,
        errors=GENERATION_ERRORS,
        needs_key=True,
    ),
    RouteDoc(
        "POST",
        "/v1/streams",
        "Start a chat whose stream resumes",
        "Takes the body of a chat, which streams whatever it says, and answers at once. The answer goes on "
        "without any connection, and ends when nobody reads it for a while. With a header `Idempotency-Key` "
        "the same body starts one stream only: again 201 with that stream; 422 for another body; 409 while "
        "the first is being prepared.",
        body=ChatBody,
        example={"messages": CHAT_EXAMPLE["messages"]},
        answer=StreamStarted,
        status=201,
        errors=(*GENERATION_ERRORS, 409, 422, 501),
        needs_key=True,
    ),
    RouteDoc(
        "GET",
        "/v1/streams/{id}/events",
        "Follow a stream",
        "For EventSource: numbered events with the chunks of a chat, those after `Last-Event-ID` (or "
        "`last_event_id` in the query), then a named event `done`, or `failed` with an error. What is wrong "
        "with the request is such an event, too. After the last one the answer is 204: EventSource ends.",
        answer="text/event-stream",
        query={"token": "Of this stream.", "last_event_id": "The number of the last event that is known."},
    ),
    RouteDoc(
        "DELETE",
        "/v1/streams/{id}",
        "End a stream",
        "One that runs ends as `cancelled`; one that has ended is forgotten.",
        answer="",
        status=204,
        query={"token": "Of this stream."},
        errors=(401, 404, 503),
    ),
    RouteDoc(
        "GET",
        "/v1/realtime",
        "Talk over WebSocket",
        "OpenAI's Realtime events, as JSON text: sessions, items, responses, cancels. A browser, which can't "
        "set headers, offers its key as a subprotocol: `realtime, openai-insecure-api-key.KEY`.",
        answer="",
        status=101,
        query={"model": "Which model; needed where there are several."},
        errors=(400, 401, 403, 404, 426, 503),
        needs_key=True,
    ),
    RouteDoc("GET", "/v1/models", "List the models", errors=(401,), needs_key=True),
    RouteDoc("GET", "/v1/models/{model}", "Look at one model", errors=(401, 404), needs_key=True),
    RouteDoc("GET", "/health", "Is the process alive?"),
    RouteDoc(
        "GET",
        "/ready",
        "Can requests be served?",
        "503 while starting, draining or without a worker.",
        errors=(503,),
    ),
    RouteDoc("GET", "/metrics", "Metrics for Prometheus", answer="text/plain"),
    RouteDoc("GET", "/version", "Versions of the gateway and its workers"),
    RouteDoc("GET", "/docs", "This documentation, as a page", answer="text/html"),
    RouteDoc("GET", "/openapi.json", "This documentation, as OpenAPI 3.1"),
    RouteDoc("GET", "/", "The chat page", answer="text/html"),
)


def document(version: str, limits: RequestLimits | None = None) -> Json:
    """The OpenAPI document of a gateway of this version and these limits."""
    paths: dict[str, Json] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version,
            "description": "A streaming gateway in front of vLLM. Any OpenAI client works with it.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "."}],
        "paths": paths,
        "components": {
            "schemas": _schemas(limits or RequestLimits()),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: RouteDoc) -> Json:
    operation: Json = {"summary": route.summary, "operationId": _operation_id(route)}
    if route.description:
        operation["description"] = route.description
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.body is not None:
        content = {"schema": _reference(route.body), "example": {"model": "MODEL", **(route.example or {})}}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    operation["responses"] = {str(route.status): _success(route)} | {
        str(status): _error(status) for status in route.errors
    }
    if route.needs_key:
        operation["security"] = [{"key": []}, {}]
    return operation


def _parameters(route: RouteDoc) -> list[Json]:
    text = {"type": "string"}
    return [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in re.findall(r"{(\w+)}", route.path)
    ] + [
        {"name": name, "in": "query", "description": description, "schema": text}
        for name, description in route.query.items()
    ]


def _operation_id(route: RouteDoc) -> str:
    words = [word.strip("{}") for word in route.path.replace(".", "/").split("/") if word and word != "v1"]
    return "_".join([route.method.lower(), *words])


def _success(route: RouteDoc) -> Json:
    if isinstance(route.answer, str):
        content: Json = {route.answer: {}} if route.answer else {}
    else:
        content = {"application/json": {"schema": _reference(route.answer)}}
    if route.events is not None:
        content["text/event-stream"] = {"schema": _reference(route.events)}
        if route.has_text_forms:
            content["application/x-ndjson"] = {"schema": _reference(route.events)}
            content["text/plain"] = {"schema": {"type": "string"}}
    described: Json = {"description": HTTPStatus(route.status).phrase}
    return described | ({"content": content} if content else {})


def _error(status: int) -> Json:
    content = {"application/json": {"schema": _reference(ErrorDocument)}}
    error: Json = {"description": HTTPStatus(status).phrase, "content": content}
    if status in (429, 503):
        error["headers"] = {"retry-after": {"schema": {"type": "integer"}, "description": "Seconds."}}
    return error


def _reference(struct: type[msgspec.Struct]) -> Json:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}


def _schemas(limits: RequestLimits) -> Json:
    bodies = list(dict.fromkeys(route.body for route in ROUTES if route.body is not None))
    answers = [
        struct for route in ROUTES for struct in (route.answer, route.events) if isinstance(struct, type)
    ]
    schemas = {name: _simplify(schema) for name, schema in _components(bodies).items()}
    for body in bodies:
        _describe_body(schemas[body.__name__], limits)
    for name in UNSUPPORTED_IN_MESSAGES:
        del schemas["Message"]["properties"][name]
    return schemas | _components([*answers, ErrorDocument])


def _components(structs: Sequence[type[msgspec.Struct]]) -> Json:
    _, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    return schemas


def _describe_body(schema: Json, limits: RequestLimits) -> None:
    """Limits that are settings, and what is refused, which structs cannot say."""
    properties = schema["properties"]
    properties["n"]["maximum"] = limits.max_n
    properties["bad_words"]["maxItems"] = limits.max_bad_words
    for alternative in properties["stop"]["anyOf"]:
        if alternative["type"] == "array":
            alternative["maxItems"] = limits.max_stop_strings
        else:
            alternative |= {"minLength": 1, "maxLength": limits.max_stop_chars}
    for name in UNSUPPORTED:
        del properties[name]
    first = (*schema["required"], *MAIN_FIELDS)
    schema["properties"] = dict(sorted(properties.items(), key=lambda item: item[0] not in first))
    if "template" in properties:
        schema["anyOf"] = [{"required": ["messages"]}, {"required": ["template"]}]
    schema["description"] += (
        " Null is the same as leaving a field out. Unknown fields are ignored. Known and refused: "
        f"{', '.join(UNSUPPORTED)}."
    )


def _simplify(schema: Any) -> Any:
    """A body's schema without `null`, which is "not given" in every field, and without doubled integers."""
    if isinstance(schema, list):
        return [_simplify(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    simple = {
        key: _simplify(value) for key, value in schema.items() if not (key == "default" and value is None)
    }
    if "anyOf" in simple:
        kept = [
            choice
            for choice in simple.pop("anyOf")
            if choice != {"type": "null"} and "multipleOf" not in choice
        ]
        simple |= kept[0] if len(kept) == 1 else {"anyOf": kept}
    return simple
