"""The body of `POST /v1/chat/completions` -> `ChatRequest`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.chat_messages import Message, Tool, to_messages, to_tools
from gateway.generation import check_num_logprobs, to_delivery, to_generation
from gateway.json_body import MAX_SHOWN_CHARS, check_depth, decode, show
from gateway.sampling_fields import (
    DEFAULT_LIMITS,
    MAX_LOGPROBS,
    PositiveInt,
    RequestLimits,
    SamplingFields,
)
from gateway.tool_choice_field import SCHEMA as TOOL_CHOICE_SCHEMA
from gateway.tool_choice_field import to_tool_choice
from gateway.unsupported_fields import refuse_unsupported
from pipeline.context_policy import POLICIES
from pipeline.errors import InvalidRequest
from pipeline.tool_choice import FORCED
from pipeline.values import ChatRequest, TemplateUse

REASONING_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Names that rendering itself gives to a template; `chat_template_kwargs` must not replace them.
RESERVED_TEMPLATE_NAMES: Final = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "raise_exception",
        "strftime_now",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "sep_token",
        "cls_token",
        "mask_token",
    }
)


class Template(msgspec.Struct, kw_only=True):
    """A prompt template of this server, by name. An extension."""

    name: Annotated[str, Meta(description="A name from the server's configuration.")]
    variables: Annotated[
        dict[str, Any] | None,
        Meta(
            description="A text for each of its slots, by the slot's name.",
            extra_json_schema={"additionalProperties": {"type": "string"}},
        ),
    ] = None


class ChatBody(SamplingFields, kw_only=True):
    """A chat to continue."""

    messages: Annotated[
        list[Message] | UnsetType,
        Meta(description="The chat so far, oldest first. Needed unless there is a template."),
    ] = UNSET
    template: Annotated[
        Template | None,
        Meta(
            description="Begin with the messages of this template; `messages`, if any, follow. An extension.",
            examples=[{"name": "NAME", "variables": {"SLOT": "text"}}],
        ),
    ] = None
    context_policy: Annotated[
        str | None,
        Meta(
            description="A chat that is too long is refused, loses its oldest turns, or the middle of its "
            "longest text. What was dropped is in `usage.prompt_tokens_details`. An extension.",
            extra_json_schema={"enum": [*POLICIES, None]},
        ),
    ] = None
    max_completion_tokens: Annotated[
        PositiveInt | None, Meta(description="OpenAI's newer name; it wins.")
    ] = None
    logprobs: Annotated[bool | None, Meta(description="Give the log probability of every token.")] = None
    top_logprobs: Annotated[
        int | None,
        Meta(
            description="And those of this many most likely tokens. Needs logprobs.",
            extra_json_schema={"minimum": 0, "maximum": MAX_LOGPROBS},
        ),
    ] = None
    tools: Annotated[list[Tool] | None, Meta(description="What the model may call.")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(
            description="Whether tools are called: 'none', 'auto' (the default with tools), 'required', the "
            "one that must be, or those to choose from. 'auto' needs a tool-call parser on the server; what "
            "must be called is a constraint of the engine, in the place of response_format.",
            extra_json_schema=TOOL_CHOICE_SCHEMA,
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="Several calls in one answer. True is the default.")
    ] = None
    include_reasoning: Annotated[
        bool | None, Meta(description="Give the reasoning, too. True is the default.")
    ] = None
    reasoning_effort: Annotated[
        str | None,
        Meta(
            description="For templates that know it.", extra_json_schema={"enum": [*REASONING_EFFORTS, None]}
        ),
    ] = None
    documents: Annotated[list[dict[str, str]] | None, Meta(description="For templates that know them.")] = (
        None
    )
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Meta(description="Variables for the chat template.", examples=[{"enable_thinking": False}]),
    ] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="Begin the assistant's turn.")] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="Leave the last message open and write on in it.")
    ] = None
    add_special_tokens: bool | None = None


_DECODER: Final = msgspec.json.Decoder(ChatBody)


def parse_chat(
    body: bytes, limits: RequestLimits = DEFAULT_LIMITS, always_streams: bool = False
) -> ChatRequest:
    """The request that the bytes of a chat body ask for. Raises `InvalidRequest`, and nothing else.

    `always_streams`: whatever the body says.
    """
    fields = decode(_DECODER, body, limits.max_containers, drop_lone_surrogates=limits.drop_lone_surrogates)
    refuse_unsupported(fields)
    if fields.add_special_tokens:
        raise InvalidRequest(
            "'add_special_tokens': true is not supported for chats; the template adds them.",
            "add_special_tokens",
            "unsupported_field",
        )
    max_tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    tools = to_tools(fields.tools, limits.max_depth, limits.max_tools)
    tool_choice, tools = to_tool_choice(fields.tool_choice, tools)
    return ChatRequest(
        model=fields.model,
        messages=_messages(fields, limits),
        generation=to_generation(
            fields,
            limits,
            None if max_tokens is None else int(max_tokens),
            _logprobs(fields),
            calls_tools=tool_choice.kind in FORCED,
        ),
        delivery=to_delivery(fields, limits, always_streams),
        tools=tools,
        documents=fields.documents,
        chat_template_kwargs=_template_variables(fields, limits),
        add_generation_prompt=_add_generation_prompt(fields),
        continue_final_message=bool(fields.continue_final_message),
        template=_template(fields.template),
        context_policy=_one_of(fields.context_policy, POLICIES, "context_policy"),
        tool_choice=tool_choice,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        include_reasoning=fields.include_reasoning is not False,
    )


def _messages(fields: ChatBody, limits: RequestLimits) -> tuple[dict[str, Any], ...]:
    """The request's own messages; there may be none after a template."""
    if fields.messages is UNSET:
        if fields.template is None:
            raise InvalidRequest("'messages' is required.", "messages")
        return ()
    if not fields.messages and fields.template is not None:
        return ()
    return to_messages(fields.messages, limits.max_depth)


