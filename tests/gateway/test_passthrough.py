"""Passed requests over real sockets: a client, the gateway's HTTP protocol, our HTTP client, an upstream."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from backend.http_client import HttpClient, HttpLimits
from backend.http_ports import HttpFault, HttpRequest, Origin
from backend.silence import Silence
from gateway.cors import RESPONSE_HEADERS
from gateway.edge import EdgeParts
from gateway.flow import BodyLimits
from gateway.keys import ApiKeys
from gateway.metrics import Metrics
from gateway.outlet import ReaderLimits
from gateway.passthrough import Passthrough
from gateway.passthrough_ports import UpstreamTarget
from gateway.request_log import RequestLog
from pipeline.errors import Draining, NoWorker, UnknownModel, WorkerLost
from tests.backend.http_server import Kept, Peer, Script, Served, serving
from tests.backend.long_body import LongBody
from tests.gateway.asgi import Request, served, slow_client

LIMIT_S = 60.0  # of what must happen: no test waits for it
EMBEDDINGS = "/v1/embeddings"
JSON = (b"content-type", b"application/json")
BODY = b'{"model": "m", "input": "xylophone"}'
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"


class HeldPlace:
    """What it was told, in order."""

    def __init__(self, target: UpstreamTarget) -> None:
        self.target = target
        self.told: list[str] = []

    def begun(self, status: int) -> None:
        self.told.append(f"begun {status}")

    def lost(self, error: WorkerLost) -> None:
        self.told.append("lost")

    def release(self) -> None:
        self.told.append("released")


class Service:
    """A gateway of passed routes, on a port, before one upstream that does what a script says."""

    def __init__(
        self,
        origin: Origin,
        keys: list[str],
        reader: ReaderLimits,
        head_limit_s: float,
        has_rules: bool,
        body: BodyLimits,
        prefix: str,
    ) -> None:
        self._log = io.StringIO()
        self._request_log = RequestLog(self._log)
        self.flow: Any = SimpleNamespace(in_progress=set(), is_draining=False)
        self.metrics = Metrics()
        self.http = HttpClient()
        self.client = HttpClient()
        self.port = 0
        self.models: list[str | None] = []
        self.places: list[HeldPlace] = []
        self.target: UpstreamTarget | None = UpstreamTarget(
            origin, prefix, [(b"authorization", b"Bearer upstream-key")], "openai+http://up:1"
        )
        self.app = Passthrough(
            EdgeParts(self.flow, self.metrics, self._request_log, reader),
            ApiKeys(keys),
            body,
            self.http,
            self._choose,
            lambda: has_rules,
            head_limit_s,
            silence_limit_s=LIMIT_S,
        )

    def _choose(self, model: str | None) -> HeldPlace:
        self.models.append(model)
        if self.target is None:
            raise NoWorker("No upstream server is ready.")
        if model not in (None, "m"):
            raise UnknownModel(model, ("m",))
        self.places.append(HeldPlace(self.target))
        return self.places[-1]

    @property
    def origin(self) -> Origin:
        return Origin("127.0.0.1", self.port)

    async def ask(
        self,
        target: str = EMBEDDINGS,
        body: bytes = BODY,
        method: str = "POST",
        headers: Any = (JSON,),
    ) -> tuple[int, dict[str, str], bytes]:
        response = await self.client.fetch(
            self.origin, HttpRequest(method, target, headers, body), LIMIT_S, 1 << 30
        )
        found = {name.decode(): value.decode() for name, value in response.headers}
        return response.status, found, response.body

    async def refused(self, **request: Any) -> tuple[int, str]:
        """Status and code of an error in OpenAI's shape."""
        status, headers, body = await self.ask(**request)
        error = json.loads(body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert headers["x-request-id"]
        return status, error["code"] or error["type"]

    @property
    def log(self) -> str:
        self._request_log.flush()
        return self._log.getvalue()

    async def line(self) -> dict[str, Any]:
        """The last line of the request log, once nothing is in progress."""
        async with asyncio.timeout(LIMIT_S):
            while self.flow.in_progress:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return json.loads(self.log.splitlines()[-1])

    def num_counted(self, **labels: str) -> float:
        return self.metrics.registry.get_sample_value("headrace_requests_total", labels) or 0.0


@asynccontextmanager
async def passing(script: Script, **options: Any) -> AsyncIterator[tuple[Service, Served]]:
    defaults: dict[str, Any] = {
        "keys": [],
        "reader": ReaderLimits(),
        "head_limit_s": LIMIT_S,
        "has_rules": False,
        "body": BodyLimits(1 << 20, LIMIT_S),
        "prefix": "",
    }
    async with serving(script) as upstream:
        service = Service(upstream.origin, **(defaults | options))
        async with served(service.app) as service.port:
            try:
                yield service, upstream
            finally:
                await service.client.close()
                await service.http.close()
        assert not service.flow.in_progress


async def echo(peer: Peer, number: int) -> None:
    """Answers each request with what it was."""
    while True:
        line, headers, body = await peer.request()
        said = json.dumps([line, headers, body.hex()]).encode()
        await peer.answer(said, b"HTTP/1.1 200 OK\r\ncontent-type: application/json")


async def until(is_true: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_request_goes_to_the_upstream_and_its_response_comes_back() -> None:
    async with passing(echo, keys=["secret"], prefix="/base") as (service, _):
        headers = [JSON, (b"authorization", b"Bearer secret"), (b"cookie", b"a=b"), (b"x-request-id", b"abc")]
        status, found, body = await service.ask("/v1/embeddings?a=%20b", BODY, "POST", headers)
        line, sent, echoed = json.loads(body)
        assert (status, found["content-type"], found["x-request-id"]) == (200, "application/json", "abc")
        assert line == "POST /base/v1/embeddings?a=%20b HTTP/1.1"
        assert bytes.fromhex(echoed) == BODY
        assert (sent["authorization"], sent["x-request-id"]) == ("Bearer upstream-key", "abc")
        assert "cookie" not in sent
        assert "secret" not in body.decode()
        assert service.models == ["m"]


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH"])
async def test_methods_are_kept(method: str) -> None:
    async with passing(echo) as (service, _):
        _, _, body = await service.ask("/v1/files/f", b"", method, ())
        assert json.loads(body)[0] == f"{method} /v1/files/f HTTP/1.1"
        assert service.models == [None]


async def test_head_has_the_length_and_no_body() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        await peer.gone()

    async with passing(script) as (service, _):
        status, headers, body = await service.ask("/v1/files/f", b"", "HEAD", ())
        assert (status, headers["content-length"], body) == (200, "5", b"")
        assert (await service.line())["ended"] == "complete"


async def test_other_methods_are_refused() -> None:
    async with passing(echo) as (service, upstream):
        for method in ("OPTIONS", "TRACE", "PROPFIND"):
            assert await service.refused(method=method) == (405, "method_not_allowed")
        assert not upstream.peers


async def test_openais_client_gets_its_embeddings() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        data = [{"object": "embedding", "index": 0, "embedding": [0.25, 0.5]}]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        body = json.dumps({"object": "list", "data": data, "model": "m", "usage": usage}).encode()
        await peer.answer(body, b"HTTP/1.1 200 OK\r\ncontent-type: application/json")
        await peer.gone()

    async with passing(script, keys=["secret"]) as (service, _):
        base = f"http://127.0.0.1:{service.port}/v1"
        async with openai.AsyncOpenAI(api_key="secret", base_url=base, max_retries=0) as client:
            found = await client.embeddings.create(model="m", input="a", encoding_format="float")
            assert found.data[0].embedding == [0.25, 0.5]


async def test_multipart_and_binary_bodies_are_not_touched() -> None:
    async with passing(echo) as (service, _):
        sound = random.Random(1).randbytes(100_000)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{service.port}") as client:
            asked = client.build_request(
                "POST", "/v1/audio/transcriptions", files={"file": ("a.wav", sound)}, data={"model": "m"}
            )
            sent = await asked.aread()
            response = await client.send(asked)
        _, headers, echoed = response.json()
        assert bytes.fromhex(echoed) == sent
        assert headers["content-type"] == asked.headers["content-type"]
        _, _, body = await service.ask(
            "/v1/x", sound, headers=[(b"content-type", b"application/octet-stream")]
        )
        assert bytes.fromhex(json.loads(body)[2]) == sound
        assert service.models == [None, None]


@pytest.mark.parametrize("status", [200, 400, 404, 429, 500, 503])
async def test_statuses_and_bodies_of_the_upstream_are_passed_as_they_are(status: int) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.answer(b"its own words", b"HTTP/1.1 %d X\r\nretry-after: 7" % status)

    async with passing(script) as (service, _):
        found, headers, body = await service.ask()
        assert (found, headers["retry-after"], body) == (status, "7", b"its own words")
        line = await service.line()
        assert (line["status"], line["ended"], line["response_bytes"]) == (status, "complete", 13)
        assert service.places[0].told == [f"begun {status}", "released"]


@pytest.mark.parametrize("status", [204, 304])
async def test_a_response_without_a_body_leaves_the_connection_of_use(status: int) -> None:
    async def script(peer: Peer, number: int) -> None:
        for _ in range(2):
            await peer.request()
            await peer.say(b"HTTP/1.1 %d X\r\ncontent-length: 5\r\nx-key: upstream-key\r\n\r\n" % status)
        await peer.gone()

    async with passing(script) as (service, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        for _ in range(2):
            writer.write(f"GET {EMBEDDINGS} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert b"content-length" not in head
            assert b"upstream-key" not in head
        writer.close()


async def test_a_redirect_is_passed_without_the_address_that_only_the_gateway_can_reach() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.answer(b"", b"HTTP/1.1 307 X\r\nlocation: http://inner:8000/v1/x")

    async with passing(script) as (service, _):
        status, headers, _ = await service.ask()
        assert status == 307
        assert "location" not in headers


@pytest.mark.parametrize("status", [401, 403])
async def test_an_upstream_that_refuses_our_key_is_no_fault_of_the_client(status: int) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.answer(b"bad key", b"HTTP/1.1 %d X" % status)

    async with passing(script) as (service, _):
        assert await service.refused() == (502, "engine_failed")
        line = await service.line()
        assert f"refuses this gateway's key (HTTP {status})" in line["detail"]
        assert line["response_bytes"] == 0


async def test_a_stream_is_passed_read_by_read() -> None:
    steps = asyncio.Queue[bytes]()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(CHUNKED)
        while event := await steps.get():
            await peer.say(b"%x\r\n%b\r\n" % (len(event), event))
        await peer.say(b"0\r\n\r\n")
        await peer.gone()

    async with passing(script) as (service, _):
        receiver = Kept()
        service.client.send(service.origin, HttpRequest("POST", EMBEDDINGS, [JSON], BODY), receiver)
        await receiver.has_begun.wait()
        for number in range(20):
            receiver.has_data.clear()
            steps.put_nowait(b"data: %d\n\n" % number)
            await receiver.has_data.wait()
            assert receiver.body.endswith(b"data: %d\n\n" % number)
        steps.put_nowait(b"")
        await receiver.over.wait()
        assert receiver.end == "ended"
        assert len(receiver.parts) == 20
        line = await service.line()
        assert (line["ended"], line["response_bytes"]) == ("complete", len(receiver.body))
        assert service.http.num_idle == 1


@pytest.mark.parametrize("phase", ["before", "head", "body"])
async def test_a_client_that_leaves_ends_its_request_at_the_upstream(phase: str) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        asked.set()
        if phase != "before":
            await peer.say(CHUNKED)
        if phase == "body":
            await peer.say(b"2\r\nhi\r\n")
        await peer.gone()
        gone.set()

    async with passing(script) as (service, _):
        receiver = Kept()
        call = service.client.send(service.origin, HttpRequest("POST", EMBEDDINGS, [JSON], BODY), receiver)
        await {"before": asked, "head": receiver.has_begun, "body": receiver.has_data}[phase].wait()
        call.abort()
        async with asyncio.timeout(LIMIT_S):
            await gone.wait()
        line = await service.line()
        assert (line["ended"], line["detail"]) == ("client_closed", "closed the connection")
        assert line["status"] == (499 if phase == "before" else 200)
        assert service.places[0].told == ["begun 200"] * (phase != "before") + ["released"]


async def test_a_slow_client_holds_the_upstream_back_and_loses_nothing() -> None:
    long = LongBody(16 << 20)
    async with passing(long) as (service, upstream):
        request = Request("/v1/files/f", method="GET")
        task = request.start(service.app)
        await until(lambda: len(request.client.messages) > 1)
        request.client.stops_reading()
        async with asyncio.timeout(LIMIT_S):
            await upstream.peers[0].stuck()
        assert long.num_sent < len(long.body)
        request.client.reads_again()
        async with asyncio.timeout(LIMIT_S):
            await task
        assert b"".join(message.get("body", b"") for message in request.client.messages) == long.body
        line = await service.line()
        assert line["ended"] == "complete"
        assert line["buffered_peak_bytes"] <= 1 << 19


async def test_a_client_that_is_slow_from_the_start_gets_all_of_the_first_read() -> None:
    body = bytes(200_000)

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.answer(body)
        await peer.gone()

    async with passing(script, reader=ReaderLimits(1 << 16, LIMIT_S)) as (service, _):
        request = Request("/v1/files/f", method="GET")
        request.client.stops_reading()
        task = request.start(service.app)
        await until(lambda: any(each.outlet.blocked_since_s for each in service.flow.in_progress))
        request.client.reads_again()
        async with asyncio.timeout(LIMIT_S):
            await task
        assert b"".join(message.get("body", b"") for message in request.client.messages) == body


async def test_a_client_that_was_slow_once_is_not_cut_off_later() -> None:
    has_waited = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(CHUNKED + b"2\r\nhi\r\n")
        await has_waited.wait()
        await peer.say(b"2\r\nyo\r\n0\r\n\r\n")
        await peer.gone()

    async def read_late(limit_s: float) -> bool:
        """False: the machine was too busy for this limit."""
        async with passing(script, reader=ReaderLimits(1 << 16, limit_s)) as (service, _):
            request = Request("/v1/files/f", method="GET")
            request.client.stops_reading()
            task = request.start(service.app)
            await until(
                lambda: task.done() or any(each.outlet.blocked_since_s for each in service.flow.in_progress)
            )
            request.client.reads_again()
            await until(lambda: task.done() or len(request.client.messages) > 1)
            if task.done():
                return False
            await asyncio.sleep(1.5 * limit_s)  # of the loop whose timer would be due before
            has_waited.set()
            async with asyncio.timeout(LIMIT_S):
                await task
            assert (await service.line())["ended"] == "complete"
            return True

    limit_s = 0.05
    while not await read_late(limit_s):
        limit_s *= 2


async def test_a_client_whose_connection_breaks_while_it_is_written_to_ends_its_request() -> None:
    gone = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(CHUNKED + b"2\r\nhi\r\n")
        await peer.gone()
        gone.set()

    async with passing(script) as (service, _):
        request = Request("/v1/files/f", method="GET")
        request.client.error = ConnectionResetError("reset")
        task = request.start(service.app)
        async with asyncio.timeout(LIMIT_S):
            await gone.wait()
            await task
        assert (await service.line())["ended"] == "client_closed"


async def test_a_client_that_never_reads_is_cut_off() -> None:
    gone = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(CHUNKED)
        try:
            while True:
                await peer.say(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
        finally:
            gone.set()

    async with passing(script, reader=ReaderLimits(1 << 16, 0.2)) as (service, _):
        client = slow_client(service.port, b"GET /v1/files/f HTTP/1.1\r\nhost: x\r\n\r\n")
        try:
            async with asyncio.timeout(LIMIT_S):
                await gone.wait()
            line = await service.line()
        finally:
            client.close()
        assert (line["ended"], line["status"]) == ("client_closed", 200)
        assert line["detail"] == "has not read for 0.2 s; that is the limit"


@pytest.mark.parametrize(
    "response", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\na: " + b"a" * 70_000]
)
async def test_an_upstream_that_fails_before_its_response_is_a_502(response: bytes) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(response)

    async with passing(script) as (service, _):
        assert await service.refused() == (502, "worker_lost")
        line = await service.line()
        assert (line["status"], line["ended"]) == (502, "worker_lost")
        assert line["detail"].startswith("upstream openai+http://up:1: ")
        assert service.places[0].told == ["lost"] * (response == b"") + ["released"]


async def test_no_upstream_at_its_address_is_a_502(unused_tcp_port: int) -> None:
    async with passing(echo) as (service, _):
        service.target = UpstreamTarget(Origin("127.0.0.1", unused_tcp_port))
        assert await service.refused() == (502, "worker_lost")


async def test_an_upstream_that_does_not_take_connections_in_time_is_a_504() -> None:
    async with passing(echo) as (service, _):
        service.app.http = slow = HttpClient(HttpLimits(connect_s=0.0))
        assert await service.refused() == (504, "worker_stalled")
        assert service.places[0].told == ["released"]
        await slow.close()


async def test_the_heads_limit_is_not_the_bodys() -> None:
    has_waited = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(CHUNKED + b"2\r\nhi\r\n")
        await has_waited.wait()
        await peer.say(b"0\r\n\r\n")
        await peer.gone()

    async with passing(script) as (service, _):
        receiver, limit_s = Kept(), 0.02
        while receiver.status != 200:  # a busy machine needs longer
            receiver, limit_s = Kept(), limit_s * 2
            service.app.head_limit_s = limit_s
            service.client.send(service.origin, HttpRequest("POST", EMBEDDINGS, [JSON], BODY), receiver)
            await receiver.has_begun.wait()
        await asyncio.sleep(1.5 * limit_s)  # of the loop whose timer would be due before
        has_waited.set()
        await receiver.over.wait()
        assert receiver.end == "ended"


async def test_an_upstream_that_falls_silent_within_its_response_is_cut_off_and_its_place_is_free() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(CHUNKED + b"2\r\nhi\r\n")
        await peer.gone()

    async with passing(script) as (service, _):
        service.app.silence_limit_s = 0.05
        receiver = Kept()
        service.client.send(service.origin, HttpRequest("POST", EMBEDDINGS, [JSON], BODY), receiver)
        await receiver.over.wait()
        assert (receiver.end, receiver.body) == ("failed", b"hi")
        line = await service.line()
        assert (line["status"], line["ended"]) == (200, "worker_stalled")
        assert "sent nothing for 0.05 s within its response" in line["detail"]
        assert service.places[0].told == ["begun 200", "released"]


async def test_an_upstream_that_a_slow_client_holds_back_is_not_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[float] = []
    start = Silence.start
    was_too_long = asyncio.Event()

    def counted(silence: Silence, limit_s: float) -> None:
        starts.append(limit_s)
        if len(starts) > 3:  # at the response's head, and then each time that the limit is passed
            was_too_long.set()
        start(silence, LIMIT_S if was_too_long.is_set() else limit_s)

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (8 << 20) + bytes(8 << 20))

    monkeypatch.setattr(Silence, "start", counted)
    async with passing(script) as (service, _):
        service.app.silence_limit_s = 0.05
        receiver = Kept()
        call = service.client.send(service.origin, HttpRequest("POST", EMBEDDINGS, [JSON], BODY), receiver)
        await receiver.has_begun.wait()
        call.pause()
        async with asyncio.timeout(LIMIT_S):
            await was_too_long.wait()
        assert service.places[0].told == ["begun 200"], "it is under way"
        call.abort()
        assert (await service.line())["ended"] == "client_closed"


async def test_an_upstream_that_does_not_answer_in_time_is_a_504() -> None:
    gone = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.gone()
        gone.set()

    async with passing(script, head_limit_s=0.05) as (service, _):
        assert await service.refused() == (504, "worker_stalled")
        async with asyncio.timeout(LIMIT_S):
            await gone.wait()


@pytest.mark.parametrize(
    "head", [CHUNKED + b"2\r\nhi\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi"]
)
@pytest.mark.parametrize("then", [b"", b"xyz\r\n"])
async def test_an_upstream_that_fails_after_it_has_begun_cuts_the_connection(
    head: bytes, then: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    has_come = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.say(head)
        await has_come.wait()
        if head.startswith(CHUNKED):
            await peer.say(then)

    async with passing(script) as (service, _):
        receiver = Kept()
        service.client.send(service.origin, HttpRequest("POST", EMBEDDINGS, [JSON], BODY), receiver)
        await receiver.has_data.wait()
        has_come.set()
        await receiver.over.wait()
        assert (receiver.end, receiver.body) == ("failed", b"hi")
        line = await service.line()
        assert (line["status"], line["ended"]) == (200, "worker_lost")
    assert not caplog.records, "no fault of ours"


async def test_keys_are_asked_for_before_anything_is_done() -> None:
    async with passing(echo, keys=["secret"]) as (service, upstream):
        assert await service.refused() == (401, "invalid_api_key")
        assert await service.refused(target="/v1/../x") == (401, "invalid_api_key")
        assert not upstream.peers
        assert not service.models


async def test_bodies_are_limited_in_size_and_time() -> None:
    async with passing(echo, body=BodyLimits(100, LIMIT_S)) as (service, upstream):
        assert await service.refused(body=bytes(101)) == (413, "body_too_large")
        assert (await service.ask(body=bytes(100)))[0] == 200
        assert upstream.num_connections == 1
    async with passing(echo, body=BodyLimits(100, 0.05)) as (service, upstream):
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhe")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        assert not upstream.peers


async def test_who_has_no_upstream_is_told_why() -> None:
    async with passing(echo) as (service, upstream):
        assert await service.refused(body=b'{"model": "other"}') == (404, "model_not_found")
        service.target = None
        assert await service.refused(body=b"{}") == (503, "no_worker")
        assert not upstream.peers


async def test_paths_are_passed_plain_or_not_at_all() -> None:
    async with passing(echo) as (service, upstream):
        for path in ("/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/x%2fy", "/v1//embeddings"):
            assert await service.refused(target=path) == (400, "invalid_request_error")
        for path in (
            "/v1/chat/completions/",
            "/v1/%63ompletions",
            "/v1/chat/completions/render",
            "/v1/models/m",
        ):
            assert await service.refused(target=path) == (404, "not_found")
        assert not upstream.peers


async def test_content_rules_let_only_routes_without_text_through() -> None:
    async with passing(echo, has_rules=True) as (service, upstream):
        for path in ("/v1/responses", "/v1/messages", "/v1/embeddings/", "/v1/audio/transcriptions"):
            assert await service.refused(target=path) == (404, "not_found")
        assert not upstream.peers
        assert (await service.ask())[0] == 200


async def test_a_page_of_another_site_may_not_use_a_gateway_without_keys() -> None:
    form = ((b"content-type", b"multipart/form-data; boundary=x"), (b"origin", b"https://evil.example"))
    async with passing(echo) as (service, upstream):
        assert await service.refused(headers=form) == (400, "invalid_request_error")
        assert not upstream.peers
    async with passing(echo, keys=["secret"]) as (service, _):  # it cannot know the key
        assert (await service.ask(headers=[*form, (b"authorization", b"Bearer secret")]))[0] == 200
    async with passing(echo) as (service, _):
        request = Request(
            EMBEDDINGS, BODY, headers={"origin": "https://a.example", "content-type": "text/plain"}
        )
        request.scope[RESPONSE_HEADERS] = [(b"access-control-allow-origin", b"https://a.example")]
        client = await request.run(service.app)
        assert client.status == 200
        assert (b"access-control-allow-origin", b"https://a.example") in client.messages[0]["headers"]


async def test_while_draining_nothing_new_is_passed_and_what_runs_is_cut_at_last() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        if number:
            await peer.say(CHUNKED + b"2\r\nhi\r\n")
        await peer.gone()

    async with passing(script) as (service, upstream):
        silent, begun = Kept(), Kept()
        request = HttpRequest("POST", EMBEDDINGS, [JSON], BODY)
        service.client.send(service.origin, request, silent)
        await until(lambda: upstream.num_connections == 1)
        service.client.send(service.origin, request, begun)
        await begun.has_data.wait()
        service.flow.is_draining = True
        assert await service.refused() == (503, "draining")
        for exchange in list(service.flow.in_progress):
            exchange.refuse(Draining("The server is shutting down; the answer was cut off."))
        await silent.over.wait()
        await begun.over.wait()
        assert (silent.status, json.loads(silent.body)["error"]["code"]) == (503, "draining")
        assert (begun.end, begun.body) == ("failed", b"hi")


async def test_a_request_leaves_one_line_and_one_count_and_no_text() -> None:
    async with passing(echo, keys=["secret"]) as (service, _):
        headers = [JSON, (b"authorization", b"Bearer secret"), (b"x-request-id", b"abc")]
        await service.ask("/v1/embeddings?q=xylophone", BODY, "POST", headers)
        line = await service.line()
        assert line["time"] > 0
        assert len(line["key"]) == 8
        assert (line["id"], line["route"], line["event"]) == ("abc", EMBEDDINGS, "passed")
        assert (line["model"], line["worker"]) == ("m", "openai+http://up:1")
        assert (line["status"], line["ended"], line["detail"]) == (200, "complete", "")
        assert line["request_bytes"] == len(BODY)
        await service.ask("/v1/xylophone", b"", "GET", headers)
        assert (await service.line())["route"] == "/v1/*"
        assert len(service.log.splitlines()) == 2
        assert "xylophone" not in service.log
        assert "secret" not in service.log
        assert "upstream-key" not in service.log
        for route in (EMBEDDINGS, "/v1/*"):
            assert service.num_counted(route=route, status="200", ended="complete") == 1


async def test_a_stale_connection_to_the_upstream_is_no_fault_of_the_client() -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.answer(b"%d" % number)  # and leaves without a word

    async with passing(script) as (service, _):
        for number in range(5):
            assert (await service.ask())[2] == b"%d" % number


async def test_a_request_that_its_server_has_read_is_not_sent_again() -> None:
    num_requests = 0

    async def script(peer: Peer, number: int) -> None:
        nonlocal num_requests
        while True:
            _, _, body = await peer.request()
            num_requests += 1
            if body != BODY:
                return
            await peer.answer(b"whole")

    async with passing(script) as (service, _):
        assert (await service.ask())[2] == b"whole"
        assert (await service.ask(body=BODY + b" "))[0] == 502
        assert num_requests == 2


async def test_an_unexpected_fault_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with passing(echo) as (service, _):
        monkeypatch.setattr(service, "_choose", None)
        service.app.choose = lambda model: 1 // 0  # type: ignore[assignment]
        assert await service.refused() == (500, "internal_error")


async def test_the_gateway_is_not_a_client_that_leaks(unused_tcp_port: int) -> None:
    """A fault that nobody waits for any more is not reported as one."""
    async with passing(echo) as (service, _):
        service.target = UpstreamTarget(Origin("127.0.0.1", unused_tcp_port))
        calls = []
        for _ in range(5):
            receiver = Kept()
            calls.append(
                service.client.send(service.origin, HttpRequest("POST", EMBEDDINGS, [JSON], BODY), receiver)
            )
        for number, call in enumerate(calls):
            for _ in range(number * 3):
                await asyncio.sleep(0)
            call.abort()
        with pytest.raises(HttpFault):
            await service.client.fetch(
                Origin("127.0.0.1", unused_tcp_port), HttpRequest("GET", "/"), LIMIT_S, 9
            )
        await service.line()
