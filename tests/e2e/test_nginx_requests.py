"""Single requests through the real nginx: what is passed on of them, what is refused and how, what is logged.

The upstream is the test itself. Streams are in `test_nginx.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from gateway.settings import Settings
from tests.e2e.asking import CHAT
from tests.e2e.h2_client import connect_h2
from tests.e2e.nginx_site import Nginx, behind_balancer, start_nginx
from tests.e2e.played_upstream import EMPTY, Upstream, listening, stream_head
from tests.wire import Head, Wire, connect

HTTP = Settings().http
EVENTS = "/v1/streams/0123456789abcdef/events"


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    folder = tmp_path_factory.mktemp("nginx")
    with start_nginx(folder, f"unix:{folder}/up.sock") as started:
        yield started


@pytest.fixture
async def upstream(nginx: Nginx) -> AsyncIterator[Upstream]:
    async with listening(nginx.upstream) as played:
        yield played


@pytest.fixture(params=["plain", "h2"])
async def client(request: pytest.FixtureRequest, nginx: Nginx) -> AsyncIterator[Wire]:
    if request.param == "h2":
        async with connect_h2(nginx.tls_port, nginx.tls("h2")) as connection:
            yield connection.stream()
    else:
        async with connect(nginx.port) as wire:
            yield wire


async def answered(
    client: Wire,
    upstream: Upstream,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
    answer: bytes = EMPTY,
) -> tuple[bytes, Head]:
    """A request that the upstream answers: the head that it got, in lower case, and the client's."""
    reading = asyncio.create_task(client.request(method, path, body, headers))
    request = await upstream.next()
    await request.send(answer)
    return request.head.lower(), await reading


async def test_request_has_no_connection_header_and_a_true_address(client: Wire, upstream: Upstream) -> None:
    claimed = {"x-forwarded-for": "1.2.3.4", "x-real-ip": "1.2.3.4", "forwarded": "for=1.2.3.4"}
    head, got = await answered(client, upstream, "GET", "/v1/models", None, claimed)
    assert got.status == 200
    assert b"\r\nconnection:" not in head
    assert b"\r\nupgrade:" not in head
    assert b"\r\nhost: localhost\r\n" in head
    assert b"\r\nx-forwarded-for: 127.0.0.1\r\n" in head
    assert b"\r\nx-real-ip: 127.0.0.1\r\n" in head
    assert b"1.2.3.4" not in head


async def test_scheme_is_told(client: Wire, upstream: Upstream, request: pytest.FixtureRequest) -> None:
    head, _ = await answered(client, upstream, "GET", "/v1/models")
    scheme = b"https" if "h2" in request.node.name else b"http"
    assert b"\r\nx-forwarded-proto: %s\r\n" % scheme in head


async def test_behind_a_balancer_the_last_address_before_it_counts(tmp_path: Path) -> None:
    text = behind_balancer("127.0.0.1")
    with start_nginx(tmp_path, f"unix:{tmp_path}/up.sock", text) as nginx:
        async with listening(nginx.upstream) as upstream, connect(nginx.port) as client:
            through = {"x-forwarded-for": "1.2.3.4, 192.0.2.7, 127.0.0.1"}
            head, _ = await answered(client, upstream, "GET", "/v1/models", None, through)
    assert b"\r\nx-forwarded-for: 192.0.2.7\r\n" in head
    assert b"1.2.3.4" not in head


async def test_body_of_exactly_the_gateways_limit_passes(nginx: Nginx, upstream: Upstream) -> None:
    limit = HTTP.max_body_bytes
    async with connect(nginx.port) as client:
        reading = asyncio.create_task(client.post(CHAT, b" " * limit))
        request = await upstream.next()
        assert len(request.body) == limit
        await request.send(EMPTY)
        assert (await reading).status == 200


async def test_body_over_the_gateways_limit_is_413_as_json(client: Wire, upstream: Upstream) -> None:
    limit = HTTP.max_body_bytes
    head = await client.request("POST", CHAT, b"{}", {"content-length": str(limit + 1)})
    error = await error_of(client, head, 413)
    assert error["code"] == "body_too_large"
    assert str(limit) in (error["message"] or "")
    assert upstream.requests.empty()


async def test_line_within_the_gateways_limit_passes(nginx: Nginx, upstream: Upstream) -> None:
    long = "x" * (HTTP.max_header_bytes - 1024)
    async with connect(nginx.port) as client:
        head, got = await answered(client, upstream, "GET", "/v1/models", None, {"x-long": long})
    assert long.encode() in head
    assert got.status == 200


