"""Cuts an answer's text where speech may be made of it: a text-to-speech model wants whole clauses."""

from __future__ import annotations

from typing import Literal

Unit = Literal["clause", "sentence"]


class SpeechChunker:
    """Text in, pieces out; all pieces joined are the text."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._held = ""

    def feed(self, text: str) -> list[str]:
        """The pieces that are whole with this text."""
        self._held += text
        at = self._held.rfind(" ") + 1
        pieces = [self._held[:at]] if at else []
        self._held = self._held[at:]
        return pieces

    def flush(self) -> str:
        """What is left at the end of the text."""
        held, self._held = self._held, ""
        return held
