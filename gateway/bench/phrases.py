"""Pieces of sentences that the load test's notes, report and messages have in common.

Not here: numbers in the report (`gateway/bench/rows.py`).
"""

from __future__ import annotations

from typing import Final

_MAX_READ: Final = 1 << 16  # characters of what a server wrote that are looked at


def counted(count: int, noun: str) -> str:
    """1 request, 2,000 requests."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def one_line(text: str) -> str:
    """What a server wrote, without line breaks and control characters: it may go to a terminal."""
    return " ".join("".join(each if each.isprintable() else " " for each in text[:_MAX_READ]).split())
