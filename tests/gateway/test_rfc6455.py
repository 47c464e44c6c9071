"""RFC 6455 on a real server, byte by byte: what a client may send and what not, and how each is answered.

The sections are those of the RFC. Where it is not followed to the letter: `gateway/websocket_protocol.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import pytest_asyncio

from tests.gateway.talking import EchoService, served
from tests.websocket_wire import (
    BINARY,
    CLOSE,
    CONT,
    PING,
    PONG,
    TEXT,
    Received,
    Socket,
    close_frame,
    frame,
    handshake,
    websocket,
)
from tests.wire import connect

MAX_BYTES = 1 << 17
PROTOCOL_ERROR, INVALID_DATA, TOO_BIG = 1002, 1007, 1009


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port() -> AsyncIterator[int]:
    async with served(EchoService(), MAX_BYTES) as port:
        yield port


async def still_talks(socket: Socket) -> None:
    await socket.send(frame(TEXT, b"still there"))
    assert await socket.text() == "still there"
    await socket.send(close_frame(1000))
    assert await socket.closed() == 1000


def fragments(payload: bytes, cuts: Sequence[int], opcode: int = TEXT) -> list[bytes]:
    """A message in frames that are cut at these places."""
    edges = [0, *cuts, len(payload)]
    pieces = [payload[start:end] for start, end in itertools.pairwise(edges)]
    last = len(pieces) - 1
    return [frame(CONT if at else opcode, each, fin=at == last) for at, each in enumerate(pieces)]


# 5.2: lengths

LENGTHS = [0, 1, 125, 126, 127, 128, 255, 256, 65535, 65536, 65537, MAX_BYTES]


async def test_a_message_of_any_length_comes_and_goes(port: int) -> None:
    async with websocket(port) as socket:
        for length in LENGTHS:
            await socket.send(frame(TEXT, b"*" * length))
            assert await socket.text() == "*" * length
        await still_talks(socket)


@pytest.mark.parametrize(("length", "length_bytes"), [(5, 2), (5, 8), (300, 8)])
async def test_a_length_in_more_bytes_than_it_needs_is_taken(
    port: int, length: int, length_bytes: int
) -> None:
    """5.2 forbids clients to send it, and does not say what to do."""
    async with websocket(port) as socket:
        await socket.send(frame(TEXT, b"x" * length, length_bytes=length_bytes))
        assert await socket.text() == "x" * length
        await still_talks(socket)


@pytest.mark.parametrize("length", [MAX_BYTES + 1, 1 << 20, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("opcode", [TEXT, BINARY])
async def test_a_message_that_is_too_large_is_refused_by_its_header_alone(
    port: int, opcode: int, length: int
) -> None:
    async with websocket(port) as socket:
        await socket.send(frame(opcode, b"", length=length, length_bytes=8))
        assert await socket.closed() == TOO_BIG


@pytest.mark.parametrize("size", [1, 1000, MAX_BYTES // 2 + 1])
async def test_a_message_that_is_too_large_in_all_its_fragments_is_refused(port: int, size: int) -> None:
    async with websocket(port) as socket:
        whole = b"y" * (MAX_BYTES - 1)
        await socket.send(frame(TEXT, whole, fin=False))
        await socket.send(frame(CONT, b"z", fin=False), frame(CONT, b"y" * size))
        assert await socket.closed() == TOO_BIG


async def test_a_message_of_the_largest_size_is_taken_in_fragments(port: int) -> None:
    async with websocket(port) as socket:
        await socket.send(*fragments(b"y" * MAX_BYTES, range(1000, MAX_BYTES, 1000)))
        assert await socket.text() == "y" * MAX_BYTES
        await still_talks(socket)


async def test_who_goes_on_sending_too_much_still_gets_the_close(port: int) -> None:
    """A reset because of unread input would overtake it."""
    async with websocket(port) as socket:
        await socket.send(frame(TEXT, b"", length=1 << 30), b"x" * 500_000)
        for _ in range(5):
            await socket.send(b"x" * 100_000)
        assert (await socket.read()).code == TOO_BIG


# 5.2: bits, opcodes and masks

MALFORMED = {
    **{f"reserved bits {rsv}": frame(TEXT, b"x", rsv=rsv) for rsv in range(1, 8)},
    **{f"reserved bits {rsv} in a ping": frame(PING, b"x", rsv=rsv) for rsv in (1, 4)},
    **{f"opcode {opcode}": frame(opcode, b"x") for opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)},
    **{
        f"opcode {opcode} unmasked": frame(opcode, b"x", masked=False)
        for opcode in (TEXT, BINARY, PING, PONG, CONT)
    },
    "close unmasked": frame(CLOSE, struct.pack("!H", 1000), masked=False),
    **{f"control frame {opcode} of 126": frame(opcode, b"x" * 126) for opcode in (PING, PONG, CLOSE)},
    **{f"control frame {opcode} of 70000": frame(opcode, b"x" * 70_000) for opcode in (PING, PONG)},
    **{f"control frame {opcode} in fragments": frame(opcode, b"", fin=False) for opcode in (PING, PONG)},
    "close in fragments": frame(CLOSE, struct.pack("!H", 1000), fin=False),
    "continuation of nothing": frame(CONT, b"x"),
    "continuation of nothing, more to come": frame(CONT, b"x", fin=False),
    "text within text": frame(TEXT, b"x", fin=False) + frame(TEXT, b"y"),
    "binary within text": frame(TEXT, b"x", fin=False) + frame(BINARY, b"y"),
    "text within binary": frame(BINARY, b"x", fin=False) + frame(TEXT, b"y", fin=False),
    "close of one byte": frame(CLOSE, b"\x03"),
}


@pytest.mark.parametrize("chopped", [False, True], ids=["whole", "chopped"])
@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_frame_ends_the_connection(port: int, name: str, chopped: bool) -> None:
    async with websocket(port) as socket:
        await socket.send(frame(TEXT, b"before"))
        assert await socket.text() == "before"
        data = MALFORMED[name]
        if chopped:
            for byte in data[:-1][:200]:
                await socket.send(bytes([byte]))
            await socket.send(data[200:] if len(data) > 200 else data[-1:])
        else:
            await socket.send(data)
        assert await socket.closed() == PROTOCOL_ERROR


# 5.4: fragments

MESSAGE = "zwölf Boxkämpfer 🥊 jagen"


async def test_a_message_may_be_cut_anywhere_also_within_a_character(port: int) -> None:
    payload = MESSAGE.encode()
    async with websocket(port) as socket:
        for first in range(len(payload) + 1):
            for second in range(first, len(payload) + 1):
                await socket.send(*fragments(payload, [first, second]))
        for _ in range((len(payload) + 1) * (len(payload) + 2) // 2):
            assert await socket.text() == MESSAGE
        await still_talks(socket)


async def test_control_frames_between_fragments_are_answered_at_once(port: int) -> None:
    async with websocket(port) as socket:
        for at, piece in enumerate(fragments(MESSAGE.encode(), range(1, len(MESSAGE.encode())))):
            await socket.send(piece, frame(PONG, b"unasked"))
            await socket.send(frame(PING, b"%d" % at))
            if at < len(MESSAGE.encode()) - 1:
                assert await socket.read() == Received(PONG, b"%d" % at)
        received = [await socket.read(), await socket.read()]
        assert Received(TEXT, MESSAGE.encode()) in received
        await still_talks(socket)


# 5.5.2 and 5.5.3: pings and pongs


async def test_a_ping_is_answered_with_its_own_payload(port: int) -> None:
    payloads = [b"", b"x", b"\x00\xff\xfe", b"p" * 125]
    async with websocket(port) as socket:
        for payload in payloads:
            await socket.send(frame(PING, payload))
            assert await socket.read() == Received(PONG, payload)
        await socket.send(*(frame(PING, payload) for payload in payloads))
        assert [await socket.read() for _ in payloads] == [Received(PONG, payload) for payload in payloads]
        await socket.send(frame(PONG, b"unasked"))
        await still_talks(socket)


# 5.6 and 8.1: text

NOT_UTF8 = {
    "a stray continuation byte": b"ok\x80",
    "a start byte alone": b"\xc3(",
    "an overlong slash": b"\xc0\xaf",
    "an overlong NUL": b"\xe0\x80\x80",
    "a surrogate": b"\xed\xa0\x80",
    "beyond Unicode": b"\xf4\x90\x80\x80",
    "a byte that never is": b"\xff",
    "two bytes of three": "€".encode()[:2],
    "three bytes of four": "🥊".encode()[:3],
    "text and half a character": MESSAGE.encode()[:3],
}


@pytest.mark.parametrize("name", NOT_UTF8)
async def test_text_that_is_not_utf8_ends_the_connection_however_it_is_cut(
    port: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = NOT_UTF8[name]
    caplog.set_level("DEBUG")
    for cut in range(len(data) + 1):
        async with websocket(port) as socket:
            await socket.send(*fragments(data, [cut] if cut else []))
            assert await socket.closed() == INVALID_DATA
    logged = {each.getMessage() for each in caplog.records if each.name != "asyncio"}
    assert logged <= {"= connection is CONNECTING"}, "a frame, or the bytes of one"


async def test_a_binary_message_may_hold_anything(port: int) -> None:
    """It reaches the app, which tells that it has no use for it."""
    async with websocket(port) as socket:
        await socket.send(*fragments(b"\xff\x00\x80", [1], BINARY))
        assert await socket.text() == "error None"
        await still_talks(socket)


# 5.5.1, 7.1 and 7.4: closing

GOOD_CODES = [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014, 3000, 3999, 4000, 4999]
BAD_CODES = [0, 1, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535]


@pytest.mark.parametrize("code", GOOD_CODES)
async def test_a_close_is_answered_with_its_own_code(port: int, code: int) -> None:
    async with websocket(port) as socket:
        await socket.send(close_frame(code, "tschüß".encode()), frame(TEXT, b"too late"), b"\xff\xff")
        assert await socket.closed() == code


@pytest.mark.parametrize("code", BAD_CODES)
async def test_a_close_with_a_code_that_must_not_be_sent_is_an_error(port: int, code: int) -> None:
    async with websocket(port) as socket:
        await socket.send(close_frame(code))
        assert await socket.closed() == PROTOCOL_ERROR


async def test_a_close_may_say_nothing(port: int) -> None:
    async with websocket(port) as socket:
        await socket.send(frame(CLOSE))
        assert await socket.closed() is None


async def test_the_longest_reason_of_a_close_is_taken(port: int) -> None:
    async with websocket(port) as socket:
        await socket.send(close_frame(1000, b"r" * 123))
        assert await socket.closed() == 1000


@pytest.mark.parametrize("name", NOT_UTF8)
async def test_a_close_whose_reason_is_not_utf8_is_an_error(port: int, name: str) -> None:
    async with websocket(port) as socket:
        await socket.send(close_frame(1000, NOT_UTF8[name]))
        assert await socket.closed() == INVALID_DATA


async def test_a_continuation_after_the_end_of_a_message_is_an_error(port: int) -> None:
    async with websocket(port) as socket:
        await socket.send(*fragments(b"whole", [2]))
        assert await socket.text() == "whole"
        await socket.send(frame(CONT, b"more"))
        assert await socket.closed() == PROTOCOL_ERROR


async def test_a_close_within_a_message_ends_the_connection(port: int) -> None:
    """5.4 allows it; `websockets` takes it as an error. The connection ends either way."""
    async with websocket(port) as socket:
        await socket.send(frame(TEXT, b"half", fin=False), close_frame(1000))
        assert await socket.closed() == PROTOCOL_ERROR


async def test_a_client_that_stops_sending_is_let_go(port: int) -> None:
    """7.1.5: TCP's end without a close is 1006; nobody can be told."""
    async with connect(port) as wire:
        assert (await handshake(wire, "/v1/realtime")).status == 101
        wire._writer.write_eof()
        assert await wire.closed_by_peer()


