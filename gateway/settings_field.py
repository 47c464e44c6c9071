"""What is told of one setting beyond its type and default, and the commands that take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SERVE: Final = "serve"
GATEWAY: Final = "gateway"
WORKER: Final = "worker"
EDGE: Final = frozenset({SERVE, GATEWAY})
ENGINE: Final = frozenset({SERVE, WORKER})
BOTH: Final = frozenset({GATEWAY, WORKER})
ALL: Final = frozenset({SERVE, GATEWAY, WORKER})


@dataclass(frozen=True, slots=True)
class About:
    """What a field's type and default do not say. `commands` None means those of the group."""

    help: str
    unit: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    secret: bool = False
    is_file: bool = False  # must exist when the process starts
    file_only: bool = False  # too rich for a flag or a variable; read by gateway/prompt_settings.py
    flags: tuple[str, ...] = ()  # further spellings: what vLLM or uvicorn call it
    commands: frozenset[str] | None = None
