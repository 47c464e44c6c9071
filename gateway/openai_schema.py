"""The OpenAI-compatible request schema: bytes in, frozen values out.

json_body          bytes -> struct, and errors that name the field
sampling_fields    what both routes share; generation: their way into Generation and Delivery
structured_outputs response_format and structured_outputs; compiled_schemas: what they must compile
unsupported_fields known, and refused
chat_messages      messages and tools; tool_choice_field: which of these are called
chat_schema, completion_schema
"""

from __future__ import annotations

from gateway.chat_schema import ChatBody, parse_chat
from gateway.completion_schema import CompletionBody, parse_completion
from gateway.sampling_fields import RequestLimits

__all__ = ["ChatBody", "CompletionBody", "RequestLimits", "parse_chat", "parse_completion"]
