"""What rules have found, told once per hit: a line for the audit, a count for the metrics. Never the text.

A line is written when the hit is certain, not when its request ends, so that a crash loses none but the last.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from filters.hit import Hit
from gateway.metrics import Metrics
from gateway.record import RequestRecord
from gateway.request_log import RequestLog

TO_REQUEST_LOG: Final = "log"
OFF: Final = "off"


def audit_log(where: str, request_log: RequestLog) -> RequestLog | None:
    """Where audit lines go: into the request log, nowhere, or to the end of a file. Raises `OSError` for one
    that cannot be opened.
    """
    if where == OFF:
        return None
    if where == TO_REQUEST_LOG:
        return request_log
    return RequestLog(Path(where).expanduser().open("a", encoding="utf-8"))


class Lines(Protocol):
    """Takes lines without waiting. `gateway.request_log.RequestLog` is one."""

    def write(self, fields: Mapping[str, Any]) -> None: ...


class Audit:
    """`log`: where lines go; None counts only."""

    def __init__(self, metrics: Metrics, log: Lines | None) -> None:
        self._metrics = metrics
        self._log = log

    def hit(
        self, record: RequestRecord, direction: str, channel: str, hit: Hit, choice: int | None = None
    ) -> None:
        """A rule has matched in a request's prompt (`input`) or in one choice of its answer (`output`)."""
        record.rule_hits += 1
        action = "shadow" if hit.shadow else hit.action
        self._metrics.hits.labels(hit.rule_id, direction, channel, action).inc()
        if self._log is None:
            return
        self._log.write(
            {
                "event": "rule_hit",
                "time": round(time.time(), 3),
                "id": record.request_id,
                "key": record.key_id,
                "model": record.model,
                "rule": hit.rule_id,
                "action": hit.action,
                "shadow": hit.shadow,
                "direction": direction,
                "channel": channel,
                "choice": choice,
                "start": hit.start,
                "end": hit.end,
            }
        )
