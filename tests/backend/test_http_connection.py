"""What one connection of the HTTP client makes of the bytes that it reads, in every cut. No sockets."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from backend.http_connection import PIECE_BYTES, HttpConnection
from backend.http_ports import Headers, Origin
from tests.backend.http_server import Kept

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
OTHERS = OK + b"Content-Length: 6\r\n\r\nsecret"
JSON = b"Content-Type: application/json\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written; `num_buffered` is what it has not sent."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.num_buffered = 0
        self.is_paused = False
        self.end = ""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.num_buffered

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return bool(self.end)

    def close(self) -> None:
        self.end = self.end or "closed"

    def abort(self) -> None:
        self.end = self.end or "aborted"


@dataclass
class Owner:
    freed_: list[HttpConnection] = field(default_factory=list)

    def freed(self, connection: HttpConnection) -> None:
        self.freed_.append(connection)

    def lost(self, connection: HttpConnection) -> None: ...


class Asked:
    """An exchange on a connection of its own."""

    def __init__(self, method: str = "POST", max_head_bytes: int = 1000, body: bytes = b"") -> None:
        self.receiver = Kept()
        self.is_bodiless = method == "HEAD"
        self.end = ""
        self.message = ""
        self.has_byte = self.is_unread = False
        self.aborts_at_head = False
        self.owner = Owner()
        self.transport = Transport()
        self.connection = HttpConnection(self.owner, Origin("localhost", 80), max_head_bytes)
        self.connection.connection_made(self.transport)
        self.connection.ask(self, b"HEAD\r\n\r\n", body)

    def feed(self, *pieces: bytes) -> Asked:
        for piece in pieces:
            if not self.transport.end:  # as transports do
                self.connection.data_received(piece)
        return self

    def begun(self, status: int, headers: Headers) -> None:
        self.receiver.begun(status, headers)
        if self.aborts_at_head:
            self.connection.abort()

    def ended(self) -> None:
        self.receiver.ended()

    def failed(self, message: str, began: bool, is_unread: bool = False) -> None:
        assert not self.receiver.end
        self.receiver.end, self.message, self.has_byte = "failed", message, began
        self.is_unread = is_unread

    def again(self) -> Asked:
        """Whether it can or not, ask for another response, of which nothing has left the process yet."""
        self.owner.freed_.clear()
        self.receiver = Kept()
        self.connection.ask(self, b"HEAD\r\n\r\n", b"body")
        self.transport.num_buffered = len(b"HEAD\r\n\r\nbody")
        return self

    @property
    def can_reuse(self) -> bool:
        assert not (self.owner.freed_ and self.transport.end)
        return bool(self.owner.freed_)

    @property
    def told(self) -> tuple[int, Headers, bytes, str, bool]:
        kept = self.receiver
        return kept.status, kept.headers, kept.body, kept.end, self.can_reuse


# name: (response, status, body, end, whether another request can follow)
RESPONSES = {
    "length": (OK + b"Content-Length: 5\r\n\r\nhello", 200, b"hello", "ended", True),
    "no body": (OK + b"Content-Length: 0\r\n\r\n", 200, b"", "ended", True),
    "chunks": (CHUNKED + b"2\r\nhe\r\n3;a=b\r\nllo\r\n0\r\n\r\n", 200, b"hello", "ended", True),
    "trailers": (CHUNKED + b"5\r\nhello\r\n0\r\nA: b\r\nC: d\r\n\r\n", 200, b"hello", "ended", True),
    "close": (OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi", "ended", False),
    "old": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi", "ended", False),
    "old, kept": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi",
        *(200, b"hi", "ended", True),
    ),
    "without reason": (b"HTTP/1.1 404\r\nContent-Length: 0\r\n\r\n", 404, b"", "ended", True),
    "nothing new": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", 304, b"", "ended", True),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", "ended", True),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
        + OK
        + b"Content-Length: 2\r\n\r\nhi",
        *(200, b"hi", "ended", True),
    ),
    "until its end": (OK + b"\r\nhello", 200, b"hello", "", False),
    "unfinished": (OK + b"Content-Length: 6\r\n\r\nhello", 200, b"hello", "", False),
    "more than one": (OK + b"Content-Length: 2\r\n\r\nhi" + OK, 200, b"hi", "ended", False),
    "garbage after it": (OK + b"Content-Length: 2\r\n\r\nhiyou", 200, b"hi", "ended", False),
    "another's": (OK + b"Content-Length: 2\r\n\r\nhi" + OTHERS, 200, b"hi", "ended", False),
    "another's after chunks": (CHUNKED + b"2\r\nhi\r\n0\r\n\r\n" + OTHERS, 200, b"hi", "ended", False),
    "another's after nothing": (b"HTTP/1.1 204 No\r\n\r\n" + OTHERS, 204, b"", "ended", False),
    "redirect": (b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", 302, b"", "ended", True),
    "bad chunk": (CHUNKED + b"2\r\nhi\r\nxyz", 200, b"hi", "failed", False),
    "lying chunk": (CHUNKED + b"2\r\nhiyou", 200, b"hi", "failed", False),
    "giant chunk": (CHUNKED + b"F" * 20 + b"\r\n", 200, b"", "failed", False),
    "not HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", 0, b"", "failed", False),
    "two lengths": (OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi", 0, b"", "failed", False),
    "length and chunks": (
        OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        *(0, b"", "failed", False),
    ),
    "other coding": (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 0, b"", "failed", False),
    "other protocol": (
        b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\nabc",
        *(0, b"", "failed", False),
    ),
    "bare line feeds": (b"HTTP/1.1 200 OK\nContent-Length: 0\n\n", 0, b"", "failed", False),
    "folded header": (OK + b"A: b\r\n c\r\nContent-Length: 0\r\n\r\n", 0, b"", "failed", False),
}

FOLLOWED = (
    "more than one",
    "garbage after it",
    "another's",
    "another's after chunks",
    "another's after nothing",
)


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_is_told_the_same_in_every_cut(name: str) -> None:
    data, status, body, end, can_reuse = RESPONSES[name]
    headers = Asked().feed(data).receiver.headers
    expected = (status, headers, body, end, can_reuse)
    chance = random.Random(name)
    cuts = [[at] for at in range(len(data) + 1)] + [list(range(1, len(data)))]
    cuts += [sorted(chance.sample(range(len(data)), k=min(len(data), 5))) for _ in range(30)]
    for cut in cuts:
        pieces = [data[a:b] for a, b in zip([0, *cut], [*cut, len(data)], strict=True)]
        asked = Asked().feed(*(piece for piece in pieces if piece))
        if name in FOLLOWED:  # in a later read it comes to a free connection
            asked.owner.freed_.clear()
        assert asked.told == expected, pieces
        assert bool(asked.transport.end) == (not can_reuse and bool(end)), pieces
        assert asked.has_byte == (end == "failed")


@pytest.mark.parametrize(
    "response",
    [
        *(OK + b"Content-Length: 4\r\n\r\nhi\r\n", OK + b"Content-Length: 0\r\n\r\n"),
        *(b"HTTP/1.1 204 No\r\n\r\n", CHUNKED + b"2\r\nhi\r\n0\r\n\r\n"),
        CHUNKED + b"2\r\n\r\n\r\n0\r\nA: b\r\n\r\n",
    ],
)
def test_blank_lines_after_a_response_end_the_connection(response: bytes) -> None:
    assert Asked().feed(response).can_reuse
    for line in (b"\r\n", b"\n", b"\r\n\r\n\r\n"):
        asked = Asked().feed(response + line)
        assert (asked.receiver.end, asked.can_reuse, asked.transport.end) == ("ended", False, "closed")


@pytest.mark.parametrize("early", [OTHERS, OTHERS[:10], b"HTTP/1.1 103 Early\r\n\r\n", b"garbage"])
def test_what_comes_before_the_next_request_is_out_is_not_its_response(early: bytes) -> None:
    asked = Asked().feed(RESPONSES["length"][0]).again()
    asked.feed(early)
    assert (asked.receiver.status, asked.receiver.end, asked.transport.end) == (0, "failed", "aborted")
    assert (asked.message, asked.has_byte, asked.is_unread) == ("answered before it was asked", False, True)
    asked = Asked().feed(RESPONSES["length"][0]).again()
    asked.transport.num_buffered -= 1  # some of it is out: the server may refuse it already
    assert asked.feed(RESPONSES["close"][0]).told[2:] == (b"hi", "ended", False)


def test_an_end_before_the_next_request_is_out_says_so() -> None:
    asked = Asked().feed(RESPONSES["length"][0]).again()
    asked.connection.eof_received()
    assert (asked.receiver.end, asked.has_byte, asked.is_unread) == ("failed", False, True)
    for num_bytes in (0, 1):
        asked = Asked().feed(RESPONSES["length"][0]).again()
        asked.transport.num_buffered = 0
        asked.feed(b"HTTP/1.1"[:num_bytes]) if num_bytes else None
        asked.connection.connection_lost(None)
        assert (asked.receiver.end, asked.has_byte, asked.is_unread) == ("failed", bool(num_bytes), False)
    fresh = Asked()
    fresh.transport.num_buffered = 1000
    fresh.connection.connection_lost(None)
    assert (fresh.receiver.end, fresh.is_unread) == ("failed", False)


def test_headers_are_in_lower_case_and_without_spaces_around_them() -> None:
    asked = Asked().feed(OK + b"X-A:  b c \t\r\nX-a: d\r\nEmpty:\r\nContent-Length: 0\r\n\r\n")
    assert asked.receiver.headers == [
        *((b"x-a", b"b c"), (b"x-a", b"d"), (b"empty", b""), (b"content-length", b"0"))
    ]


def test_trailers_are_not_headers() -> None:
    asked = Asked().feed(RESPONSES["trailers"][0])
    assert asked.receiver.headers == [(b"transfer-encoding", b"chunked")]


def test_what_one_read_holds_is_told_in_one_piece() -> None:
    asked = Asked().feed(CHUNKED, b"2\r\nhe\r\n3\r\nllo\r\n", b"1\r\n!\r\n", b"1\r\n?\r\n0\r\n\r\n")
    assert asked.receiver.parts == [b"hello", b"!", b"?"]


def test_head_brings_no_body_and_its_connection_is_closed() -> None:
    for data in (
        OK + b"Content-Length: 5\r\n\r\n",
        CHUNKED,
        OK + b"\r\n",
        OK + b"Content-Length: 5\r\n\r\nhello",
    ):
        asked = Asked("HEAD").feed(data)
        assert asked.told == (200, asked.receiver.headers, b"", "ended", False)
        assert asked.transport.end == "closed"
    assert Asked("HEAD").feed(b"HTTP/1.1 204 No\r\n\r\n").can_reuse


@pytest.mark.parametrize("response", [OK + JSON + b"\r\nhello", CHUNKED + b"5\r\nhello\r\n"])
@pytest.mark.parametrize("how", ["eof", "lost", "reset"])
def test_the_connections_end_ends_a_body_only_where_it_may(response: bytes, how: str) -> None:
    asked = Asked().feed(response)
    if how == "eof":
        asked.connection.eof_received()
        assert asked.transport.end == "aborted"
    asked.connection.connection_lost(ConnectionResetError("reset by peer") if how == "reset" else None)
    is_whole = response.startswith(OK + JSON) and how != "reset"
    assert asked.receiver.body == b"hello"
    assert asked.receiver.end == ("ended" if is_whole else "failed")
    if not is_whole:
        assert asked.has_byte
        reason = ": reset by peer" if how == "reset" else ""
        assert asked.message == f"closed the connection in the middle of its response{reason}"


@pytest.mark.parametrize(("data", "began"), [(b"", False), (b"H", True), (OK + b"Content-Le", True)])
def test_an_end_before_the_heads_end_is_no_response(data: bytes, began: bool) -> None:
    asked = Asked()
    asked.feed(data) if data else None
    asked.connection.eof_received()
    asked.connection.connection_lost(None)
    assert (asked.receiver.end, asked.has_byte, asked.receiver.status) == ("failed", began, 0)


LONG = b"A: " + b"a" * 1200


@pytest.mark.parametrize(
    "data",
    [
        OK + LONG + b"\r\n\r\n",
        OK + LONG,
        OK + b"A: b\r\n" * 300,
        b"HTTP/1.1 200 " + b"O" * 1200,
        b"HTTP/1.1 103 Early\r\nA: b\r\n\r\n" * 300,
        CHUNKED + b"1\r\na\r\n0\r\n" + LONG,
        CHUNKED + b"1\r\na\r\n0\r\n" + LONG + b"\r\n\r\n",
        CHUNKED + b"1\r\na\r\n1;a=" + b"a" * 1200,
    ],
)
def test_a_head_over_the_limit_fails_and_names_it(data: bytes) -> None:
    for size in (100, 7, 1):
        asked = Asked().feed(*(data[at : at + size] for at in range(0, len(data), size)))
        assert asked.receiver.end == "failed"
        assert "bytes or more; max_head_bytes is 1000" in asked.message
        assert asked.transport.end == "aborted"


def test_headers_over_the_limit_in_one_read_fail_too() -> None:
    for data in (
        OK + LONG + b"\r\n\r\n",
        OK + b"A: b\r\n" * 300,
        CHUNKED + b"1\r\na\r\n0\r\n" + LONG + b"\r\n\r\n",
    ):
        asked = Asked().feed(data)
        assert asked.receiver.end == "failed"
        assert "bytes or more; max_head_bytes is 1000" in asked.message
    asked = Asked().feed(OK + b"A: b\r\n" * 120 + b"Content-Length: 0\r\n\r\n")
    assert len(asked.receiver.headers) == 121


def test_silent_reads_between_tokens_do_not_add_up() -> None:
    asked = Asked().feed(CHUNKED)
    for _ in range(300):
        asked.feed(b"1", b"\r\n", b"a", b"\r\n")
    assert asked.receiver.body == b"a" * 300


def test_a_long_body_waits_for_the_transport() -> None:
    body = random.Random(1).randbytes(5 * PIECE_BYTES + 7)
    asked = Asked(body=b"")
    asked.connection.pause_writing()
    asked.transport.written.clear()
    asked.connection.ask(asked, b"HEAD\r\n\r\n", body)
    assert asked.transport.written == [b"HEAD\r\n\r\n"]
    asked.connection.resume_writing()
    assert b"".join(asked.transport.written) == b"HEAD\r\n\r\n" + body
    assert max(map(len, asked.transport.written)) == PIECE_BYTES


def test_a_response_before_the_request_is_out_ends_the_connection() -> None:
    body = bytes(5 * PIECE_BYTES)
    asked = Asked()
    asked.connection.pause_writing()
    asked.connection.ask(asked, b"HEAD\r\n\r\n", body)
    asked.feed(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
    assert asked.told[2:] == (b"no", "ended", False)
    assert asked.transport.end == "aborted"
    asked.connection.resume_writing()
    assert asked.transport.written[1:] == [b"HEAD\r\n\r\n"]

    asked = Asked()
    asked.transport.num_buffered = 1
    asked.feed(OK + b"Content-Length: 0\r\n\r\n")
    assert asked.transport.end == "aborted"


def test_a_receiver_that_aborts_hears_nothing_more() -> None:
    whole = CHUNKED + b"2\r\nhi\r\n0\r\n\r\n"
    asked = Asked()
    asked.aborts_at_head = True
    asked.feed(whole)
    assert (asked.receiver.status, *asked.told[2:]) == (200, b"", "", False)
    for data in (whole, CHUNKED + b"2\r\nhi\r\nxyz", CHUNKED + b"2\r\nhi\r\n"):
        asked = Asked()
        asked.receiver.on_data = lambda data, asked=asked: asked.connection.abort()
        asked.feed(data)
        asked.connection.connection_lost(None)
        assert asked.told[2:] == (b"hi", "", False)


def test_the_next_response_on_a_connection_is_read_afresh() -> None:
    first = Asked().feed(RESPONSES["trailers"][0])
    for name in ("length", "chunks", "interim", "no content", "unfinished"):
        data, status, body, end, can_reuse = RESPONSES[name]
        first.owner.freed_.clear()
        first.receiver = Kept()
        first.connection.ask(first, b"HEAD\r\n\r\n", b"")
        first.feed(data)
        assert first.told == (status, first.receiver.headers, body, end, can_reuse)
        assert len(first.receiver.headers) == data.split(b"103 ")[-1].count(b": ") - (name == "interim")


def test_a_freed_connection_reads_again_and_closes_on_what_nobody_asked_for() -> None:
    asked = Asked().feed(OK + b"Content-Length: 2\r\n\r\n")
    asked.connection.pause()
    asked.feed(b"hi")
    assert asked.can_reuse
    assert not asked.transport.is_paused
    asked.connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert asked.transport.end == "closed"
    assert not asked.connection.is_usable
