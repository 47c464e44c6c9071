"""What the kernel tells of a connection: on real sockets, and where it tells nothing."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from typing import Any, cast

import pytest

from backend.http_socket import Delivery, _num_acked


class Transport:
    """As much of one as is asked."""

    def __init__(self, sock: Any) -> None:
        self.sock = sock
        self.num_buffered = 0

    def get_extra_info(self, name: str) -> Any:
        assert name == "socket"
        return self.sock

    def get_write_buffer_size(self) -> int:
        return self.num_buffered


def delivery_of(sock: Any, num_buffered: int = 0) -> Delivery:
    transport = Transport(sock)
    transport.num_buffered = num_buffered
    return Delivery(cast(asyncio.Transport, transport))


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connection's client and server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        yield client, server


def exchange(pair: Pair, delivery: Delivery) -> None:
    """A request and its response, as they are before a connection is used again."""
    client, server = pair
    delivery.begins(5)
    client.send(b"hello")
    assert server.recv(5) == b"hello"
    server.send(b"hi")
    assert client.recv(2) == b"hi"
    delivery.is_none()


@pytest.mark.parametrize("what", [b"x", b""])
def test_bytes_and_ends_that_wait_are_seen(pair: Pair, what: bytes) -> None:
    client, server = pair
    delivery = delivery_of(client)
    assert not delivery.has_input()
    server.send(what) if what else server.close()
    assert delivery.has_input()
    assert delivery.has_input()  # it has read none of it
    assert client.recv(10) == what


def test_without_a_socket_nothing_is_seen() -> None:
    assert not delivery_of(None).has_input()
    assert delivery_of(None, num_buffered=0).is_none()  # nothing was written either


def test_what_a_closed_server_gets_has_not_come(pair: Pair) -> None:
    client, server = pair
    delivery = delivery_of(client)
    exchange(pair, delivery)
    server.close()
    delivery.begins(5)
    client.send(b"hello")
    assert client.recv(1) == b""
    assert delivery.is_none()


def test_what_a_server_has_read_has_come(pair: Pair) -> None:
    client, server = pair
    delivery = delivery_of(client)
    for _ in range(3):
        exchange(pair, delivery)
    delivery.begins(5)
    client.send(b"hello")
    assert server.recv(5) == b"hello"
    server.close()
    assert client.recv(1) == b""
    assert not delivery.is_none()


def test_what_a_machine_has_received_has_come_before_its_server_reads_it(pair: Pair) -> None:
    client, server = pair
    delivery = delivery_of(client)
    exchange(pair, delivery)
    delivery.begins(5)
    client.send(b"hello")
    server.send(b"early")  # it acknowledges what its machine has received
    assert client.recv(5) == b"early"
    assert not delivery.is_none()


@pytest.mark.parametrize("count", [None, 0, 1])
def test_where_the_kernel_counts_nothing_only_what_has_not_left_has_not_come(count: int | None) -> None:
    """A Unix socket, or a network whose bytes are handed from socket to socket: then only the SYN counts."""

    class Sock:
        family = socket.AF_UNIX if count is None else socket.AF_INET

        def fileno(self) -> int:
            return 0

        def getsockopt(self, level: int, name: int, size: int) -> bytes:
            assert count is not None
            return struct.pack("=120xQ", count)

    for num_buffered, is_none in ((5, True), (4, False), (0, False)):
        delivery = delivery_of(Sock(), num_buffered)
        for _ in range(2):
            delivery.begins(5)
            assert delivery.is_none() == is_none


def test_a_closed_or_older_socket_tells_nothing(pair: Pair) -> None:
    class Old:
        family = socket.AF_INET

        def getsockopt(self, level: int, name: int, size: int) -> bytes:
            return bytes(104)

    assert _num_acked(Old()) is None
    pair[0].close()
    assert _num_acked(pair[0]) is None
    assert _num_acked(None) is None
