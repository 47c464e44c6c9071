"""The OpenAI-compatible request schema: bytes in, frozen values out.

json_body          bytes -> struct, and errors that name the field
sampling_fields    what both routes share; generation: their way into Generation and Delivery
structured_outputs response_format and structured_outputs; compiled_schemas: what they must compile
unsupported_fields known, and refused
chat_messages      messages and tools; tool_choice_field: which of these are called
chat_schema, completion_schema
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.chat_schema import ChatBody, parse_chat
from gateway.completion_schema import CompletionBody, parse_completion
from gateway.json_body import decode
from gateway.sampling_fields import RequestLimits

__all__ = ["ChatBody", "CompletionBody", "RequestLimits", "body_fields", "parse_chat", "parse_completion"]

_FIELDS: Final = msgspec.json.Decoder(dict[str, Any])


def body_fields(limits: RequestLimits, body: bytes) -> dict[str, Any]:
    """All fields of a body that was parsed before, also those that nothing here reads."""
    return decode(_FIELDS, body, limits.max_containers, drop_lone_surrogates=limits.drop_lone_surrogates)
