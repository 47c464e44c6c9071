"""The ASGI endpoints of the generation routes: what surrounds a request whatever its kind.

Errors before the first byte become HTTP errors, an unexpected one a 500 without details; each request
leaves one log line and is counted once.
"""

from __future__ import annotations

import asyncio
import time

from backend.fault_log import log_fault
from gateway.exchange import Exchange, Receive, Scope
from gateway.flow import Flow, Route
from gateway.metrics import Metrics
from gateway.outlet import ReaderLimits, Send
from gateway.request_log import RequestLog
from pipeline.errors import HeadraceError


class GenerationEndpoint:
    """One generation route as an ASGI callable."""

    def __init__(
        self,
        flow: Flow,
        route: Route,
        metrics: Metrics,
        request_log: RequestLog,
        reader: ReaderLimits,
    ) -> None:
        self._flow = flow
        self._route = route
        self._metrics = metrics
        self._request_log = request_log
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._reader.max_bytes)
        self._flow.in_progress.add(exchange)
        try:
            await self._flow.generate(exchange, self._route)
        except HeadraceError as error:
            await self._refuse(exchange, error)
        except Exception as error:
            log_fault(error, exchange.record.request_id)
            await self._refuse(exchange, error)
        finally:
            self._flow.in_progress.discard(exchange)
            self._remember(exchange)

    async def _refuse(self, exchange: Exchange, error: Exception) -> None:
        """Answer with an error. A client that does not even read that is cut off."""
        exchange.fail(error)
        try:
            async with asyncio.timeout(self._reader.limit_s):
                await exchange.outlet.flushed()
        except TimeoutError:
            exchange.outlet.drop()
            exchange.close()

    def _remember(self, exchange: Exchange) -> None:
        record, now_s = exchange.record, time.monotonic()
        record.buffered_peak = exchange.outlet.peak
        record.count(self._metrics, now_s)
        self._request_log.write(record.log_fields(now_s, time.time()))
