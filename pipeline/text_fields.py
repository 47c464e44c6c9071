"""The body that a server gets which renders and tokenizes by itself.

All that reaches the prompt is made from the request, as validation, scan and templates left it. Of the rest
of the client's body go on the fields that steer the generation, and those that the operator names. Others
could hold text that no rule has seen, or steer what is not the client's: servers have a hundred such fields.

Not here: whether a request may go on (`text_inbound.py`).
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from pipeline.values import ChatRequest, CompletionRequest, Generation, Json, MediaRef, Medium

# Fields whose types the schema has checked. What they mean is the server's business.
_STEERING: Final = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens"),
        *("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "bad_words"),
        *("allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
        *("response_format", "structured_outputs", "parallel_tool_calls", "reasoning_effort"),
        *("include_reasoning", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("priority", "cache_salt"),
    }
)
# Of other servers' own, as far as they are numbers: llama.cpp's samplers.
_NUMBERS: Final = frozenset(
    {
        *("typical_p", "repeat_penalty", "repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta"),
        *("cache_prompt", "thinking_budget_tokens"),
    }
)
# Servers may write these into the prompt.
WITH_TEXT: Final = ("response_format", "structured_outputs")
# Decided for each choice on its way.
OURS: Final = frozenset({"model", "messages", "prompt", "n", "best_of", "stream", "stream_options", "tools"})


def steering_fields(
    generation: Generation, source: Mapping[str, Json] | None, named: Collection[str] = ()
) -> dict[str, Json]:
    """What is asked of the generation. `source`: the client's body; without one it comes from the request.

    `named`: by the operator, to go on as they are.
    """
    if source is None:
        return generation_fields(generation)
    return {
        name: value
        for name, value in source.items()
        if value is not None
        and (
            name in _STEERING
            or (name in _NUMBERS and isinstance(value, int | float))
            or (name in named and name not in OURS)
        )
    }


def chat_fields(
    request: ChatRequest, source: Mapping[str, Json] | None, media: Sequence[Medium]
) -> dict[str, Json]:
    """What of a chat reaches the prompt. `media`: what is behind its references, in order."""
    loaded = iter(media)
    fields: dict[str, Json] = {"messages": [_wire_message(message, loaded) for message in request.messages]}
    if request.tools:
        choice = request.tool_choice
        named: Any = {"type": "function", "function": {"name": choice.name}}
        fields["tools"] = [_wire_tool(tool) for tool in request.tools]
        fields["tool_choice"] = named if choice.kind == "named" else choice.kind
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    if request.documents:
        fields["documents"] = request.documents
    # `reasoning_effort` alone has put itself there, for templates of ours.
    if request.chat_template_kwargs and (source is None or source.get("chat_template_kwargs")):
        fields["chat_template_kwargs"] = request.chat_template_kwargs
    return fields


def completion_fields(request: CompletionRequest, index: int) -> dict[str, Json]:
    """What of a raw completion reaches the prompt: one of its prompts."""
    return {"prompt": request.prompts[index]}


def _wire_message(message: Mapping[str, Json], media: Iterator[Medium]) -> dict[str, Json]:
    """A message in OpenAI's shape. `media`: of this message and those after it; what it takes is gone."""
    wire = dict(message)
    content = message.get("content")
    if isinstance(content, list | tuple):
        wire["content"] = [
            _wire_part(part["media"], next(media)) if "media" in part else part for part in content
        ]
    if "tool_calls" in message:
        wire["tool_calls"] = [_wire_call(call) for call in message["tool_calls"]]
    if "reasoning" in message:
        wire["reasoning_content"] = message["reasoning"]  # what DeepSeek's, SGLang and llama.cpp call it
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


def _wire_tool(tool: Mapping[str, Json]) -> dict[str, Json]:
    """Without the nulls that templates are shown."""
    return {
        **tool,
        "function": {name: value for name, value in tool["function"].items() if value is not None},
    }


def _wire_call(call: Mapping[str, Json]) -> dict[str, Json]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        function["arguments"] = "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": function}
