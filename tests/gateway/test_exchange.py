"""A request at the ASGI edge: its id, its body within limits, and the end of both sides."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.exchange import ABORT_EXTENSION, Exchange, require_json
from pipeline.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ClientGone,
    Draining,
    InvalidRequest,
    NoWorker,
    UnknownModel,
)
from tests.gateway.answering import turns
from tests.gateway.asgi import Request


def exchange(request: Request, max_buffered_bytes: int = 100) -> Exchange:
    return Exchange(request.scope, request.receive, request.send, max_buffered_bytes)


# -- ids and headers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["abc", "a" * 128, "A-b_c.d:9", "0"])
async def test_sane_request_id_is_the_clients(given: str) -> None:
    assert exchange(Request(headers={"x-request-id": given})).record.request_id == given


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", "a\nb", 'a"b', "é", "a/b", "<x>", "a\r"])
async def test_any_other_request_id_is_replaced(given: str) -> None:
    ids = {exchange(Request(headers={"x-request-id": given})).record.request_id for _ in range(2)}
    assert given not in ids
    assert len(ids) == 2
    assert all(len(each) == 32 and each.isalnum() for each in ids)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("10", 10.0),
        ("0.5", 0.5),
        ("0", None),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("x", None),
        ("", None),
    ],
)
async def test_header_of_seconds(value: str, seconds: float | None) -> None:
    name = "x-stainless-read-timeout"
    assert exchange(Request(headers={name: value})).seconds_header(name.encode()) == seconds


async def test_header_of_seconds_that_is_absent() -> None:
    assert exchange(Request()).seconds_header(b"x-stainless-read-timeout") is None


@pytest.mark.parametrize("given", ["application/json", "Application/JSON; charset=utf-8", "text/x+json"])
def test_json_content_types_pass(given: str) -> None:
    require_json({b"content-type": given.encode()})


def test_missing_content_type_is_refused() -> None:
    """A page of another site can send such a request without asking."""
    with pytest.raises(InvalidRequest, match="must be 'application/json'"):
        require_json({})


@pytest.mark.parametrize(
    "given", ["text/plain", "multipart/form-data; boundary=x", "application/xml", "json"]
)
def test_other_content_types_are_refused_by_name(given: str) -> None:
    with pytest.raises(InvalidRequest, match=given.partition(";")[0]) as refused:
        require_json({b"content-type": given.encode()})
    assert refused.value.param == "content-type"


# -- body ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[b"abc"], [b"a", b"", b"bc"], [b"", b"abc"], [b"a", b"b", b"c"]])
async def test_body_is_joined(pieces: list[bytes]) -> None:
    assert await exchange(Request("/", *pieces)).read_body(3, 5.0) == b"abc"


async def test_empty_body() -> None:
    assert await exchange(Request()).read_body(3, 5.0) == b""


async def test_declared_length_over_the_limit_is_refused_unread() -> None:
    request = Request("/", b"abcd", headers={"content-length": "4"})
    with pytest.raises(BodyTooLarge, match="4 bytes or more; the limit is 3"):
        await exchange(request).read_body(3, 5.0)
    assert request.num_received == 0


@pytest.mark.parametrize("declared", ["9" * 40, "1" + "0" * 25])
async def test_absurd_declared_length_is_refused(declared: str) -> None:
    with pytest.raises(BodyTooLarge):
        await exchange(Request("/", b"abc", headers={"content-length": declared})).read_body(1 << 25, 5.0)


async def test_streamed_body_is_refused_as_soon_as_it_is_over_the_limit() -> None:
    request = Request("/", b"ab", b"cd", b"ef", b"gh")
    with pytest.raises(BodyTooLarge):
        await exchange(request).read_body(3, 5.0)
    assert request.num_received == 2


async def test_declared_length_may_lie() -> None:
    request = Request("/", b"ab", b"cd", headers={"content-length": "2"})
    with pytest.raises(BodyTooLarge):
        await exchange(request).read_body(3, 5.0)


async def test_body_that_does_not_come_has_a_time_limit() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    request = Request()
    one = Exchange(request.scope, receive, request.send, 100)
    with pytest.raises(BodyTooSlow, match=r"0\.01 s"):
        await one.read_body(10, 0.01)


async def test_client_that_goes_during_its_body() -> None:
    request = Request("/", b"ab", b"cd")
    one = exchange(request)
    reading = asyncio.create_task(one.read_body(100, 5.0))
    request.disconnect()
    with pytest.raises(ClientGone):
        await reading
    one.fail(ClientGone("closed before its body was complete"))
    assert (one.record.status, one.record.ended) == (499, "client_closed")
    assert request.client.messages == []
    assert one.outlet.closed


# -- ends ----------------------------------------------------------------------------------------------------


async def test_finished_returns_when_the_response_is_complete() -> None:
    request = Request()
    one = exchange(request)
    one.on_gone = pytest.fail
    await one.read_body(10, 5.0)
    finished = asyncio.create_task(one.finished())
    one.outlet.start(200, [])
    one.outlet.push(b"a")
    await turns()
    assert not finished.done()
    one.outlet.end(b"b")
    await asyncio.wait_for(finished, 5)


async def test_finished_tells_of_a_client_that_goes_in_the_middle() -> None:
    request = Request()
    one = exchange(request)
    gone: list[str] = []
    one.on_gone = gone.append
    await one.read_body(10, 5.0)
    finished = asyncio.create_task(one.finished())
    one.outlet.push(b"a")
    await turns()
    request.disconnect()
    await asyncio.wait_for(finished, 5)
    assert gone == ["closed the connection"]
    one.outlet.push(b"b")
    assert request.client.body == b"a"


async def test_finished_tells_of_a_client_that_goes_before_its_last_bytes() -> None:
    request = Request()
    one = exchange(request)
    gone: list[str] = []
    one.on_gone = gone.append
    await one.read_body(10, 5.0)
    finished = asyncio.create_task(one.finished())
    request.client.stops_reading()
    one.outlet.push(b"a")
    one.outlet.end(b"b")
    await turns()
    request.disconnect()
    await asyncio.wait_for(finished, 5)
    assert gone == ["closed the connection"]
    await asyncio.wait_for(one.outlet.flushed(), 5)


async def test_a_client_past_its_bound_is_told_of_and_cut() -> None:
    cut: list[bool] = []
    request = Request(extensions={ABORT_EXTENSION: lambda: cut.append(True)})
    one = exchange(request, max_buffered_bytes=3)
    gone: list[str] = []
    one.on_gone = gone.append
    request.client.stops_reading()
    one.outlet.push(b"in the send")
    one.outlet.push(b"abcd")
    assert len(gone) == 1
    assert cut == [True]


async def test_error_goes_to_the_client_and_its_facts_to_the_log() -> None:
    for error, status, detail in (
        (NoWorker("none is ready"), 503, "none is ready"),
        (InvalidRequest("'x' is 'MARKER'", "messages[0].role"), 400, "messages"),
        (InvalidRequest("a key", "chat_template_kwargs.MARKER"), 400, "chat_template_kwargs"),
        (InvalidRequest("twice", "敏 MARKER: text of a user"), 400, ""),
        (UnknownModel("MARKER"), 404, "model"),
        (KeyError("MARKER"), 500, ""),
    ):
        request = Request()
        one = exchange(request)
        one.fail(error)
        assert (request.client.status, one.record.status) == (status, status)
        assert one.record.detail == detail
        assert one.record.ended == request.client.json["error"]["code"] or one.record.ended != ""
        assert "MARKER" not in repr(one.record.log_fields(0.0, 0.0))


async def test_what_is_refused_in_a_pause_begins_no_more_work() -> None:
    """As when the server stops while a prompt lets others run."""
    has_begun = False

    async def work() -> None:
        nonlocal has_begun
        has_begun = True

    one = exchange(Request())
    one.refuse(Draining())
    with pytest.raises(Draining):
        await one.unless_gone(work())
    assert not has_begun
