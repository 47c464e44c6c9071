"""What pages of other origins may do: preflights, the headers of every answer, and the settings of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.cors import EXPOSED, Cors, cors, with_headers
from gateway.exchange import Exchange
from gateway.settings_access import Access
from gateway.settings_load import SettingsError, load
from gateway.writers import send_error
from pipeline.errors import NoWorker
from tests.gateway.answering import Client
from tests.gateway.asgi import Request
from tests.gateway.test_app import BODY, CHAT, site
from tests.wire import connect

PAGE = "https://app.example.com"
OTHER = "http://localhost:3000"
STRANGER = "https://evil.example.com"
ASKS = {"access-control-request-method": "POST"}
# What scripts may read of any answer (Fetch, "CORS-safelisted response-header name").
SAFE = {
    *("cache-control", "content-language", "content-length", "content-type"),
    *("expires", "last-modified", "pragma"),
}
# What a head may have that is not for scripts: for the connection, for proxies, for the browser itself.
NOT_FOR_SCRIPTS = {
    *("connection", "date", "timing-allow-origin", "transfer-encoding", "vary", "x-accel-buffering"),
    *("content-security-policy", "cross-origin-opener-policy", "referrer-policy", "x-content-type-options"),
}
NEAR_MISSES = (
    "null",
    "https://app.example.com.evil.com",
    "https://app.example.com:8443",
    "http://app.example.com",
    "https://App.example.com",
    "https://app.example.com/",
    "http://localhost",
    "*",
    "",
)


def access(*origins: str, **fields: Any) -> Access:
    return Access(allowed_origins=origins or (PAGE, OTHER), **fields)


def unique(client: Client) -> dict[str, str]:
    """A response's headers, none of which may be there twice: browsers refuse that."""
    pairs = [(name.decode(), value.decode()) for name, value in client.messages[0]["headers"]]
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


async def preflight(of: Access, origin: str, **asked: str) -> dict[str, str]:
    """The headers that a preflight is answered with."""
    more = {f"access-control-request-{name}": value for name, value in asked.items()}
    request = Request(CHAT, method="OPTIONS", headers={"origin": origin} | ASKS | more)
    assert await Cors(of).answered(request.scope, request.send)
    assert (request.client.status, request.client.body) == (204, b"")
    return unique(request.client)


async def from_outlet(request: Request) -> None:
    exchange = Exchange(request.scope, request.receive, request.send, 100)
    send_error(exchange.outlet, NoWorker("none"), exchange.record)


async def from_starlette(request: Request) -> None:
    send = with_headers(request.scope, request.send)
    await send({"type": "http.response.start", "status": 503, "headers": [(b"x-own", b"1")]})
    await send({"type": "http.response.body", "body": b"x", "more_body": False})


async def from_an_outlet_behind_starlette(request: Request) -> None:
    exchange = Exchange(request.scope, request.receive, with_headers(request.scope, request.send), 100)
    send_error(exchange.outlet, NoWorker("none"), exchange.record)


WAYS = (from_outlet, from_starlette)


async def answer(
    of: Access, origin: str | None, way: Callable[[Request], Any] = from_outlet
) -> dict[str, str]:
    """The headers of an answer that has nothing to do with CORS by itself."""
    request = Request(headers={} if origin is None else {"origin": origin})
    assert not await Cors(of).answered(request.scope, request.send)
    await way(request)
    assert request.client.status == 503
    assert request.client.body
    return unique(request.client)


# -- preflights ----------------------------------------------------------------------------------------------


async def test_a_preflight_of_an_allowed_origin_is_told_what_it_may_do() -> None:
    assert await preflight(access(), PAGE, headers="authorization, content-type, x-stainless-os") == {
        "vary": "origin, access-control-request-method, access-control-request-headers, "
        "access-control-request-private-network",
        "access-control-allow-origin": PAGE,
        "access-control-allow-methods": "DELETE, GET, HEAD, PATCH, POST, PUT",
        "access-control-allow-headers": "authorization, content-type, x-stainless-os",
        "access-control-max-age": "600",
    }


@pytest.mark.parametrize("origin", [STRANGER, *NEAR_MISSES])
async def test_a_preflight_of_another_origin_is_allowed_nothing(origin: str) -> None:
    asked = {"headers": "authorization", "private-network": "true"}
    assert list(await preflight(access(), origin, **asked)) == ["vary"]


