"""What uvicorn and `websockets` log of a WebSocket, which is nothing: it may hold keys or user text."""

from __future__ import annotations

import logging
import sys
from typing import Any

from backend.fault_log import log_fault


class QuietLog(logging.LoggerAdapter[logging.Logger]):
    """Drops lines about paths with their queries, frames, and the bytes of malformed text. Of an unexpected
    error the place is logged."""

    level = logging.CRITICAL

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - logging's name
        return False

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        error = sys.exc_info()[1]
        if level >= logging.ERROR and isinstance(error, Exception):
            log_fault(error, "none")
