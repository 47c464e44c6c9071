"""Who answers a request for a stream's paths, through the app as it is wired, and what nobody answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.routing import Match

from gateway.app import App, build_app
from gateway.settings import Settings
from gateway.settings_access import Access
from gateway.stream_events import StreamEvents
from gateway.stream_routes import StreamDelete
from gateway.stream_start import StreamStart
from tests.gateway.answering import Client
from tests.gateway.asgi import Request, served
from tests.gateway.serving import chat, service
from tests.gateway.streaming import STREAMS

ID = "0123456789abcdef" * 2
START, EVENTS, DELETE = StreamStart, StreamEvents, StreamDelete
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get", "X")

# path -> by method who answers; for any other method of a path that is one, 405, and 404 for what is none
PATHS: dict[str, dict[str, type] | None] = {
    STREAMS: {"POST": START},
    f"{STREAMS}/{ID}": {"DELETE": DELETE},
    f"{STREAMS}/{ID}/events": {"GET": EVENTS},
    f"{STREAMS}/x/events": {"GET": EVENTS},
    f"{STREAMS}/ü%/events": {"GET": EVENTS},
    f"{STREAMS}/events": {"DELETE": DELETE},
    f"{STREAMS}/events/events": {"GET": EVENTS},
    f"{STREAMS}/{ID}/events/": None,
    f"{STREAMS}/{ID}/": None,
    f"{STREAMS}/{ID}/Events": None,
    f"{STREAMS}/{ID}/events/x": None,
    f"{STREAMS}/a/b/events": None,
    f"{STREAMS}/{ID}/event": None,
    f"{STREAMS}x": None,
    f"{STREAMS}x/{ID}/events": None,
    f"/v1/Streams/{ID}/events": None,
    f"/v2/streams/{ID}/events": None,
    f"/v1//streams/{ID}/events": None,
    f"//v1/streams/{ID}/events": None,
}


@pytest.fixture(scope="module")
def app() -> App:
    return build_app(Settings())


async def ask(app: Any, method: str, path: str, **options: Any) -> Client:
    return await Request(path, method=method, **options).run(app)


@pytest.mark.parametrize("path", PATHS)
async def test_each_path_has_its_methods_and_no_other(path: str, app: App) -> None:
    by_method = PATHS[path]
    for method in METHODS:
        request = Request(path, method=method)
        answers = None if by_method is None else by_method.get(method)
        endpoint = app._streams.endpoint(request.scope)
        assert endpoint is None if answers is None else type(endpoint) is answers, method
        client = await request.run(app)
        if answers is EVENTS:
            assert (client.status, b"stream_not_found" in client.body) == (200, True)
        elif answers is DELETE:
            assert (client.status, client.json["error"]["code"]) == (404, "stream_not_found")
        elif answers is START:
            assert client.status == 400  # without a body
        else:
            assert client.status == (404 if by_method is None else 405), method
            assert client.headers["content-type"] == "application/json"
            assert client.json["error"]["type"] == "invalid_request_error"
            assert client.json["error"].keys() == {"message", "type", "param", "code"}
            if by_method is not None:
                assert set(client.headers["allow"].split(", ")) == set(by_method)


@pytest.mark.parametrize("path", PATHS)
def test_the_quick_way_and_starlettes_agree(path: str, app: App) -> None:
    for method in METHODS:
        scope = Request(path, method=method).scope
        full = [route for route in app._streams.routes() if route.matches(scope)[0] is Match.FULL]
        endpoint = app._streams.endpoint(scope)
        assert [route.endpoint for route in full] == ([] if endpoint is None else [endpoint])


async def test_a_folder_without_a_name_has_no_stream(app: App) -> None:
    for method, path in (("GET", f"{STREAMS}//events"), ("DELETE", f"{STREAMS}/")):
        client = await ask(app, method, path)
        assert b"stream_not_found" in client.body
    for method, path in (("GET", f"{STREAMS}/"), ("POST", f"{STREAMS}/"), ("GET", STREAMS)):
        client = await ask(app, method, path)
        assert client.status in (404, 405)
        assert "location" not in client.headers


async def test_options_of_another_site_are_answered_without_a_key() -> None:
    access = Access(allowed_origins=("https://app.example.com",), api_key=("secret",))
    app = build_app(Settings(access=access))
    headers = {"origin": "https://app.example.com", "access-control-request-method": "DELETE"}
    for path in (STREAMS, f"{STREAMS}/{ID}", f"{STREAMS}/{ID}/events"):
        client = await ask(app, "OPTIONS", path, headers=headers)
        assert client.status == 204
        assert client.headers["access-control-allow-origin"] == "https://app.example.com"
    own = {"origin": "https://app.example.com"}
    client = await ask(app, "GET", f"{STREAMS}/{ID}/events", headers=own)
    assert (client.status, client.headers["access-control-allow-origin"]) == (200, own["origin"])
    client = await ask(app, "DELETE", f"{STREAMS}/{ID}", headers=own)
    assert (client.status, client.headers["access-control-allow-origin"]) == (404, own["origin"])
    client = await ask(app, "POST", STREAMS, headers=own)
    assert (client.status, client.headers["access-control-allow-origin"]) == (401, own["origin"])


TARGETS = [
    ("GET", "/v1/streams/{id}/events?token={token}", 200, "done"),
    ("GET", "/v1/streams/{id}%2Fevents?token={token}", 200, "done"),
    ("GET", "/v1/streams/{id}/event%73?token={token}", 200, "done"),
    ("GET", "/v1%2Fstreams/{id}/events?token={token}", 200, "done"),
    ("GET", "/v1/streams/%2e%2e/events?token={token}", 200, "stream_not_found"),
    ("GET", "/v1/streams/{id}%00/events?token={token}", 200, "stream_not_found"),
    ("GET", "/v1/streams/{id}%0a/events?token={token}", 200, "stream_not_found"),
    ("GET", "/v1/streams/%ff%fe%C3/events", 200, "stream_not_found"),
    ("GET", "/v1/streams/%/events", 200, "stream_not_found"),
    ("GET", "/v1/streams/%zz/events?%", 200, "stream_not_found"),
    ("GET", "/v1/streams/{id}/events?token=%ff&token=%", 200, "invalid_stream_token"),
    ("GET", "/v1/streams/{id}/events?token={token}&last_event_id=%31%30%30", 200, "invalid_event_id"),
    ("DELETE", "/v1/streams/%ff%00", 404, "stream_not_found"),
    ("DELETE", "/v1/streams/{id}?token=%E6%B0%B4", 401, "invalid_stream_token"),
]


async def test_percent_encodings_are_read_as_the_server_reads_them() -> None:
    async with service() as made, served(made) as port:
        client = await Request(STREAMS, chat()).run(made)
        made.engine.streams[0].say("a", "stop")
        for method, target, status, code in TARGETS:
            target = target.replace("{id}", client.json["id"]).replace("{token}", client.json["token"])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{method} {target} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
            response = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            await writer.wait_closed()
            assert response.startswith(f"HTTP/1.1 {status} ".encode()), target
            assert code.encode() in response, target
            assert client.json["token"].encode() not in response
