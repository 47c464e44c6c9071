"""ASGI endpoints of the routes that generate and of resumable streams: what surrounds each request.

Errors before the first byte become HTTP errors, an unexpected one a 500 without details; each request
leaves one log line and is counted once.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from backend.fault_log import log_fault
from gateway.exchange import Exchange, Receive, Scope
from gateway.flow import Flow, Route
from gateway.metrics import Metrics
from gateway.outlet import ReaderLimits, Send
from gateway.record import RequestRecord
from gateway.request_log import RequestLog
from pipeline.errors import HeadraceError


@dataclass(frozen=True, slots=True)
class EdgeParts:
    """What every endpoint needs."""

    flow: Flow
    metrics: Metrics
    request_log: RequestLog
    reader: ReaderLimits


class Endpoint:
    """One route as an ASGI callable. A kind of route says what it serves, and what is remembered of it."""

    def __init__(self, parts: EdgeParts) -> None:
        self.flow = parts.flow
        self.metrics = parts.metrics
        self.request_log = parts.request_log
        self.reader = parts.reader

    async def serve(self, exchange: Exchange) -> None:
        """Answer. Raises what the request is refused with; only before anything was sent."""
        raise NotImplementedError

    def over(self, exchange: Exchange) -> None:
        """The request has been answered, or its client has gone."""
        exchange.record.buffered_peak = exchange.outlet.peak
        self.remember(exchange.record)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.reader.max_bytes)
        self.flow.in_progress.add(exchange)
        try:
            await self.serve(exchange)
        except HeadraceError as error:
            await self._refuse(exchange, error)
        except Exception as error:
            log_fault(error, exchange.record.request_id)
            await self._refuse(exchange, error)
        finally:
            self.flow.in_progress.discard(exchange)
            self.over(exchange)
            exchange.let_go()

    def remember(self, record: RequestRecord) -> None:
        """A request or a stream's answer is over: one line in the request log, and counted once."""
        now_s = time.monotonic()
        record.count(self.metrics, now_s)
        self.request_log.write(record.log_fields(now_s, time.time()))

    async def flush(self, exchange: Exchange) -> None:
        """Until the whole response has left. A client that does not even read that is cut off."""
        try:
            async with asyncio.timeout(self.reader.limit_s):
                await exchange.outlet.flushed()
        except TimeoutError:
            exchange.outlet.drop()
            exchange.close()

    async def _refuse(self, exchange: Exchange, error: Exception) -> None:
        exchange.fail(error)
        await self.flush(exchange)


class GenerationEndpoint(Endpoint):
    """A route whose answer is the generation itself."""

    def __init__(self, parts: EdgeParts, route: Route) -> None:
        super().__init__(parts)
        self._route = route

    async def serve(self, exchange: Exchange) -> None:
        await self.flow.generate(exchange, self._route)