# 4.2: the handshake

BAD_HANDSHAKES: dict[str, tuple[dict[str, str | None], int]] = {
    "version 8": ({"sec-websocket-version": "8"}, 426),
    "version 14": ({"sec-websocket-version": "14"}, 426),
    "no version": ({"sec-websocket-version": None}, 426),
    "two versions": ({"sec-websocket-version": "13, 8"}, 426),
    "no key": ({"sec-websocket-key": None}, 400),
    "an empty key": ({"sec-websocket-key": ""}, 400),
    "a short key": ({"sec-websocket-key": "c2hvcnQ="}, 400),
    "a long key": ({"sec-websocket-key": "MDEyMzQ1Njc4OWFiY2RlZmc="}, 400),
    "a key that is not base64": ({"sec-websocket-key": "####################=="}, 400),
    "no upgrade": ({"upgrade": None}, 426),
    "another upgrade": ({"upgrade": "h2c"}, 426),
    "no connection": ({"connection": None}, 426),
    "connection without upgrade": ({"connection": "keep-alive"}, 426),
    "malformed subprotocols": ({"sec-websocket-protocol": "a b"}, 400),
}


@pytest.mark.parametrize("name", BAD_HANDSHAKES)
async def test_a_bad_handshake_is_refused_with_our_error(port: int, name: str) -> None:
    changed, status = BAD_HANDSHAKES[name]
    async with connect(port) as wire:
        head = await handshake(wire, "/v1/realtime", changed)
        assert head.status == status
        assert head["content-type"] == "application/json"
        assert set((await wire.json())["error"]) == {"message", "type", "param", "code"}
        if status == 426:
            assert head["sec-websocket-version"] == "13"
            assert head["upgrade"] == "websocket"


