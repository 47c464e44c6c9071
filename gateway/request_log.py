"""One JSON line per request, without text: who, what, how long, and who ended it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

import msgspec

_encode = msgspec.json.Encoder().encode


class RequestLog:
    """Writes lines to a text stream; a broken stream (a closed pipe) loses lines, never a request."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.num_lost = 0

    def write(self, fields: Mapping[str, Any]) -> None:
        try:
            self._stream.write(_encode(fields).decode() + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self.num_lost += 1
