"""What a detector reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CHANGING: Final = ("mask", "redact", "block")


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule matched text[start:end], raw characters from the start of the text. Never holds the text."""

    rule_id: str
    action: str  # flag, mask, redact or block
    start: int
    end: int
    shadow: bool = False

    @property
    def is_active(self) -> bool:
        """Whether the matched text does not leave as it is."""
        return not self.shadow and self.action in CHANGING