async def test_head_whose_lines_are_within_the_limit_is_the_gateways_to_refuse(
    client: Wire, upstream: Upstream
) -> None:
    """Over HTTP/2 nginx would end the connection with all its streams."""
    long = {f"x-long-{number}": "x" * (HTTP.max_header_bytes // 4) for number in range(8)}
    head, got = await answered(client, upstream, "GET", "/v1/models", None, long)
    assert len(head) > 2 * HTTP.max_header_bytes
    assert got.status == 200


@pytest.mark.parametrize("where", ["field", "path"])
async def test_line_over_the_gateways_limit_is_431_as_json(
    nginx: Nginx, upstream: Upstream, where: str
) -> None:
    long = "x" * HTTP.max_header_bytes
    path, headers = ("/v1/models?" + long, {}) if where == "path" else ("/v1/models", {"x-long": long})
    async with connect(nginx.port) as client:
        head = await client.request("GET", path, headers=headers)
        assert (await error_of(client, head, 431))["code"] == "headers_too_large"
    assert upstream.requests.empty()


@pytest.mark.parametrize("line", [b"TRACE /v1/models HTTP/1.1", b"GET /v1/models HTTP/9.9"])
async def test_what_nginx_does_not_speak_is_refused_as_json(nginx: Nginx, line: bytes) -> None:
    async with connect(nginx.port) as client:
        await client.send(line + b"\r\nhost: localhost\r\n\r\n")
        head = await client.head()
        assert (await error_of(client, head, 505 if line.endswith(b"9.9") else 405))["code"]


async def test_plain_http_on_the_port_for_https_is_400_as_json(nginx: Nginx) -> None:
    async with connect(nginx.tls_port) as client:
        head = await client.request("GET", "/v1/models")
        assert (await error_of(client, head, 400))["type"] == "invalid_request_error"


@pytest.mark.parametrize("head", [b"GET /v1/models HTTP/1.1", b"nonsense", b"GET no-path HTTP/1.1"])
async def test_malformed_request_is_400_as_json(nginx: Nginx, upstream: Upstream, head: bytes) -> None:
    """The first lacks a host."""
    async with connect(nginx.port) as client:
        await client.send(head + b"\r\n\r\n")
        assert (await error_of(client, await client.head(), 400))["type"] == "invalid_request_error"
    assert upstream.requests.empty()


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("POST", CHAT), ("POST", "/v1/streams"), ("DELETE", "/v1/streams/s")],
)
async def test_request_whose_connection_breaks_is_not_repeated(
    nginx: Nginx, upstream: Upstream, method: str, path: str
) -> None:
    """On a kept connection nginx's default would send a GET again."""
    async with connect(nginx.port) as client:
        reading = asyncio.create_task(client.request("GET", "/v1/models"))
        request = await upstream.next()
        await request.send(EMPTY)
        assert (await reading).status == 200
        assert await client.body() == b"{}"

        reading = asyncio.create_task(client.request(method, path))
        assert f"{method} {path} ".encode() in await request.read(len(method) + len(path) + 2)
        request.writer.close()
        error = await error_of(client, await reading, 502)
        assert error["code"] == "gateway_unreachable"
    assert upstream.requests.empty()


async def test_gateway_down_is_502_as_json_with_retry_after(client: Wire) -> None:
    head = await client.post(CHAT, {})
    assert head["retry-after"] == "1"
    assert (await error_of(client, head, 502))["code"] == "gateway_unreachable"


async def test_gateway_down_leaves_an_eventsource_its_next_try(client: Wire) -> None:
    """It takes any status but 200 as final, and would never come back after a restart of the gateway."""
    head = await client.request("GET", f"{EVENTS}?token=t")
    assert head.status == 200
    assert head["content-type"] == "text/event-stream"
    assert head["cache-control"] == "no-cache"
    assert await client.body() == b": the gateway cannot be reached\nretry: 1000\n"


async def test_gateway_down_leaves_an_eventsource_with_credentials_its_next_try(client: Wire) -> None:
    """`*` does not count for it: the browser would close it for good."""
    head = await client.request("GET", f"{EVENTS}?token=t", headers={"origin": "https://app.example.com"})
    assert head["access-control-allow-origin"] == "https://app.example.com"
    assert head["access-control-allow-credentials"] == "true"
    await client.body()


async def test_client_of_http_1_0_gets_no_text_whose_cut_it_could_not_see(
    nginx: Nginx, upstream: Upstream
) -> None:
    for version, passed in ((b"1.0", False), (b"1.1", True)):
        async with connect(nginx.port) as client:
            fields = b"host: localhost\r\naccept: text/plain"
            await client.send(b"GET /v1/models HTTP/%s\r\n%s\r\n\r\n" % (version, fields))
            request = await upstream.next()
            assert (b"accept: text/plain" in request.head.lower()) == passed
            request.writer.close()


async def test_errors_of_the_gateway_pass_unchanged(client: Wire, upstream: Upstream) -> None:
    body = b'{"error":{"message":"of the gateway"}}'
    for status in (400, 403, 413, 431, 500, 502, 503, 504):
        answer = b"HTTP/1.1 %d Own\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n%s"
        _, head = await answered_once(client, upstream, answer % (status, body))
        assert head.status == status
        assert await client.body() == body
        assert head.get("retry-after") is None


async def answered_once(client: Wire, upstream: Upstream, answer: bytes) -> tuple[bytes, Head]:
    """As `answered`; the body ends with the connection."""
    with_length = answer.replace(
        b"\r\n\r\n", b"\r\ncontent-length: %d\r\n\r\n" % len(answer.partition(b"\r\n\r\n")[2])
    )
    return await answered(client, upstream, "POST", CHAT, {}, answer=with_length)