async def test_a_request_of_http_1_0_cannot_upgrade(port: int) -> None:
    async with connect(port) as wire:
        lines = "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        await wire.send(
            f"GET /v1/realtime HTTP/1.0\r\n{lines}sec-websocket-key: {'A' * 22}==\r\n\r\n".encode()
        )
        assert (await wire.head()).status == 426


@pytest.mark.parametrize(
    "changed",
    [
        {"upgrade": "WebSocket", "connection": "keep-alive, upgrade"},
        {"sec-websocket-extensions": "permessage-deflate; client_max_window_bits"},
        {"cookie": "c" * 20_000},
        {f"x-header-{number}": "x" for number in range(200)},
    ],
    ids=["any case", "extensions", "a long line", "many lines"],
)
async def test_a_good_handshake_may_look_otherwise(port: int, changed: dict[str, str | None]) -> None:
    async with websocket(port, headers=changed) as socket:
        assert socket.head.get("sec-websocket-extensions") is None
        await still_talks(socket)


# Everything at once

UNITS = (MESSAGE, "", "a" * 126, "ü" * 300, "{}")


def random_stream(rng: random.Random, num_messages: int) -> Iterator[tuple[bytes, str | None, bytes | None]]:
    """A good client's frames: each with the message that it completes, and the pong that it asks for."""
    for _ in range(num_messages):
        text = rng.choice(UNITS)
        payload = text.encode()
        cuts = sorted(rng.randint(0, len(payload)) for _ in range(rng.choice((0, 0, 1, 3))))
        pieces = fragments(payload, cuts)
        for at, piece in enumerate(pieces):
            if rng.random() < 0.3:
                asked = rng.randbytes(rng.randint(0, 125))
                yield frame(PING, asked), None, asked
            if rng.random() < 0.1:
                yield frame(PONG, b"unasked"), None, None
            yield piece, text if at == len(pieces) - 1 else None, None


