"""The pages' files as they are served."""

from __future__ import annotations

import re

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from gateway.docs_page import page_routes


@pytest.fixture
def client() -> TestClient:
    return TestClient(Starlette(routes=page_routes("1.2.3")))


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/docs", "text/html; charset=utf-8"),
        ("/static/chat.js", "text/javascript; charset=utf-8"),
        ("/static/theme.css", "text/css; charset=utf-8"),
        ("/static/icon.svg", "image/svg+xml"),
        ("/openapi.json", "application/json"),
    ],
)
def test_file_is_served_with_strict_headers(client: TestClient, path: str, media_type: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == media_type
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_unchanged_file_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/")
    again = client.get("/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/static/", "/static/..%2fapp.py", "/static/nothing.js", "/static/__init__.py"]
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_page_has_no_inline_code_and_no_foreign_address(client: TestClient, path: str) -> None:
    page = client.get(path).text
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)
    for address in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert not re.match(r"[a-z]+:|//|/", address)  # relative: works behind a path prefix, and offline
        assert client.get("/" + address.removeprefix("./")).status_code == 200
