"""What crosses the gateway of a passed request's head and its response's, and which paths are refused."""

from __future__ import annotations

import random
from urllib.parse import unquote

import pytest

from gateway.passthrough_head import (
    ADMINISTRATIVE_PATHS,
    ANY_ROUTE,
    OWN_PATHS,
    NotPassed,
    is_own,
    may_be_another_sites,
    model_of,
    request_headers,
    response_headers,
    route_of,
    target_of,
)
from pipeline.errors import InvalidRequest


@pytest.mark.parametrize(
    ("path", "query"),
    [
        (b"/v1/embeddings", b""),
        (b"/v1/embeddings/", b"a=b"),
        (b"/v1/files/file-abc.json/content", b"a=%2F..%2f&b=/../c?d"),
        (b"/v1/a%20b/%C3%A4/~x_y:z@(1)", b""),
        (b"/v1/x...y/.hidden/..c", b""),
        (b"/v1/modelsx", b""),
        (b"/v1/completions-of/x", b""),
    ],
)
def test_a_target_is_passed_byte_for_byte(path: bytes, query: bytes) -> None:
    assert target_of(path, query).encode() == path + b"?" * bool(query) + query


@pytest.mark.parametrize(
    "path",
    [
        *(b"/", b"/v1", b"/v1/", b"/v2/embeddings", b"/V1/embeddings", b"v1/embeddings", b"//v1/embeddings"),
        *(b"/v1/../metrics", b"/v1/./x", b"/v1/x/..", b"/v1/x/.", b"/v1/x/../", b"/v1//x", b"/v1/x//"),
        *(
            b"/v1/%2e%2e/metrics",
            b"/v1/.%2E/metrics",
            b"/v1/%2e/x",
            b"/v1/x%2f..%2fy",
            b"/v1/x%5cy",
            b"/v1/x\\y",
        ),
        *(
            b"/v1/%252e%252e/metrics",
            b"/v1/x%00",
            b"/v1/x%0d%0ay",
            b"/v1/x%7f",
            b"/v1/%c0%ae%c0%ae/x",
            b"/v1/..;/x",
            b"/v1/x;y",
        ),
        *(
            b"/v1/%",
            b"/v1/%4",
            b"/v1/%zz",
            b"/v1/x\xe4",
            b"/v1/x y",
            b"/v1/x#y",
            b"/v1/x?y",
            b"/v1/x\r\ny",
            b"",
        ),
    ],
)
def test_a_path_that_servers_could_read_in_two_ways_is_refused(path: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not passed on") as caught:
        target_of(path, b"")
    assert caught.value.param == "path"


def test_no_path_that_is_passed_leaves_its_folder_however_often_it_is_decoded() -> None:
    chance = random.Random(2)
    parts = [
        "/",
        ".",
        "..",
        "%2e",
        "%2F",
        "%5c",
        "%25",
        "2e",
        "2f",
        "a",
        "v1",
        "//",
        "\\",
        ";",
        "%00",
        "%c0%ae",
    ]
    num_passed = 0
    for _ in range(20_000):
        path = "/v1/" + "".join(chance.choices(parts, k=chance.randrange(1, 6)))
        try:
            target = target_of(path.encode(), b"")
        except InvalidRequest:
            continue
        num_passed += 1
        for _ in range(3):
            assert not {".", ".."} & set(target.replace("\\", "/").split("/"))
            assert "//" not in target
            assert target.startswith("/v1/")
            target = unquote(target, errors="replace")
    assert num_passed > 100


def test_a_query_with_bytes_that_would_end_the_line_is_refused() -> None:
    for query in (b"a b", b"a\r\nb", b"\xe4", b"\x00"):
        with pytest.raises(InvalidRequest, match="query"):
            target_of(b"/v1/x", query)


@pytest.mark.parametrize("own", OWN_PATHS)
def test_our_own_routes_are_never_passed_however_they_are_written(own: str) -> None:
    encoded = "".join(each if each == "/" else f"%{ord(each):02X}" for each in own.removeprefix("/v1"))
    for path in (
        own,
        own + "/",
        own + "/x",
        own.upper().replace("V1", "v1"),
        "/v1" + encoded,
        own[:-1] + "%73",
    ):
        if own[-1] != "s" and path.endswith("%73"):
            continue
        with pytest.raises(NotPassed) as caught:
            target_of(path.encode(), b"")
        assert caught.value.status_hint == 404
    assert not is_own(own + "x")


@pytest.mark.parametrize("path", ADMINISTRATIVE_PATHS)
def test_routes_that_change_a_server_for_everybody_are_not_passed_however_they_are_written(path: str) -> None:
    encoded = "/v1/" + "".join(f"%{ord(each):02x}" for each in path.removeprefix("/v1/"))
    for written in (path, path + "/", path + "/x", path.upper().replace("V1", "v1"), encoded):
        with pytest.raises(NotPassed, match="would change the server for everybody") as caught:
            target_of(written.encode(), b"a=b")
        assert caught.value.status_hint == 404
    assert target_of(path.encode() + b"s_of_mine", b"")


def test_routes_have_few_names() -> None:
    assert route_of("/v1/embeddings") == "/v1/embeddings"
    assert route_of("/v1/embeddings/") == route_of("/v1/whatever") == ANY_ROUTE


def test_a_request_keeps_its_content_and_loses_what_is_the_connections_or_the_clients_alone() -> None:
    kept = [
        (b"content-type", b"multipart/form-data; boundary=x"),
        (b"content-encoding", b"gzip"),
        (b"accept", b"*/*"),
        (b"accept-encoding", b"gzip"),
        (b"user-agent", b"u"),
        (b"x-custom", b"1"),
        (b"x-custom", b"2"),
    ]
    lost = [
        *((name, b"v") for name in (b"host", b"content-length", b"expect", b"cookie", b"authorization")),
        *((name, b"v") for name in (b"x-api-key", b"api-key", b"proxy-authorization", b"te", b"trailer")),
        *((name, b"v") for name in (b"keep-alive", b"transfer-encoding", b"upgrade", b"proxy-connection")),
        *((name, b"v") for name in (b"x-forwarded-for", b"forwarded", b"origin", b"x-request-id")),
        *((name, b"v") for name in (b"x-forwarded-prefix", b"x-forwarded-anything", b"x-original-url")),
        *((name, b"v") for name in (b"x-http-method-override", b"openai-organization", b"openai-project")),
        (b"connection", b"close, X-Named ,content-type"),
        (b"connection", b"x-second"),
        (b"x-named", b"v"),
        (b"x-second", b"v"),
        (b"x-tenant", b"the client's"),
    ]
    own = [(b"authorization", b"Bearer upstream"), (b"x-tenant", b"ours")]
    mixed = [*lost, *kept]
    random.Random(1).shuffle(mixed)
    found = request_headers(mixed, own, "abc")
    assert [header for header in found if header in kept] == [header for header in mixed if header in kept]
    assert [header for header in found if header not in kept] == [*own, (b"x-request-id", b"abc")]


def test_a_response_keeps_its_content_and_loses_what_only_the_gateway_may_say() -> None:
    kept = [
        (b"content-type", b"application/json"),
        (b"content-length", b"5"),
        (b"content-encoding", b"br"),
        (b"openai-processing-ms", b"7"),
        (b"retry-after", b"3"),
    ]
    lost = [
        *((name, b"v") for name in (b"transfer-encoding", b"keep-alive", b"set-cookie", b"server", b"date")),
        *((name, b"v") for name in (b"access-control-allow-origin", b"access-control-allow-credentials")),
        *((name, b"v") for name in (b"x-request-id", b"location", b"www-authenticate", b"x-named")),
        (b"connection", b"x-named"),
    ]
    assert response_headers([*lost, *kept], "abc") == [*kept, (b"x-request-id", b"abc")]


@pytest.mark.parametrize("status", [204, 304])
def test_a_response_without_a_body_has_no_length(status: int) -> None:
    given = [(b"content-length", b"5"), (b"etag", b"v")]
    assert response_headers(given, "a", status) == [(b"etag", b"v"), (b"x-request-id", b"a")]
    assert response_headers(given, "a", 206) == [*given, (b"x-request-id", b"a")]


def test_a_response_does_not_tell_the_key_that_the_upstream_was_shown() -> None:
    own = [(b"authorization", b"Bearer secret")]
    given = [(b"authorization", b"Bearer secret"), (b"x-echo", b"was secret, too"), (b"x-tenant", b"ours")]
    assert response_headers(given, "a", 200, own) == [(b"x-tenant", b"ours"), (b"x-request-id", b"a")]
    assert (b"x-tenant", b"ours") in response_headers(given, "a", 200, [(b"authorization", b"Bearer o")])
    word = [(b"authorization", b"Bearer text")]
    assert (
        dict(response_headers([(b"content-type", b"text/csv")], "a", 200, word))[b"content-type"]
        == b"text/csv"
    )


@pytest.mark.parametrize(
    "name",
    [
        *(b"x-accel-redirect", b"x-accel-buffering", b"x-accel-expires", b"x-accel-anything", b"x-sendfile"),
        *(b"clear-site-data", b"refresh", b"service-worker-allowed", b"link", b"sourcemap", b"x-sourcemap"),
        *(b"nel", b"report-to", b"reporting-endpoints", b"content-security-policy-report-only"),
        *(b"x-litespeed-location", b"x-lighttpd-send-file", b"x-reproxy-url", b"timing-allow-origin"),
    ],
)
def test_a_response_has_no_power_over_a_proxy_or_a_browser(name: bytes) -> None:
    kept = [(b"content-type", b"text/plain"), (b"content-security-policy", b"sandbox")]
    assert response_headers([(name, b"/etc/passwd"), *kept], "a") == [*kept, (b"x-request-id", b"a")]


@pytest.mark.parametrize("media_type", [b"text/event-stream", b"Text/Event-Stream; charset=utf-8"])
def test_no_proxy_holds_back_events(media_type: bytes) -> None:
    given = [(b"content-type", media_type), (b"x-accel-buffering", b"yes")]
    assert dict(response_headers(given, "a"))[b"x-accel-buffering"] == b"no"
    assert b"x-accel-buffering" not in dict(response_headers([(b"content-type", b"text/plain")], "a"))


@pytest.mark.parametrize(
    ("media_type", "body", "model"),
    [
        (b"application/json", b'{"input": "a", "model": "m"}', "m"),
        (b"Application/JSON; charset=utf-8", b'{"model": "m"}', "m"),
        (b"application/json", b'{"model": null}', None),
        (b"application/json", b"{}", None),
        (b"application/json", b'{"model": 7}', None),
        (b"application/json", b"[1]", None),
        (b"application/json", b'{"model": "m"', None),
        (b"application/json", b"\xff", None),
        (b"application/json", b"", None),
        (b"application/json", b'{"a":' + b"[" * 100_000, None),
        (b"multipart/form-data", b'{"model": "m"}', None),
        (b"", b'{"model": "m"}', None),
    ],
)
def test_the_model_is_read_where_there_is_one(media_type: bytes, body: bytes, model: str | None) -> None:
    assert model_of(media_type, body) == model


def test_what_a_page_of_another_site_can_send_without_asking_is_told() -> None:
    origin, form = (b"origin", b"https://evil.example"), (b"content-type", b"multipart/form-data")
    json = (b"content-type", b"application/json")
    assert may_be_another_sites("POST", [origin, form], [])
    assert may_be_another_sites("POST", [origin], [(b"vary", b"Origin")])
    assert may_be_another_sites("POST", [origin, form, (b"sec-fetch-site", b"same-site")], [])
    assert not may_be_another_sites("POST", [origin, json], [])
    assert not may_be_another_sites("POST", [form], [])
    assert not may_be_another_sites("PUT", [origin, form], [])  # a browser asks first
    assert not may_be_another_sites("POST", [origin, form, (b"sec-fetch-site", b"same-origin")], [])
    assert not may_be_another_sites("POST", [origin, form], [(b"access-control-allow-origin", b"*")])
