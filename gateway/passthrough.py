"""Routes that Headrace does not serve itself, passed on to an upstream server: `/v1/embeddings` and the like.

Behind the keys and the limits of the body like every other route; the bytes of both bodies are left as they
are. A response streams with backpressure, and a client that leaves ends its request at the upstream. What of
the heads crosses: `gateway/passthrough_head.py`. Which upstream: `choose`, which `gateway/app.py` makes.

Before the response has begun, a fault of the upstream is an error as any other; after it, the connection is
cut, since only that tells a client that a body is not whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from backend.http_call import HttpTimeout
from backend.http_ports import Headers, HttpCall, HttpFault, HttpRequest
from backend.silence import Silence
from backend.upstream_faults import KEY_STATUSES, UpstreamFault, bad_key
from gateway.answer import COMPLETE
from gateway.cors import RESPONSE_HEADERS
from gateway.edge import EdgeParts, Endpoint
from gateway.exchange import Exchange, Receive, Scope
from gateway.flow import BodyLimits
from gateway.keys import ApiKeys
from gateway.outlet import Send, nothing
from gateway.passthrough_head import (
    METHODS,
    WITHOUT_TEXT,
    MethodNotPassed,
    NotPassed,
    may_be_another_sites,
    model_of,
    request_headers,
    response_headers,
    route_of,
    target_of,
)
from gateway.passthrough_ports import Choose, Place, Sender
from gateway.record import RequestRecord
from pipeline.errors import (
    ClientGone,
    Draining,
    HeadraceError,
    InvalidRequest,
    WorkerLost,
    WorkerStalled,
)

# A read of the upstream's socket is 256 KiB, and one more may be under way when its reading is paused.
MIN_BUFFERED_BYTES: Final = 1 << 20


class Passthrough:
    """ASGI app of `/v1/*`. `has_rules`: content rules are in force, which see nothing of what is passed.

    Then only routes without text in their answers are passed. `head_limit_s`: until a response's head;
    `silence_limit_s`: between its bytes.
    """

    def __init__(
        self,
        parts: EdgeParts,
        keys: ApiKeys,
        body: BodyLimits,
        http: Sender,
        choose: Choose,
        has_rules: Callable[[], bool],
        head_limit_s: float,
        silence_limit_s: float,
    ) -> None:
        max_bytes = max(parts.reader.max_bytes, MIN_BUFFERED_BYTES)
        self.parts = replace(parts, reader=replace(parts.reader, max_bytes=max_bytes))
        self.keys = keys
        self.body = body
        self.http = http
        self.choose = choose
        self.has_rules = has_rules
        self.head_limit_s = head_limit_s
        self.silence_limit_s = silence_limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _Passed(self, scope)(scope, receive, send)


class _Passed(Endpoint):
    """One passed request."""

    def __init__(self, owner: Passthrough, scope: Scope) -> None:
        super().__init__(owner.parts)
        self._owner = owner
        self._method: str = scope["method"]
        self._raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        self._headers: Headers = scope["headers"]
        self._cors: Headers = scope.get(RESPONSE_HEADERS, ())
        self._num_body_bytes = 0
        self._passage: _Passage | None = None

    async def serve(self, exchange: Exchange) -> None:
        record, owner = exchange.record, self._owner
        record.route = route_of(exchange.path)
        record.key_id = owner.keys.check(exchange.headers)
        target = self._checked(exchange)
        body = await exchange.read_body(owner.body.max_bytes, owner.body.limit_s)
        self._num_body_bytes = len(body)
        model = model_of(exchange.headers.get(b"content-type", b""), body)
        place = owner.choose(model)
        try:
            upstream = place.target
            record.worker, record.model = upstream.name, model or ""
            headers = request_headers(self._headers, upstream.headers, record.request_id)
            request = HttpRequest(self._method, upstream.prefix + target, headers, body)
            limits_s = self.reader.limit_s, owner.silence_limit_s
            passage = self._passage = _Passage(exchange, place, *limits_s)
            await self._pass(exchange, passage, request)
        finally:
            place.release()
        await self.flush(exchange)

    def _checked(self, exchange: Exchange) -> str:
        """The target, if such a request is passed on at all. Raises what is wrong with it."""
        owner, path = self._owner, exchange.path
        if self._method not in METHODS:
            raise MethodNotPassed(self._method)
        target = target_of(self._raw_path, exchange.query_string)
        if path not in WITHOUT_TEXT and owner.has_rules():
            raise NotPassed(
                f"{path[:80]!r} is not passed on while content rules are in force: they see nothing of it."
            )
        if exchange.record.key_id is None and may_be_another_sites(self._method, self._headers, self._cors):
            raise InvalidRequest("A page of another site may send nothing but JSON here.", "content-type")
        if self.flow.is_draining:
            raise Draining
        return target

    async def _pass(self, exchange: Exchange, passage: _Passage, request: HttpRequest) -> None:
        """Until the response is over. Raises what the request fails with; only before anything was sent."""
        owner = self._owner
        passage.call = call = owner.http.send(passage.upstream.origin, request, passage, owner.head_limit_s)
        try:
            await exchange.unless_gone(passage.over)
        except HeadraceError as error:
            if isinstance(error, ClientGone) and not passage.has_failed:
                error = ClientGone("closed the connection")
            if not exchange.record.status:
                raise error from None
            passage.broke(error)
            await asyncio.sleep(0)  # or uvicorn, which hears of the cut then, would log an error of ours
        finally:
            call.abort()
            passage.let_go()

    def remember(self, record: RequestRecord) -> None:
        """Without what only generations have: tokens, their times, and how they ended."""
        self.metrics.requests.labels(record.route, str(record.status), record.ended).inc()
        passage = self._passage
        self.request_log.write(
            {
                "time": round(time.time(), 3),
                "event": "passed",
                "id": record.request_id,
                "route": record.route,
                "client": record.client,
                "key": record.key_id,
                "model": record.model,
                "worker": record.worker,
                "status": record.status,
                "request_bytes": self._num_body_bytes,
                "response_bytes": 0 if passage is None else passage.num_bytes,
                "total_ms": round((time.monotonic() - record.started_s) * 1e3, 3),
                "ended": record.ended,
                "detail": record.detail,
                "buffered_peak_bytes": record.buffered_peak,
            }
        )


class _Passage:
    """Receives the upstream's response and hands it to the client. `over` ends with it, or with its error."""

    def __init__(
        self, exchange: Exchange, place: Place, reader_limit_s: float, silence_limit_s: float
    ) -> None:
        self.upstream = place.target
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call: HttpCall | None = None
        self.num_bytes = 0
        self.has_failed = False
        self._place = place
        self._exchange = exchange
        self._outlet = exchange.outlet
        self._reader_limit_s = reader_limit_s
        self._slow: asyncio.TimerHandle | None = None  # while the client does not read
        self._silence = Silence(self._silent)  # of the upstream, from its response's head on
        self._silence_limit_s = silence_limit_s
        exchange.on_gone = self._gone
        self._outlet.on_flushed = self._flushed

    def let_go(self) -> None:
        """It is over: what is left in the outlet is the endpoint's."""
        self._read_again()
        self._silence.stop()
        self._outlet.on_flushed = nothing

    # -- backend.http_ports.Receiver -------------------------------------------------------------------------

    def begun(self, status: int, headers: Headers) -> None:
        record = self._exchange.record
        self._place.begun(status)
        if status in KEY_STATUSES:
            self._fail(UpstreamFault(bad_key(self.upstream.name, status)))
            return
        record.status = status
        self._silence.start(self._silence_limit_s)
        own = self.upstream.headers
        self._outlet.start(status, response_headers(headers, record.request_id, status, own))
        self._wait_if_slow()

    def data(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._silence.broken()
        self._outlet.push(data)
        self._wait_if_slow()

    def ended(self) -> None:
        record = self._exchange.record
        record.ended = record.ended or COMPLETE
        if not self.over.done():
            self.over.set_result(None)
        self._outlet.end()

    def failed(self, fault: HttpFault) -> None:
        message = f"upstream {self.upstream.name}: {fault}"
        if isinstance(fault, HttpTimeout):
            self._fail(WorkerStalled(message))
            return
        lost = WorkerLost(message)
        if not fault.began:
            self._place.lost(lost)
        self._fail(lost)

    # -- ends ------------------------------------------------------------------------------------------------

    def broke(self, error: HeadraceError) -> None:
        """Cut a response that has begun. The client must not take it for a whole one."""
        record = self._exchange.record
        record.ended = record.ended or error.code or error.type
        record.detail = record.detail or error.log_detail
        self._outlet.drop()
        self._exchange.close()

    def _fail(self, error: HeadraceError) -> None:
        if self.over.done():
            return
        self.has_failed = True
        self.over.set_exception(error)
        if self.call is not None:
            self.call.abort()  # or the rest of this read would come

    def _silent(self, limit_s: float) -> None:
        if self._slow is not None:  # it is held back
            self._silence.start(limit_s)
            return
        name = self.upstream.name
        self._fail(WorkerStalled(f"upstream {name} sent nothing for {limit_s:g} s within its response"))

    def _gone(self, reason: str) -> None:
        self._fail(ClientGone(reason))

    # -- a client that does not read -------------------------------------------------------------------------

    def _wait_if_slow(self) -> None:
        if self._outlet.blocked_since_s is None or self._slow is not None or self.call is None:
            return
        self.call.pause()
        self._slow = asyncio.get_running_loop().call_later(self._reader_limit_s, self._too_slow)

    def _flushed(self) -> None:
        if self._slow is not None and self.call is not None:
            self._read_again()
            self.call.resume()

    def _read_again(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _too_slow(self) -> None:
        self._gone(f"has not read for {self._reader_limit_s:g} s; that is the limit")