def _template(template: Template | None) -> TemplateUse | None:
    if template is None:
        return None
    variables = template.variables or {}
    for slot, value in variables.items():
        if not isinstance(value, str):
            param = f"template.variables.{slot[:MAX_SHOWN_CHARS]}"
            raise InvalidRequest(f"'{param}' must be a string, got {show(value)}.", param)
    return TemplateUse(template.name, variables)


def _one_of(value: str | None, allowed: Sequence[str], param: str) -> str | None:
    if value is not None and value not in allowed:
        raise InvalidRequest(f"'{param}' must be one of {', '.join(allowed)}, got {show(value)}.", param)
    return value


def _logprobs(fields: ChatBody) -> int | None:
    num_top = check_num_logprobs(fields.top_logprobs, "top_logprobs")
    if fields.logprobs:
        return num_top or 0
    if num_top:
        raise InvalidRequest(
            f"'top_logprobs' needs 'logprobs': true, got top_logprobs = {num_top}.", "top_logprobs"
        )
    return None


def _template_variables(fields: ChatBody, limits: RequestLimits) -> dict[str, Any]:
    """The client's variables; `reasoning_effort` adds itself and, as in vLLM, switches thinking on or off."""
    variables = dict(fields.chat_template_kwargs or {})
    check_depth(variables, limits.max_depth, "chat_template_kwargs")
    if reserved := RESERVED_TEMPLATE_NAMES & variables.keys():
        param = f"chat_template_kwargs.{min(reserved)}"
        raise InvalidRequest(
            f"'{param}' is not allowed: the server sets this template variable itself.", param
        )
    effort = _one_of(fields.reasoning_effort, REASONING_EFFORTS, "reasoning_effort")
    if effort is None:
        return variables
    variables["reasoning_effort"] = effort
    variables.setdefault("enable_thinking", effort != "none")
    return variables


def _add_generation_prompt(fields: ChatBody) -> bool:
    if not fields.continue_final_message:
        return fields.add_generation_prompt is not False
    if fields.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' must not both be true.",
            "add_generation_prompt",
        )
    return False
