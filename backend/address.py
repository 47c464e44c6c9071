"""Where a link listens or connects: `tcp://HOST:PORT` or `unix:///PATH`, and who may listen where.

Parsing and the trust rule are plain functions; `listen`, `stop_listening` and `connect` touch sockets.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

MAX_UNIX_PATH_BYTES: Final = 107  # sockaddr_un.sun_path holds 108 with its closing zero
KEEPALIVE_S: Final = 30  # a peer machine that vanished without a word is given up after about this long
MAX_UNSENT_BYTES: Final = 128 << 10  # in the kernel; a 1,000-stream step has 13 KB
_WANTED: Final = "expected tcp://HOST:PORT or unix:///PATH"

_P = TypeVar("_P", bound=asyncio.BaseProtocol)


class AddressError(ValueError):
    """A bad address, or one that may not be listened on; the message names it."""


@dataclass(frozen=True, slots=True)
class Address:
    """One end of a link: `path` of a Unix socket, else `host` and `port` (0: any free one, to listen)."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A host name other than `localhost` counts as reachable."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """The address that `text` names. Raises `AddressError`, which names `text` and what is wrong with it."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise AddressError(f"bad address {text!r}: {error}; {_WANTED}") from error
    if parts.query or parts.fragment or parts.username is not None:
        raise AddressError(f"bad address {text!r}: only a host and port, or a path; {_WANTED}")
    if parts.scheme == "unix":
        return _unix(text, parts.netloc, parts.path)
    if parts.scheme != "tcp":
        raise AddressError(f"bad address {text!r}: unknown scheme {parts.scheme!r}; {_WANTED}")
    if parts.path not in ("", "/"):
        raise AddressError(f"bad address {text!r}: a tcp address has no path; {_WANTED}")
    if not parts.hostname:
        raise AddressError(f"bad address {text!r}: no host (0.0.0.0 means every interface); {_WANTED}")
    if port is None:
        raise AddressError(f"bad address {text!r}: no port; {_WANTED}")
    return Address(host=parts.hostname, port=port)


def _unix(text: str, netloc: str, path: str) -> Address:
    if netloc or not path.startswith("/") or path == "/":
        raise AddressError(f"bad address {text!r}: the path must be absolute, with three slashes; {_WANTED}")
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_UNIX_PATH_BYTES:
        raise AddressError(
            f"bad address {text!r}: the path has {num_bytes} bytes; the limit is {MAX_UNIX_PATH_BYTES}"
        )
    return Address(path=path)


def check_trust(address: Address, secret: bytes | None, tls: ssl.SSLContext | None) -> None:
    """Raises `AddressError` where listening would let any machine in: no loopback, no secret, and no TLS that
    asks gateways for a certificate.
    """
    if address.is_loopback or secret or (tls is not None and tls.verify_mode is ssl.CERT_REQUIRED):
        return
    raise AddressError(
        f"refusing to listen on {address}: other machines can reach it, and there is neither a shared secret "
        f"nor TLS with certificates for gateways. Give a secret, give an authority that signs the gateways' "
        f"certificates, or listen on 127.0.0.1."
    )


async def listen(
    factory: Callable[[], asyncio.BaseProtocol], address: Address, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.Server, Address]:
    """Listen; returns the server and the address with its real port. Raises `OSError`, `AddressError`.

    A Unix socket is for this user alone (0600). One left by a dead process is replaced, a live one is not.
    """
    loop = asyncio.get_running_loop()
    if not address.is_unix:
        server = await loop.create_server(factory, address.host, address.port, ssl=tls)
        return server, replace(address, port=server.sockets[0].getsockname()[1])
    await _remove_dead_socket(address)
    server = await loop.create_unix_server(factory, address.path, ssl=tls)
    os.chmod(address.path, 0o600)
    return server, address


async def stop_listening(server: asyncio.Server) -> None:
    """Close the port. Whoever was accepted a moment ago has its protocol when this returns, TLS's at least.

    `Server.close` alone loses such a connection (python/cpython#109564): the socket stays open until the
    collector finds it.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())  # takes nothing from uvloop, which has no such gap
    for _ in range(3):  # the steps from `accept` to `connection_made`
        await asyncio.sleep(0)
    server.close()


async def _remove_dead_socket(address: Address) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.stat(address.path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise AddressError(f"refusing to listen on {address}: there is a file that is no socket")
    try:
        _, writer = await asyncio.open_unix_connection(address.path)
    except ConnectionRefusedError:
        os.unlink(address.path)
        return
    except OSError as error:  # alive, and its queue is full, or it is another user's
        raise AddressError(f"refusing to listen on {address}: the socket cannot be tried: {error}") from error
    writer.close()
    await writer.wait_closed()
    raise AddressError(f"refusing to listen on {address}: another process listens there")


def remove_socket(address: Address) -> None:
    """Take away the socket file of a server that has stopped; nothing for tcp."""
    if address.is_unix:
        try:
            os.unlink(address.path)
        except FileNotFoundError:
            return


async def connect(
    factory: Callable[[], _P], address: Address, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.BaseTransport, _P]:
    """Connect. Raises `OSError` (`ssl.SSLError` is one)."""
    loop = asyncio.get_running_loop()
    if address.is_unix:
        name = "localhost" if tls is not None else None
        return await loop.create_unix_connection(factory, address.path, ssl=tls, server_hostname=name)
    return await loop.create_connection(factory, address.host, address.port, ssl=tls)


def tune(transport: asyncio.BaseTransport) -> None:
    """Let the kernel notice a peer machine that is gone, also when nothing is sent, and hoard little of ours.

    What lies in the kernel's buffer (megabytes, on a fast network) can neither merge nor be overtaken by an
    abort. Only for tcp.
    """
    sock: Any = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S // 3),
        ("TCP_KEEPINTVL", KEEPALIVE_S // 3),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", KEEPALIVE_S * 1000),
        ("TCP_NOTSENT_LOWAT", MAX_UNSENT_BYTES),
    ):
        option = getattr(socket, name, None)  # Linux has all of them, other systems some
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