@pytest.mark.parametrize(
    ("fields", "header", "value"),
    [
        ({"allowed_methods": ("GET", "POST")}, "allow-methods", "GET, POST"),
        ({"allowed_methods": ("GET,POST",)}, "allow-methods", "GET, POST"),
        ({"allowed_headers": ("authorization",)}, "allow-headers", "content-type, authorization"),
        ({"cors_max_age_s": 0}, "max-age", "0"),
        ({"allow_credentials": True}, "allow-credentials", "true"),
    ],
)
async def test_settings_reach_the_preflight(fields: dict[str, Any], header: str, value: str) -> None:
    told = await preflight(access(**fields), PAGE, headers="x-asked")
    assert told[f"access-control-{header}"] == value


@pytest.mark.parametrize(
    "asked",
    ["x\x00y", "a;b", "a: b", "x" * 5000, "é", ""],
    ids=["NUL", "list", "colon", "long", "not ASCII", "empty"],
)
async def test_what_is_no_list_of_names_is_not_echoed(asked: str) -> None:
    assert (await preflight(access(), PAGE, headers=asked))["access-control-allow-headers"] == "content-type"


async def test_null_is_allowed_where_it_is_listed() -> None:
    assert (await preflight(access("null"), "null"))["access-control-allow-origin"] == "null"
    assert (await answer(access("null"), "null"))["access-control-allow-origin"] == "null"


@pytest.mark.parametrize(("asked", "allowed"), [("true", "true"), ("false", None), (None, None)])
async def test_a_private_network_is_open_to_allowed_origins(asked: str | None, allowed: str | None) -> None:
    more = {} if asked is None else {"private-network": asked}
    assert (await preflight(access(), PAGE, **more)).get("access-control-allow-private-network") == allowed


@pytest.mark.parametrize(
    ("method", "headers"), [("OPTIONS", {"origin": PAGE}), ("OPTIONS", ASKS), ("GET", ASKS)]
)
async def test_without_its_three_signs_it_is_no_preflight(method: str, headers: dict[str, str]) -> None:
    request = Request(method=method, headers=headers)
    assert not await Cors(access()).answered(request.scope, request.send)
    assert not request.client.messages


# -- answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*WAYS, from_an_outlet_behind_starlette])
@pytest.mark.parametrize("credentials", [False, True])
async def test_an_allowed_origin_may_read_the_answer(
    way: Callable[[Request], Any], credentials: bool
) -> None:
    told = await answer(access(allow_credentials=credentials), OTHER, way)
    assert told["access-control-allow-origin"] == told["timing-allow-origin"] == OTHER
    assert told["vary"] == "Origin"
    assert told["access-control-expose-headers"].split(", ") == list(EXPOSED)
    assert told.get("access-control-allow-credentials") == ("true" if credentials else None)


@pytest.mark.parametrize("way", WAYS)
async def test_any_origin_is_answered_without_naming_it(way: Callable[[Request], Any]) -> None:
    for origin in (PAGE, STRANGER, "null"):
        assert (await preflight(access("*"), origin))["access-control-allow-origin"] == "*"
        told = await answer(access("*"), origin, way)
        assert told["access-control-allow-origin"] == told["timing-allow-origin"] == "*"
        assert "vary" not in told


@pytest.mark.parametrize("way", WAYS)
async def test_another_origin_gets_the_answer_without_leave_to_read_it(way: Callable[[Request], Any]) -> None:
    for origin in (STRANGER, *NEAR_MISSES):
        told = await answer(access(), origin, way)
        assert told["vary"] == "Origin"
        assert not [name for name in told if name.startswith(("access-control", "timing"))]


@pytest.mark.parametrize("way", WAYS)
async def test_without_an_origin_only_caches_are_told(way: Callable[[Request], Any]) -> None:
    """They would give the answer to a page of another origin, which could not read it."""
    for of, vary in ((access(), "Origin"), (access("*"), None)):
        told = await answer(of, None, way)
        assert told.get("vary") == vary
        assert not [name for name in told if name.startswith(("access-control", "timing-allow"))]


async def test_without_headers_send_is_not_wrapped() -> None:
    """A wrapper costs every message of every answer."""
    request = Request()
    assert with_headers(request.scope, request.send) == request.send