@pytest.mark.parametrize(
    "path",
    [
        *("/metrics", "/metrics/", "//metrics", "/%6detrics", "/v1/../metrics", "/metrics?a", "/metrics;a"),
        *("/version", "/version?a", "/./version"),
    ],
)
async def test_what_is_for_the_operator_is_closed_to_the_outside(
    nginx: Nginx, upstream: Upstream, path: str
) -> None:
    async with connect(nginx.port) as client:
        head = await client.request("GET", path)
        assert (await error_of(client, head, 403))["code"] == "forbidden"
    assert upstream.requests.empty()


async def test_probes_pass_without_their_details(client: Wire, upstream: Upstream) -> None:
    for path in ("/health", "/ready"):
        head, got = await answered(
            client,
            upstream,
            "GET",
            f"{path}?verbose",
            answer=EMPTY.replace(b"OK\r\n", b"OK\r\nconnection: close\r\n"),
        )
        assert head.startswith(b"get %s http/1.1\r\n" % path.encode())
        assert got.status == 200
        assert await client.body() == b"{}"


async def test_access_log_has_neither_query_nor_probes(nginx: Nginx, upstream: Upstream) -> None:
    answer = EMPTY.replace(b"OK\r\n", b"OK\r\nx-request-id: id-1\r\nconnection: close\r\n")
    for path in ("/v1/streams/logged/events?token=hidden-token", "/health", "/v1/models?seen"):
        async with connect(nginx.port) as client:
            _, head = await answered(client, upstream, "GET", path, answer=answer)
            assert head.status == 200
    nginx.process.wait_until(lambda: "GET /v1/models 200 2" in nginx.access_log, 10, "logged")
    assert "GET /v1/streams/logged/events 200 2" in nginx.access_log
    assert "id-1" in nginx.access_log
    assert "hidden-token" not in nginx.access_log
    assert "/health" not in nginx.access_log


async def test_access_log_has_what_was_asked_also_when_nginx_itself_answers(nginx: Nginx) -> None:
    async with connect(nginx.port) as client:
        await client.post("/v1/unreachable?hidden-query", {})
        await client.body()
        await client.request("GET", "/v1/streams/lost/events?token=hidden-token")
        await client.body()
        await client.send(b"BAD hidden-token?hidden-query\r\n\r\n")
        assert (await client.head()).status == 400
    nginx.process.wait_until(lambda: " - 400 " in nginx.access_log, 10, "logged")
    assert "POST /v1/unreachable 502 " in nginx.access_log
    assert "GET /v1/streams/lost/events 200 " in nginx.access_log
    assert "hidden" not in nginx.access_log


async def break_in_mid_stream(client: Wire, upstream: Upstream, path: str) -> None:
    reading = asyncio.create_task(client.request("GET", path))
    request = await upstream.next()
    await request.send(stream_head())
    await reading
    request.writer.close()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await client.piece()


async def break_before_the_head(client: Wire, upstream: Upstream, path: str) -> None:
    reading = asyncio.create_task(client.request("GET", path))
    (await upstream.next()).writer.close()
    await reading


async def answer_nonsense(client: Wire, upstream: Upstream, path: str) -> None:
    await answered(client, upstream, "GET", path, answer=b"HTTP/1.1 200 OK\r\nx: \0\r\n\r\n")


@pytest.mark.parametrize("fault", [break_in_mid_stream, break_before_the_head, answer_nonsense])
async def test_error_log_never_has_the_token_of_a_stream(
    nginx: Nginx, upstream: Upstream, fault: Callable[[Wire, Upstream, str], object]
) -> None:
    """nginx quotes the request line with its query; the other path shows that the fault is logged at all."""
    for path in (f"{EVENTS}?token=hidden-token", f"/v1/models?{fault.__name__}"):
        async with connect(nginx.port) as client:
            await fault(client, upstream, path)  # type: ignore[misc]
    nginx.process.wait_until(lambda: fault.__name__ in nginx.error_log, 10, "logged")
    assert "hidden-token" not in nginx.error_log


async def test_error_log_never_has_the_token_when_the_gateway_is_down(nginx: Nginx) -> None:
    async with connect(nginx.port) as client:
        await client.request("GET", f"{EVENTS}?token=hidden-token")
        await client.body()
        await client.request("DELETE", "/v1/streams/0123456789abcdef?token=hidden-token")
        await client.body()
        await client.request("GET", "/v1/models?down")
    nginx.process.wait_until(lambda: "/v1/models?down" in nginx.error_log, 10, "logged")
    assert "hidden-token" not in nginx.error_log


async def error_of(client: Wire, head: Head, status: int) -> dict[str, str | None]:
    """The error of a refusal that has this status and is JSON."""
    assert head.status == status
    assert head["content-type"] == "application/json"
    body = await client.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, str | None] = body["error"]
    return error
