"""What a detector reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule matched text[start:end], raw characters from the start of the text. Never holds the text."""

    rule_id: str
    action: str  # flag, mask, redact or block
    start: int
    end: int
    shadow: bool = False
