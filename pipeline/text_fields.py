"""The body that a server gets which renders and tokenizes by itself: the client's own, as far as it may go.

What the client sent goes on as it is, also fields that nothing here knows; what reaches the prompt is taken
from the request where a scan, a template or a policy has rewritten it. Without a client's body (Realtime) all
of it comes from the request. Not here: whether a request may go on (`text_inbound.py`).
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pipeline.values import ChatRequest, CompletionRequest, Generation, Json, MediaRef, Medium

# Decided for each choice on its way, or this gateway's own business.
NOT_PASSED: Final = frozenset(
    {"model", "n", "best_of", "stream", "stream_options", "template", "context_policy", "output"}
)


def chat_fields(
    request: ChatRequest, read: ChatRequest, source: Mapping[str, Json] | None, media: Sequence[Medium]
) -> dict[str, Json]:
    """The body of a chat. `read`: the request as it came; `media`: what is behind its references, in order.

    `source`: the body that `read` was read from, decoded.
    """
    fields = _derived(request) if source is None else _passed(source)
    is_changed = source is None or request.messages is not read.messages or bool(media)
    if is_changed:
        loaded = iter(media)
        fields["messages"] = [wire_message(message, loaded) for message in request.messages]
    for name in ("tools", "documents"):
        value = getattr(request, name)
        if value is not None and (source is None or value is not getattr(read, name)):
            fields[name] = value
    if request.chat_template_kwargs and (
        source is None or request.chat_template_kwargs is not read.chat_template_kwargs
    ):
        fields["chat_template_kwargs"] = request.chat_template_kwargs
    return fields


def completion_fields(
    request: CompletionRequest, index: int, source: Mapping[str, Json] | None
) -> dict[str, Json]:
    """The body of a raw completion of one of its prompts."""
    fields = generation_fields(request.generation) if source is None else _passed(source)
    return fields | {"prompt": request.prompts[index]}


def wire_message(message: Mapping[str, Json], media: Iterator[Medium]) -> dict[str, Json]:
    """A message in OpenAI's shape. `media`: of this message and those after it; what it takes is gone."""
    wire = dict(message)
    content = message.get("content")
    if isinstance(content, list | tuple):
        wire["content"] = [
            _wire_part(part["media"], next(media)) if "media" in part else part for part in content
        ]
    if "tool_calls" in message:
        wire["tool_calls"] = [_wire_call(call) for call in message["tool_calls"]]
    return wire


def generation_fields(generation: Generation) -> dict[str, Json]:
    """What is asked of the generation, by the names of OpenAI and vLLM."""
    fields: dict[str, Json] = dict(generation.sampling)
    if generation.answer_format is not None and fields.pop("structured_outputs", None) is not None:
        fields["response_format"] = _response_format(generation.answer_format.schema)
    if generation.max_tokens is not None:
        fields["max_tokens"] = generation.max_tokens
    if generation.stop:
        fields["stop"] = list(generation.stop)
    if generation.include_stop_str_in_output:
        fields["include_stop_str_in_output"] = True
    if generation.priority:
        fields["priority"] = generation.priority
    if generation.cache_salt is not None:
        fields["cache_salt"] = generation.cache_salt
    return fields


def _passed(source: Mapping[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in source.items() if name not in NOT_PASSED}


def _derived(request: ChatRequest) -> dict[str, Json]:
    fields = generation_fields(request.generation)
    choice = request.tool_choice
    if request.tools:
        named: Any = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.kind == "named" else choice.kind
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    return fields


def _response_format(schema: Json) -> dict[str, Json]:
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _wire_part(ref: MediaRef, medium: Medium) -> dict[str, Json]:
    """An image or a sound with its data: the server is not to fetch what this gateway has looked at."""
    if ref.kind == "audio":
        data = b64encode(medium.data).decode("ascii")
        return {"type": "input_audio", "input_audio": {"data": data, "format": medium.format}}
    url = ref.url
    if not url.startswith("data:"):
        url = f"data:image/{medium.format};base64,{b64encode(medium.data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _wire_call(call: Mapping[str, Json]) -> dict[str, Json]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        function["arguments"] = "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": function}
