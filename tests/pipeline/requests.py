"""Requests as the schema makes them, with as few words as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.values import ChatRequest, CompletionRequest, Delivery, Generation


def generation(**fields: Any) -> Generation:
    return Generation(**{"sampling": {}, **fields})


def chat(content: Any = "hi", gen: Generation | None = None, **fields: Any) -> ChatRequest:
    """A chat of one user message, or of the `messages` given."""
    fields.setdefault("messages", [{"role": "user", "content": content}])
    return ChatRequest(model="m", generation=gen or generation(), delivery=Delivery(), **fields)


def completion(
    *prompts: str | Sequence[int], gen: Generation | None = None, **fields: Any
) -> CompletionRequest:
    return CompletionRequest(
        model="m", prompts=prompts, generation=gen or generation(), delivery=Delivery(), **fields
    )
