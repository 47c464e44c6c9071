"""How an unexpected error is logged: where it happened, never its message, which may quote user text."""

from __future__ import annotations

import logging
import traceback

log = logging.getLogger("headrace.fault")


def log_fault(error: BaseException, request_id: str = "unknown") -> None:
    """One entry with the innermost frames of an error that nobody raised on purpose."""
    place = "".join(traceback.format_tb(error.__traceback__)[-3:])
    log.error("request %s: unexpected %s at\n%s", request_id, type(error).__name__, place)
