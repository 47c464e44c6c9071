"""What a real ZeroMQ socket sends, cut into messages, however it is split."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path

import pytest

from backend.zmtp import HELLO, ZmtpError, ZmtpReader

MESSAGES = [
    [b"first"],
    [b"", b"two frames"],
    [b"x" * 255, b"y" * 256, bytes(70_000)],
    [b""],
    [bytes(range(256))],
]


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """All that a PUSH socket of libzmq sends: its greeting, its READY, these messages."""
    zmq = pytest.importorskip("zmq")
    path = tmp_path_factory.mktemp("zmtp") / "socket"
    taken: list[bytes] = []
    listener = _listening(path)
    reading = threading.Thread(target=_read_all, args=(listener, taken))
    reading.start()
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"ipc://{path}")
        for frames in MESSAGES:
            push.send_multipart(frames)
    reading.join()
    listener.close()
    return b"".join(taken)


def _listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def _read_all(listener: socket.socket, taken: list[bytes]) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(HELLO)
        while data := connection.recv(1 << 16):
            taken.append(data)


def _read(*parts: bytes) -> list[list[bytes]]:
    reader = ZmtpReader()
    return [message for part in parts for message in reader.feed(part)]


def test_messages_of_libzmq_come_whole(wire: bytes) -> None:
    assert _read(wire) == MESSAGES


def test_messages_come_whole_byte_by_byte(wire: bytes) -> None:
    short = wire[: wire.index(b"x" * 255) + 255]
    assert _read(*[short[at : at + 1] for at in range(len(short))]) == MESSAGES[:2]


def test_messages_come_whole_at_every_split(wire: bytes) -> None:
    end = wire.index(b"y" * 256)
    for at in [*range(end), *range(len(wire) - 600, len(wire) + 1)]:
        assert _read(wire[:at], wire[at:]) == MESSAGES, at


def test_messages_come_whole_at_seeded_splits(wire: bytes) -> None:
    rng = random.Random(7)
    for _ in range(100):
        cuts = sorted(rng.choices(range(len(wire) + 1), k=rng.randrange(1, 12)))
        parts = [wire[start:end] for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
        assert _read(*parts) == MESSAGES, cuts


@pytest.mark.parametrize(
    "greeting",
    [
        pytest.param(b"GET / HTTP/1.1\r\n" + bytes(48), id="no-zeromq"),
        pytest.param(HELLO[:10] + b"\x01\x00" + HELLO[12:64], id="version"),
        pytest.param(HELLO[:12] + b"PLAIN" + bytes(15) + HELLO[32:64], id="security"),
    ],
)
def test_other_greetings_are_refused(greeting: bytes) -> None:
    with pytest.raises(ZmtpError, match=greeting[:8].hex()):
        _read(greeting)