async def random_case(socket: Socket, rng: random.Random, max_piece: int, num_messages: int) -> None:
    """A good client's bytes in pieces of any size; its messages come back in order, and so do its pongs."""
    units = list(random_stream(rng, num_messages))
    data = b"".join(unit for unit, _, _ in units)
    while data:
        size = rng.randint(1, max_piece)
        await socket.send(data[:size])
        data = data[size:]
        if rng.random() < 0.1:
            await asyncio.sleep(0)
    texts = [text.encode() for _, text, _ in units if text is not None]
    pongs = [pong for _, _, pong in units if pong is not None]
    received = [await socket.read() for _ in range(len(texts) + len(pongs))]
    assert [each.payload for each in received if each.opcode == TEXT] == texts
    assert [each.payload for each in received if each.opcode == PONG] == pongs


async def malformed_case(socket: Socket, rng: random.Random) -> None:
    """A good stream, then a malformed frame: what was answered comes back, and then a close."""
    await random_case(socket, rng, 400, 2)
    await socket.send(MALFORMED[rng.choice(sorted(MALFORMED))])
    assert await socket.closed() == PROTOCOL_ERROR


async def run_cases(port: int, seeds: Sequence[int]) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        async with websocket(port) as socket:
            await random_case(socket, rng, rng.choice((1, 3, 30, 3000)), 3)
            await malformed_case(socket, rng)


async def test_good_clients_in_random_pieces_and_their_errors(port: int) -> None:
    await run_cases(port, range(25))


@pytest.mark.long
async def test_thousands_of_good_clients_in_random_pieces_and_their_errors(port: int) -> None:
    await run_cases(port, range(1000, 3000))
