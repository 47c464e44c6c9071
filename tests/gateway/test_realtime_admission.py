"""Who may have a conversation: origins, keys in headers and subprotocols, and what of it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gateway.keys import ApiKeys
from gateway.realtime_admission import Admission, OriginRefused
from pipeline.errors import BadKey, InvalidRequest

KEY = "sk-a.b_c"
ALLOWED = ("https://app.example.com,https://two.example.com:8443", "null")


def scope(
    headers: Mapping[str, str] | None = None, offered: Sequence[str] = (), query: str = ""
) -> dict[str, Any]:
    pairs = {"host": "gateway.example:8000"} | dict(headers or {})
    return {
        "headers": [(name.encode(), value.encode()) for name, value in pairs.items()],
        "subprotocols": list(offered),
        "query_string": query.encode(),
    }


def admission(origins: Sequence[str] = (), keys: Sequence[str] = ()) -> Admission:
    return Admission(ApiKeys(keys), origins)


@pytest.mark.parametrize(
    "origin",
    [
        "https://app.example.com",
        "https://two.example.com:8443",
        "null",
        "http://gateway.example:8000",
        "https://gateway.example:8000",
        "HTTPS://Gateway.Example:8000",
    ],
)
def test_our_own_pages_and_those_of_allowed_origins_may(origin: str) -> None:
    admission(ALLOWED).admit(scope({"origin": origin}))


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://app.example.com",
        "https://two.example.com",
        "https://gateway.example",
        "https://gateway.example:8000.evil.example",
        "chrome-extension://gateway.example:8000",
        "*",
        "",
        "https://gateway.example:8000/",
        "https://user@gateway.example:8000",
    ],
)
def test_other_pages_may_not(origin: str) -> None:
    with pytest.raises(OriginRefused) as refused:
        admission(ALLOWED).admit(scope({"origin": origin}))
    assert refused.value.status_hint == 403


def test_without_allowed_origins_only_our_own_pages_may() -> None:
    admission().admit(scope({"origin": "http://gateway.example:8000"}))
    for origin in ("null", "https://app.example.com"):
        with pytest.raises(OriginRefused):
            admission().admit(scope({"origin": origin}))


def test_a_request_without_a_host_is_of_no_page_of_ours() -> None:
    with pytest.raises(OriginRefused):
        admission().admit(scope({"host": "", "origin": "http://"}))


def test_an_asterisk_lets_every_page_in() -> None:
    admission(["*"]).admit(scope({"origin": "https://evil.example"}))


def test_who_is_no_browser_has_no_origin() -> None:
    assert admission().admit(scope()).key_id is None


@pytest.mark.parametrize(
    ("headers", "offered"),
    [
        ({"authorization": f"Bearer {KEY}"}, ()),
        ({}, ("realtime", f"openai-insecure-api-key.{KEY}")),
        ({}, (f"openai-insecure-api-key.{KEY}", "openai-beta.realtime-v1", "openai-organization.o")),
        ({"authorization": f"Bearer {KEY}"}, ("openai-insecure-api-key.wrong",)),
    ],
)
def test_a_key_may_come_as_a_header_or_a_subprotocol(
    headers: dict[str, str], offered: tuple[str, ...]
) -> None:
    admitted = admission(keys=[KEY]).admit(scope(headers, offered))
    assert admitted.key_id is not None
    assert admitted.subprotocol == ("realtime" if "realtime" in offered else None)


@pytest.mark.parametrize(
    ("headers", "offered"),
    [
        ({}, ()),
        ({}, ("realtime",)),
        ({}, (f"openai-insecure-api-key.{KEY}x",)),
        ({}, (f"x-openai-insecure-api-key.{KEY}",)),
        ({"authorization": "Bearer wrong"}, (f"openai-insecure-api-key.{KEY}",)),
        ({"authorization": KEY}, ()),
    ],
)
def test_another_key_or_none_is_refused(headers: dict[str, str], offered: tuple[str, ...]) -> None:
    with pytest.raises(BadKey):
        admission(keys=[KEY]).admit(scope(headers, offered))


def test_the_origin_is_looked_at_before_the_key() -> None:
    with pytest.raises(OriginRefused):
        admission(keys=[KEY]).admit(scope({"origin": "https://evil.example"}))


def test_what_goes_on_holds_no_key() -> None:
    headers = {"authorization": f"Bearer {KEY}", "cookie": KEY, "sec-websocket-protocol": KEY}
    admitted = admission(keys=[KEY]).admit(scope(headers, [f"openai-insecure-api-key.{KEY}"]))
    assert KEY not in repr(admitted)


@pytest.mark.parametrize(
    ("query", "model"),
    [
        ("model=m", "m"),
        ("model=a%2Fb%20c", "a/b c"),
        ("model=one&model=two", "one"),
        ("model=", ""),
        ("x=1", None),
        ("", None),
        ("model=%FF", "\ufffd"),
        ("&&=&model=m", "m"),
    ],
)
def test_the_query_is_read(query: str, model: str | None) -> None:
    assert admission().admit(scope(query=query)).query.get("model") == model


def test_a_query_of_very_many_fields_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="more than 32 fields"):
        admission().admit(scope(query="a=1&" * 40))