# -- settings ------------------------------------------------------------------------------------------------


def test_without_an_origin_in_the_settings_there_is_no_cors() -> None:
    assert cors(Access()) is None
    assert cors(Access(allow_credentials=True, allowed_methods=("GET",))) is None


@pytest.mark.parametrize(
    "origin",
    [
        PAGE,
        OTHER,
        "null",
        "*",
        "http://127.0.0.1:5173",
        "http://[::1]:5173",
        "https://[2001:db8::1]",
        "chrome-extension://abcdefghijklmnop",
        "capacitor://localhost",
        "https://a_b.example.com",
        f"{PAGE}, {OTHER}",
    ],
)
def test_good_origins_are_taken(origin: str) -> None:
    load({"allowed_origins": [origin]})


@pytest.mark.parametrize(
    "origin",
    [
        "https://app.example.com/",
        "https://app.example.com/chat",
        "https://app.example.com?x",
        "https://App.example.com",
        "HTTPS://app.example.com",
        "https://app.example.com:443",
        "http://app.example.com:80",
        "https://app.example.com:",
        "https://app.example.com:080",
        "https://app.example.com:70000",
        "https://user@app.example.com",
        "https://*.example.com",
        "https://",
        "//app.example.com",
        "app.example.com",
        "https://bücher.example",
        "https://[::1",
        "https://[::01]",
        "https://[1:2]",
        "file://",
        "Null",
        '["https://app.example.com"]',
        "https://app\n.example.com",
        "https://app.example.com:1٣",
    ],
)
def test_bad_origins_are_refused_by_name(origin: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({"allowed_origins": [PAGE, origin]})
    (problem,) = caught.value.problems
    assert problem.startswith(f"allowed_origins: {origin.strip()!r} is not allowed; ")


@pytest.mark.parametrize("name", ["allowed_methods", "allowed_headers"])
@pytest.mark.parametrize("bad", ["a b", "x:y", "a\r\nset-cookie", "é"])
def test_names_that_are_none_are_refused(name: str, bad: str) -> None:
    load({name: ["x-one", "*"]})
    with pytest.raises(SettingsError, match=f"{name}: .* is not allowed"):
        load({name: [bad]})


def test_every_page_with_credentials_is_refused() -> None:
    load({"allowed_origins": [PAGE], "allow_credentials": True})
    with pytest.raises(SettingsError, match="allow_credentials: it is not allowed with the origin"):
        load({"allowed_origins": [PAGE, "*"], "allow_credentials": True})


# -- the gateway ---------------------------------------------------------------------------------------------


async def test_every_answer_of_the_gateway_can_be_read_by_an_allowed_page(tmp_path: Path) -> None:
    """Also refusals, on the generation routes and on Starlette's; and all that is in their heads."""
    page = {"origin": PAGE}
    with_key = page | {"authorization": "Bearer k"}
    plain = with_key | {"content-type": "text/plain"}
    async with site(tmp_path, access=access(api_key=("k",))) as made, connect(made.port) as wire:
        for method, path, body, headers, status in (
            ("GET", "/v1/models", None, page, 401),
            ("GET", "/v1/models", None, with_key, 200),
            ("GET", "/health", None, page, 200),
            ("GET", "/docs", None, page, 200),
            ("GET", "/nothing", None, page, 404),
            ("GET", CHAT, None, page, 405),
            ("OPTIONS", CHAT, None, page, 405),
            ("HEAD", "/health", None, page, 200),
            ("POST", CHAT, BODY, page, 401),
            ("POST", CHAT, b"{}", plain, 400),
            ("POST", CHAT, BODY | {"model": "other"}, with_key, 404),
            ("POST", CHAT, BODY | {"stream": False, "max_tokens": 2}, with_key, 200),
            ("POST", CHAT, BODY | {"max_tokens": 2}, with_key, 200),
        ):
            head = await wire.request(method, path, body, headers)
            assert head.status == status, (method, path)
            assert head["access-control-allow-origin"] == PAGE, (method, path)
            assert "Origin" in (head.get("vary") or "")
            if method != "HEAD":
                await wire.body()
            exposed = set(head["access-control-expose-headers"].split(", "))
            own = {name for name, _ in head.headers if not name.startswith("access-control-")}
            assert own <= SAFE | exposed | NOT_FOR_SCRIPTS
