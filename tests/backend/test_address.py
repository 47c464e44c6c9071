"""Addresses: what they mean, what is wrong with bad ones, and who may listen where."""

from __future__ import annotations

import asyncio
import socket
import ssl
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from backend.address import (
    Address,
    AddressError,
    check_trust,
    connect,
    listen,
    parse_address,
    stop_listening,
)
from tests.tcp_server import losing_nothing


class Hangup(asyncio.Protocol):
    """Closes each connection as it comes, so that none outlives its test."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:7400", Address(host="127.0.0.1", port=7400)),
        ("tcp://gpu1:0", Address(host="gpu1")),
        ("tcp://[::1]:7400", Address(host="::1", port=7400)),
        ("unix:///run/headrace/worker.sock", Address(path="/run/headrace/worker.sock")),
    ],
)
def test_address_survives_parsing_and_printing(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "unknown scheme ''"),
        ("gpu1:7400", "unknown scheme 'gpu1'"),
        ("http://gpu1:7400", "unknown scheme 'http'"),
        ("tcp://gpu1", "no port"),
        ("tcp://:7400", "no host"),
        ("tcp://gpu1:99999", "out of range"),
        ("tcp://gpu1:many", "many"),
        ("tcp://gpu1:7400/path", "has no path"),
        ("tcp://user@gpu1:7400", "only a host and port"),
        ("tcp://gpu1:7400?x=1", "only a host and port"),
        ("unix://relative/path", "must be absolute"),
        ("unix:///", "must be absolute"),
        ("unix:///" + "a" * 107, "108 bytes; the limit is 107"),
    ],
)
def test_bad_address_is_named_with_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "text", ["tcp://127.0.0.1:1", "tcp://127.8.9.1:1", "tcp://[::1]:1", "tcp://localhost:1"]
)
def test_loopback_needs_no_trust(text: str) -> None:
    check_trust(parse_address(text), None, None)


@pytest.mark.parametrize("text", ["tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://10.0.0.1:1", "tcp://gpu1:1"])
def test_listening_beyond_loopback_needs_secret_or_tls(text: str) -> None:
    address = parse_address(text)
    for secret in (None, b""):
        with pytest.raises(AddressError, match="refusing to listen"):
            check_trust(address, secret, None)
    check_trust(address, b"secret", None)
    check_trust(address, None, ssl.create_default_context())


async def test_unix_socket_is_for_this_user_only(tmp_path: Path) -> None:
    server, address = await listen(Hangup, Address(path=str(tmp_path / "s")))
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    await connect(Hangup, address)
    await asyncio.sleep(0.05)
    await stop_listening(server)


async def test_dead_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "s"))
    first, _ = await listen(Hangup, address)
    with pytest.raises(AddressError, match="another process listens"):
        await listen(Hangup, address)
    await stop_listening(first)
    assert (tmp_path / "s").exists()
    second, _ = await listen(Hangup, address)
    await stop_listening(second)


def test_live_socket_with_a_full_queue_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stopped, socket.socket(socket.AF_UNIX) as waiting:
        stopped.bind(str(path))
        stopped.listen(0)
        waiting.connect(str(path))
        before = path.stat().st_ino
        with pytest.raises(AddressError, match="refusing to listen"):
            uvloop.run(listen(Hangup, Address(path=str(path))))
        assert path.stat().st_ino == before


async def test_ordinary_file_in_the_sockets_place_is_kept(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(AddressError, match="no socket"):
        await listen(Hangup, Address(path=str(tmp_path / "s")))
    assert (tmp_path / "s").read_text() == "precious"


@pytest.mark.parametrize("loop_of", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_whoever_is_accepted_while_the_port_closes_gets_its_protocol_or_an_end(loop_of: Any) -> None:
    class Known(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(transport)

    async def stop_after(num_steps: int) -> None:
        server, address = await listen(Known, parse_address("tcp://127.0.0.1:0"))
        with socket.create_connection((address.host, address.port)) as client:
            for _ in range(num_steps):
                await asyncio.sleep(0)
            await stop_listening(server)
            for transport in transports:
                transport.close()
            transports.clear()
            client.setblocking(False)
            with suppress(ConnectionError):  # nobody had accepted it
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""

    transports: list[asyncio.BaseTransport] = []
    for num_steps in range(8):  # of the loop: from the client's connection to its protocol, and more
        with losing_nothing(), asyncio.Runner(loop_factory=loop_of) as runner:
            runner.run(stop_after(num_steps))
