"""The ASGI endpoints of the generation routes: what surrounds a request whatever its kind.

Errors before the first byte become HTTP errors, an unexpected one a 500 without details; each request
leaves one log line and is counted once.
"""

from __future__ import annotations

import time

from backend.fault_log import log_fault
from gateway.exchange import Exchange, Receive, Scope
from gateway.flow import Flow, Route
from gateway.metrics import Metrics
from gateway.outlet import Send
from gateway.request_log import RequestLog
from pipeline.errors import HeadraceError


class GenerationEndpoint:
    """One generation route as an ASGI callable."""

    def __init__(
        self, flow: Flow, route: Route, metrics: Metrics, request_log: RequestLog, max_buffered_bytes: int
    ) -> None:
        self._flow = flow
        self._route = route
        self._metrics = metrics
        self._request_log = request_log
        self._max_buffered_bytes = max_buffered_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._max_buffered_bytes)
        self._flow.num_in_progress += 1
        try:
            await self._flow.generate(exchange, self._route)
        except HeadraceError as error:
            exchange.fail(error)
            await exchange.outlet.flushed()
        except Exception as error:
            log_fault(error, exchange.record.request_id)
            exchange.fail(error)
            await exchange.outlet.flushed()
        finally:
            self._flow.num_in_progress -= 1
            self._remember(exchange)

    def _remember(self, exchange: Exchange) -> None:
        record, now_s = exchange.record, time.monotonic()
        record.buffered_peak = exchange.outlet.peak
        record.count(self._metrics, now_s)
        self._request_log.write(record.log_fields(now_s, time.time()))
