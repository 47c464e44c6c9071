"""What is to be asked: a conversation of one turn or more, in which the server's own answers stand between.

Not here: where it comes from (`gateway/bench/prompts.py`, `gateway/bench/dataset.py`), the HTTP request
(`gateway/bench/client.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user adds. `prompt_tokens`: how long it is meant to be, 0 where nobody has said."""

    messages: Sequence[Message]
    prompt_tokens: int = 0
    output_tokens: int | None = None  # None: the server's own limit


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: Sequence[Turn]


def as_text(messages: Sequence[Message]) -> str:
    """For servers' `/v1/completions`: the contents alone, for a template is the model's own affair."""
    return "\n\n".join(str(message["content"]) for message in messages)
